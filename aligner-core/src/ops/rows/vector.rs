//! Eight f32 lanes: a register where the processor has AVX2 and FMA, an array elsewhere.

/// Lanes of a vector.
pub(super) const LANES: usize = 8;

/// What the row kernels need of a vector. Every method is inlined into a function that was compiled
/// for the processor's features.
///
/// # Safety
/// Of all methods: the processor has the implementation's features; pointers are valid for [`LANES`]
/// elements.
pub(super) trait Vector: Copy {
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + sum`.
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self;
    /// Eight bf16 values.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Eight signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Eight nibbles of a word, lowest first, each less 8.
    unsafe fn load_i4(word: u32) -> Self;
    /// What the eight nibbles of a word, lowest first, stand for in `code`.
    unsafe fn look_up(code: &[f32; 16], word: u32) -> Self;
    /// The lanes' sums of four vectors, each `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`.
    unsafe fn sums(four: [Self; 4]) -> [f32; 4];
}

#[cfg(target_arch = "x86_64")]
pub(super) mod wide {
    use std::arch::x86_64 as x86;

    use super::Vector;

    #[derive(Clone, Copy)]
    pub(in super::super) struct Wide(x86::__m256);

    #[expect(clippy::inline_always, reason = "must end up in a function with the features")]
    impl Vector for Wide {
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: of this and all below: as the trait says.
            unsafe { Self(x86::_mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { Self(x86::_mm256_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { x86::_mm256_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: see above.
            unsafe { Self(x86::_mm256_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            // SAFETY: see above.
            unsafe { Self(x86::_mm256_fmadd_ps(self.0, factor.0, sum.0)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: see above.
            unsafe {
                let halves = x86::_mm256_cvtepu16_epi32(x86::_mm_loadu_si128(from.cast()));
                Self(x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<16>(halves)))
            }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: see above.
            unsafe {
                let bytes = x86::_mm256_cvtepi8_epi32(x86::_mm_loadl_epi64(from.cast()));
                Self(x86::_mm256_cvtepi32_ps(bytes))
            }
        }

        #[inline(always)]
        unsafe fn load_i4(word: u32) -> Self {
            // SAFETY: see above.
            unsafe {
                let shifts = x86::_mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                let nibbles = x86::_mm256_srlv_epi32(x86::_mm256_set1_epi32(word.cast_signed()), shifts);
                let nibbles = x86::_mm256_and_si256(nibbles, x86::_mm256_set1_epi32(15));
                Self(x86::_mm256_cvtepi32_ps(x86::_mm256_sub_epi32(nibbles, x86::_mm256_set1_epi32(8))))
            }
        }

        #[inline(always)]
        unsafe fn look_up(code: &[f32; 16], word: u32) -> Self {
            // SAFETY: see above; the loads are of the code's halves.
            unsafe {
                let shifts = x86::_mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                let at = x86::_mm256_srlv_epi32(x86::_mm256_set1_epi32(word.cast_signed()), shifts);
                let half = |first: usize| {
                    // Of an index, the lowest three bits count.
                    x86::_mm256_permutevar8x32_ps(x86::_mm256_loadu_ps(code.as_ptr().add(first)), at)
                };
                // The fourth bit as the sign, which picks.
                let pick = x86::_mm256_castsi256_ps(x86::_mm256_slli_epi32::<28>(at));
                Self(x86::_mm256_blendv_ps(half(0), half(8), pick))
            }
        }

        #[inline(always)]
        unsafe fn sums([a, b, c, d]: [Self; 4]) -> [f32; 4] {
            let mut out = [0.0; 4];
            // SAFETY: see above; the store is to four floats.
            unsafe {
                let pairs = [x86::_mm256_hadd_ps(a.0, b.0), x86::_mm256_hadd_ps(c.0, d.0)];
                let quads = x86::_mm256_hadd_ps(pairs[0], pairs[1]);
                let high = x86::_mm256_extractf128_ps::<1>(quads);
                let sums = x86::_mm_add_ps(x86::_mm256_castps256_ps128(quads), high);
                x86::_mm_storeu_ps(out.as_mut_ptr(), sums);
            }
            out
        }
    }
}

/// The array, for any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    fn map2(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Vector for Portable {
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's pointer is valid for eight elements.
        Self(std::array::from_fn(|lane| unsafe { *from.add(lane) }))
    }

    unsafe fn store(self, to: *mut f32) {
        for (lane, value) in self.0.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { *to.add(lane) = value }
        }
    }

    unsafe fn mul(self, other: Self) -> Self {
        self.map2(other, |a, b| a * b)
    }

    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
        self.map2(factor, |a, b| a * b).map2(sum, |a, b| a + b)
    }

    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        Self(std::array::from_fn(|lane| f32::from_bits(u32::from(unsafe { *from.add(lane) }) << 16)))
    }

    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above.
        Self(std::array::from_fn(|lane| f32::from(unsafe { *from.add(lane) })))
    }

    unsafe fn load_i4(word: u32) -> Self {
        Self(std::array::from_fn(|lane| (word >> (4 * lane) & 15) as f32 - 8.0))
    }

    unsafe fn look_up(code: &[f32; 16], word: u32) -> Self {
        Self(std::array::from_fn(|lane| code[(word >> (4 * lane) & 15) as usize]))
    }

    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        four.map(|Self(l)| ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])))
    }
}

/// Fetches a line of the cache.
#[inline(always)]
pub(super) fn prefetch<T>(from: *const T) {
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing; any address will do.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(from.cast());
    }
}

/// Defines an entry that runs `$kernel::<V>` on the widest vector that this processor has.
macro_rules! dispatched {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $kernel:ident) => {
        $(#[$meta])*
        $vis unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                unsafe fn wide($($arg: $ty),*) {
                    // SAFETY: as the caller of the outer function promises.
                    unsafe { $kernel::<$crate::ops::rows::vector::wide::Wide>($($arg),*) }
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: this processor has both features; the rest is the caller's promise.
                    return unsafe { wide($($arg),*) };
                }
            }
            // SAFETY: as the caller promises.
            unsafe { $kernel::<$crate::ops::rows::vector::Portable>($($arg),*) }
        }
    };
}
pub(super) use dispatched;
