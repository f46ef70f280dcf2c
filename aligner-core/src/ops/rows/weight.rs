//! Weights of a product of few rows: the trainer's own f32, or smaller copies of them.

use std::ops::Range;

use rayon::prelude::*;

use super::nf4::{self, Nf4};
use super::vector::{LANES, Vector, dispatched};
use crate::ops::simd::vectorized;

/// Values that share a scale in [`Int8`] and [`Int4`].
pub const GROUP: usize = 32;

/// Values that are packed as one task: whole groups.
const PIECE: usize = 1 << 14;

/// A matrix `[out, in]`.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// The trainer's own layout.
    F32(F32<'a>),
    /// Rounded to bf16.
    Bf16(Bf16<'a>),
    /// Bytes with a scale for each [`GROUP`] of a row.
    Int8(Int8<'a>),
    /// Nibbles with a scale for each [`GROUP`] of a row.
    Int4(Int4<'a>),
    /// Nibbles of the 4-bit `NormalFloat` type.
    Nf4(Nf4<'a>),
}

impl Weight<'_> {
    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32(w) => w.shape,
            Self::Bf16(w) => w.shape,
            Self::Int8(w) => w.shape,
            Self::Int4(w) => w.shape,
            Self::Nf4(w) => w.shape(),
        }
    }

    /// Writes some rows' `columns` into `out`, one row after the other: the values that a product reads, bit for
    /// bit.
    ///
    /// # Panics
    /// Where the part is outside of the matrix, or starts at a column that is no multiple of eight, or `out` is
    /// not as large: the caller's mistake.
    pub fn unpack(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        let [outputs, inputs] = self.shape();
        assert!(rows.end <= outputs && columns.end <= inputs, "part of a weight");
        assert!(columns.start.is_multiple_of(LANES), "first column of a weight's part");
        assert!(out.len() == rows.len() * columns.len(), "room for a weight's part");
        // SAFETY: the part is inside of the matrix, and `out` has its size.
        unsafe {
            match *self {
                Self::F32(weight) => unpack_f32(weight, rows, columns, out),
                Self::Bf16(weight) => unpack_bf16(weight, rows, columns, out),
                Self::Int8(weight) => unpack_int8(weight, rows, columns, out),
                Self::Int4(weight) => unpack_int4(weight, rows, columns, out),
                Self::Nf4(weight) => unpack_nf4(weight, rows, columns, out),
            }
        }
    }
}

macro_rules! unpack {
    ($name:ident, $kernel:ident, $weight:ident) => {
        dispatched!(fn $name(weight: $weight<'_>, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) = $kernel);
        #[inline(always)]
        unsafe fn $kernel<V: Vector>(
            weight: $weight<'_>,
            rows: Range<usize>,
            columns: Range<usize>,
            out: &mut [f32],
        ) {
            // SAFETY: as the caller promises.
            unsafe { unpack_part::<V, _>(&weight, rows, columns, out) }
        }
    };
}
unpack!(unpack_f32, f32_part, F32);
unpack!(unpack_bf16, bf16_part, Bf16);
unpack!(unpack_int8, int8_part, Int8);
unpack!(unpack_int4, int4_part, Int4);
unpack!(unpack_nf4, nf4_part, Nf4);

/// # Safety
/// The part is inside of the matrix, its first column a multiple of eight, and `out` has its size.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn unpack_part<V: Vector, W: Columns>(
    weight: &W,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let width = columns.len();
    let whole = width / LANES * LANES;
    for (row, out) in rows.zip(out.chunks_exact_mut(width.max(1))) {
        let mut at = 0;
        while at < whole {
            // SAFETY: eight columns are left in the row, and in `out`.
            unsafe { weight.load::<V>(row, columns.start + at).store(out.as_mut_ptr().add(at)) };
            at += LANES;
        }
        for (out, column) in out[whole..].iter_mut().zip(columns.start + whole..) {
            *out = weight.get(row, column);
        }
    }
}

/// Columns of the transposed matrix, along the inner dimension.
pub(super) trait Columns {
    /// Bits of an element, scales left out.
    const BITS: usize;
    /// Where a column starts; it may be past the last.
    fn address(&self, column: usize) -> *const u8;
    /// Eight elements from `k`.
    ///
    /// # Safety
    /// The elements are inside of the matrix; see [`Vector`].
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V;
    /// One element.
    fn get(&self, column: usize, k: usize) -> f32;
}

/// f32 values.
#[derive(Debug, Clone, Copy)]
pub struct F32<'a> {
    data: &'a [f32],
    shape: [usize; 2],
}

impl<'a> F32<'a> {
    /// A row-major matrix.
    ///
    /// # Panics
    /// Where `data` has another size.
    pub fn new(data: &'a [f32], outputs: usize, inputs: usize) -> Self {
        assert_eq!(data.len(), outputs * inputs, "elements of a weight");
        Self { data, shape: [outputs, inputs] }
    }
}

#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
impl Columns for F32<'_> {
    const BITS: usize = 32;

    fn address(&self, column: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(column * self.shape[1]).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe { V::load(self.data.as_ptr().add(column * self.shape[1] + k)) }
    }

    #[inline(always)]
    fn get(&self, column: usize, k: usize) -> f32 {
        self.data[column * self.shape[1] + k]
    }
}

/// bf16 values.
#[derive(Debug, Clone, Copy)]
pub struct Bf16<'a> {
    data: &'a [u16],
    shape: [usize; 2],
}

#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
impl Columns for Bf16<'_> {
    const BITS: usize = 16;

    fn address(&self, column: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(column * self.shape[1]).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe { V::load_bf16(self.data.as_ptr().add(column * self.shape[1] + k)) }
    }

    #[inline(always)]
    fn get(&self, column: usize, k: usize) -> f32 {
        f32::from_bits(u32::from(self.data[column * self.shape[1] + k]) << 16)
    }
}

/// Bytes, symmetric about zero.
#[derive(Debug, Clone, Copy)]
pub struct Int8<'a> {
    data: &'a [i8],
    /// `[out, in / GROUP]`.
    scales: &'a [f32],
    shape: [usize; 2],
}

#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
impl Columns for Int8<'_> {
    const BITS: usize = 8;

    fn address(&self, column: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(column * self.shape[1]).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V {
        let at = column * self.shape[1] + k;
        // SAFETY: as the caller promises; rows are whole groups.
        unsafe {
            V::load_i8(self.data.as_ptr().add(at)).mul(V::splat(*self.scales.get_unchecked(at / GROUP)))
        }
    }

    #[inline(always)]
    fn get(&self, column: usize, k: usize) -> f32 {
        let at = column * self.shape[1] + k;
        f32::from(self.data[at]) * self.scales[at / GROUP]
    }
}

/// Nibbles, eight in a word, each 8 more than its value.
#[derive(Debug, Clone, Copy)]
pub struct Int4<'a> {
    words: &'a [u32],
    /// `[out, in / GROUP]`.
    scales: &'a [f32],
    shape: [usize; 2],
}

#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
impl Columns for Int4<'_> {
    const BITS: usize = 4;

    fn address(&self, column: usize) -> *const u8 {
        self.words.as_ptr().wrapping_add(column * self.shape[1] / 8).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V {
        let at = column * self.shape[1] + k;
        // SAFETY: as the caller promises; rows are whole groups, and k a multiple of eight.
        unsafe {
            let word = *self.words.get_unchecked(at / 8);
            V::load_i4(word).mul(V::splat(*self.scales.get_unchecked(at / GROUP)))
        }
    }

    #[inline(always)]
    fn get(&self, column: usize, k: usize) -> f32 {
        let at = column * self.shape[1] + k;
        ((self.words[at / 8] >> (4 * (at % 8)) & 15) as f32 - 8.0) * self.scales[at / GROUP]
    }
}

/// How a copy of the weights is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedKind {
    /// 16 bits a value.
    Bf16,
    /// 8 bits a value and a scale for each [`GROUP`].
    Int8,
    /// 4 bits a value and a scale for each [`GROUP`]; an engine takes [`Self::Int8`] for the head.
    Int4,
    /// 4 bits a value, which stand for quantiles of a normal distribution, and 8 bits of scale for each 64 (`NF4`
    /// with double quantisation: Dettmers et al. 2023, arXiv:2305.14314); the head as with [`Self::Int4`].
    Nf4,
}

impl PackedKind {
    /// Bytes that so many values take, their scales included.
    pub fn bytes(self, values: usize) -> usize {
        let scales = values.div_ceil(GROUP) * size_of::<f32>();
        match self {
            Self::Bf16 => 2 * values,
            Self::Int8 => values + scales,
            Self::Int4 => values.div_ceil(2) + scales,
            Self::Nf4 => nf4::bytes(values),
        }
    }

    /// What a head is stored as: its rounding is in every logit.
    #[must_use]
    pub fn of_head(self) -> Self {
        match self {
            Self::Int4 | Self::Nf4 => Self::Int8,
            other => other,
        }
    }

    /// Whether a matrix `[out, in]` can be stored so; else it is kept as bf16.
    pub fn fits(self, [outputs, inputs]: [usize; 2]) -> bool {
        match self {
            Self::Bf16 => true,
            Self::Int8 | Self::Int4 => inputs.is_multiple_of(GROUP),
            Self::Nf4 => nf4::fits([outputs, inputs]),
        }
    }
}

/// A smaller copy of a matrix.
#[derive(Clone)]
pub struct PackedWeight {
    data: PackedData,
    shape: [usize; 2],
}

#[derive(Clone)]
enum PackedData {
    Bf16(Vec<u16>),
    Int8(Vec<i8>, Vec<f32>),
    Int4(Vec<u32>, Vec<f32>),
    Nf4(nf4::Packed),
}

impl std::fmt::Debug for PackedWeight {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "PackedWeight({:?}, {:?})", self.kind(), self.shape)
    }
}

impl PackedWeight {
    /// Packs a row-major matrix `[out, in]`, as bf16 where it does not fit what `kind` asks for
    /// ([`PackedKind::fits`]).
    pub fn pack(data: &[f32], [outputs, inputs]: [usize; 2], kind: PackedKind) -> Self {
        let kind = if kind.fits([outputs, inputs]) { kind } else { PackedKind::Bf16 };
        let pieces = data.par_chunks(PIECE);
        let data = match kind {
            PackedKind::Bf16 => {
                let mut halves = vec![0; data.len()];
                halves
                    .par_chunks_mut(PIECE)
                    .zip(pieces)
                    .for_each(|(halves, values)| pack_bf16(values, halves));
                PackedData::Bf16(halves)
            }
            PackedKind::Int8 => {
                let (mut bytes, mut scales) = (vec![0; data.len()], vec![0.0; data.len() / GROUP]);
                let out = bytes.par_chunks_mut(PIECE).zip(scales.par_chunks_mut(PIECE / GROUP));
                out.zip(pieces).for_each(|((bytes, scales), values)| pack_int8(values, bytes, scales));
                PackedData::Int8(bytes, scales)
            }
            PackedKind::Int4 => {
                let (mut words, mut scales) = (vec![0; data.len() / 8], vec![0.0; data.len() / GROUP]);
                let out = words.par_chunks_mut(PIECE / 8).zip(scales.par_chunks_mut(PIECE / GROUP));
                out.zip(pieces).for_each(|((words, scales), values)| pack_int4(values, words, scales));
                PackedData::Int4(words, scales)
            }
            PackedKind::Nf4 => PackedData::Nf4(nf4::Packed::pack(data)),
        };
        Self { data, shape: [outputs, inputs] }
    }

    /// The copy, for a product.
    pub fn view(&self) -> Weight<'_> {
        let shape = self.shape;
        match &self.data {
            PackedData::Bf16(data) => Weight::Bf16(Bf16 { data, shape }),
            PackedData::Int8(data, scales) => Weight::Int8(Int8 { data, scales, shape }),
            PackedData::Int4(words, scales) => Weight::Int4(Int4 { words, scales, shape }),
            PackedData::Nf4(packed) => Weight::Nf4(packed.view(shape)),
        }
    }

    /// How it is stored.
    pub fn kind(&self) -> PackedKind {
        match &self.data {
            PackedData::Bf16(_) => PackedKind::Bf16,
            PackedData::Int8(..) => PackedKind::Int8,
            PackedData::Int4(..) => PackedKind::Int4,
            PackedData::Nf4(_) => PackedKind::Nf4,
        }
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// All values, `[out, in]` in row-major order.
    pub fn unpacked(&self) -> Vec<f32> {
        let [outputs, inputs] = self.shape;
        let mut out = vec![0.0; outputs * inputs];
        out.par_chunks_mut(inputs.max(1)).enumerate().for_each(|(row, out)| {
            self.view().unpack(row..row + 1, 0..inputs, out);
        });
        out
    }

    /// Bytes of the copy.
    pub fn bytes(&self) -> usize {
        match &self.data {
            PackedData::Bf16(data) => data.len() * 2,
            PackedData::Int8(data, scales) => data.len() + scales.len() * 4,
            PackedData::Int4(words, scales) => (words.len() + scales.len()) * 4,
            PackedData::Nf4(packed) => packed.bytes(),
        }
    }
}

vectorized! {
    fn pack_bf16(values: &[f32], halves: &mut [u16]) {
        halves.iter_mut().zip(values).for_each(|(half, &value)| *half = to_bf16(value));
    }
}

vectorized! {
    fn pack_int8(values: &[f32], bytes: &mut [i8], scales: &mut [f32]) {
        let groups = bytes.as_chunks_mut::<GROUP>().0.iter_mut().zip(values.as_chunks::<GROUP>().0);
        for ((bytes, values), scale) in groups.zip(scales) {
            *scale = magnitude(values) / 127.0;
            let inverse = inverse(*scale);
            for (byte, value) in bytes.iter_mut().zip(values) {
                *byte = rounded(value * inverse) as i8;
            }
        }
    }
}

vectorized! {
    fn pack_int4(values: &[f32], words: &mut [u32], scales: &mut [f32]) {
        let groups = words.as_chunks_mut::<{ GROUP / 8 }>().0.iter_mut().zip(values.as_chunks::<GROUP>().0);
        for ((words, values), scale) in groups.zip(scales) {
            // The value that is furthest from zero is -8: all sixteen steps are used.
            let magnitude = magnitude(values);
            *scale = if values.contains(&magnitude) { magnitude / -8.0 } else { magnitude / 8.0 };
            let inverse = inverse(*scale);
            let nibbles: [u32; GROUP] =
                std::array::from_fn(|i| (rounded(values[i] * inverse) + 8).clamp(0, 15) as u32);
            for (word, nibbles) in words.iter_mut().zip(nibbles.as_chunks::<8>().0) {
                *word = nibbles.iter().rev().fold(0, |word, nibble| word << 4 | nibble);
            }
        }
    }
}

/// The largest distance from zero.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn magnitude(values: &[f32; GROUP]) -> f32 {
    let mut lanes = [0.0f32; 8];
    for values in values.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane = lane.max(value.abs());
        }
    }
    lanes.into_iter().fold(0.0, f32::max)
}

/// The nearest integer, for values below 2^22: the bits of a float in which the unit is the last place.
#[inline(always)]
fn rounded(value: f32) -> i32 {
    const UNITS: f32 = 12_582_912.0;
    (value + UNITS).to_bits().wrapping_sub(UNITS.to_bits()).cast_signed()
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Round to nearest, ties to even; NaN stays NaN.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::super::{Product, products};
    use super::*;
    use crate::ops::testing::values;

    fn multiplied(x: &[f32], rows: usize, weight: Weight<'_>) -> Vec<f32> {
        let mut out = vec![0.0; rows * weight.shape()[0]];
        products(x, rows, [Product { weight, bias: None, out: &mut out, add: false }]);
        out
    }

    #[test]
    fn packed_products_are_those_of_the_unpacked_values_in_several_runs_too() {
        let (rows, inputs, outputs) = (12, 1600, 12);
        let (x, w) = (values(rows * inputs, 1), values(outputs * inputs, 2));
        let run = |weight: Weight<'_>| multiplied(&x, rows, weight);
        for kind in [PackedKind::Bf16, PackedKind::Int8, PackedKind::Int4, PackedKind::Nf4] {
            let packed = PackedWeight::pack(&w, [outputs, inputs], kind);
            let values = packed.unpacked();
            assert_eq!(run(packed.view()), run(Weight::F32(F32::new(&values, outputs, inputs))), "{kind:?}");
        }
    }

    #[test]
    fn packed_products_are_as_close_as_their_format() {
        let (rows, inputs, outputs) = (3, 128, 50);
        let (x, w) = (values(rows * inputs, 1), values(outputs * inputs, 2));
        let run = |weight: Weight<'_>| multiplied(&x, rows, weight);
        let exact = run(Weight::F32(F32::new(&w, outputs, inputs)));
        let norm = exact.iter().map(|v| v * v).sum::<f32>().sqrt();
        for (kind, limit, bytes) in [
            (PackedKind::Bf16, 4e-3, 2 * w.len()),
            (PackedKind::Int8, 1e-2, w.len() + w.len() / 8),
            (PackedKind::Int4, 0.15, w.len() / 2 + w.len() / 8),
            (PackedKind::Nf4, 0.15, PackedKind::Nf4.bytes(w.len())),
        ] {
            let packed = PackedWeight::pack(&w, [outputs, inputs], kind);
            let got = run(packed.view());
            let distance = got.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
            assert!(distance > 0.0 && distance < limit * norm, "{kind:?}: {}", distance / norm);
            assert_eq!(packed.bytes(), bytes, "{kind:?}");
            let values = packed.unpacked();
            assert_eq!(
                run(Weight::F32(F32::new(&values, outputs, inputs))),
                got,
                "{kind:?}: the same values"
            );
            let mut part = vec![0.0; 3 * 20];
            packed.view().unpack(7..10, 40..60, &mut part);
            for (row, part) in part.chunks(20).enumerate() {
                assert_eq!(part, &values[(7 + row) * inputs + 40..][..20], "{kind:?}");
            }
        }
    }
}
