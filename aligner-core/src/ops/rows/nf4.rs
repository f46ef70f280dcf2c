//! The 4-bit `NormalFloat` type with double quantisation, as in `QLoRA` (Dettmers et al. 2023, arXiv:2305.14314,
//! section 3 and appendix E): a value is one of sixteen quantiles of a normal distribution, times the largest
//! magnitude of its block; these magnitudes are bytes about their mean.

use rayon::prelude::*;

use super::vector::{LANES, Vector};
use super::weight::Columns;

/// What a nibble stands for: `bitsandbytes`' table, which has a zero and equally many values on both sides of it but
/// one.
#[expect(clippy::excessive_precision, reason = "the published values")]
pub(super) const CODE: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// Values of a block, one after the other in the row-major matrix: as in `bitsandbytes`, a block may go on in the next
/// row.
const BLOCK: usize = 64;
/// Blocks whose magnitudes share a step.
const STEP_BLOCKS: usize = 256;
/// Values that one task packs: whole steps.
const PIECE: usize = BLOCK * STEP_BLOCKS;

/// Bytes that so many values take.
pub(super) fn bytes(values: usize) -> usize {
    let blocks = values.div_ceil(BLOCK);
    values.div_ceil(2) + blocks + blocks.div_ceil(STEP_BLOCKS) * size_of::<f32>()
}

/// Whether a matrix is whole blocks, and its rows whole words.
pub(super) fn fits([outputs, inputs]: [usize; 2]) -> bool {
    inputs.is_multiple_of(LANES) && (outputs * inputs).is_multiple_of(BLOCK)
}

/// A packed matrix.
#[derive(Clone)]
pub(super) struct Packed {
    /// Eight nibbles each.
    words: Vec<u32>,
    /// A magnitude for each block, in steps from the mean.
    magnitudes: Vec<i8>,
    /// A step for each [`STEP_BLOCKS`] magnitudes.
    steps: Vec<f32>,
    mean: f32,
}

impl Packed {
    /// Packs whole blocks.
    pub(super) fn pack(data: &[f32]) -> Self {
        let largest = |block: &[f32]| block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let exact: Vec<f32> = data.par_chunks(BLOCK).map(largest).collect();
        let mean = exact.iter().map(|value| f64::from(*value)).sum::<f64>() / exact.len().max(1) as f64;
        let mean = mean as f32;
        let of_step = |exact: &[f32]| {
            let furthest = exact.iter().fold(0.0f32, |most, value| most.max((value - mean).abs()));
            let step = furthest / 127.0;
            let round = move |value: &f32| if step > 0.0 { ((value - mean) / step).round() as i8 } else { 0 };
            (step, exact.iter().map(round).collect::<Vec<i8>>())
        };
        let (steps, magnitudes): (Vec<f32>, Vec<Vec<i8>>) = exact.chunks(STEP_BLOCKS).map(of_step).unzip();
        let mut words = vec![0; data.len() / LANES];
        let pieces = data.par_chunks(PIECE).zip(exact.par_chunks(STEP_BLOCKS));
        words.par_chunks_mut(PIECE / LANES).zip(pieces).for_each(|(words, (values, exact))| {
            let blocks = words.chunks_mut(BLOCK / LANES).zip(values.chunks(BLOCK));
            blocks.zip(exact).for_each(|((words, values), largest)| pack_block(values, *largest, words));
        });
        Self { words, magnitudes: magnitudes.concat(), steps, mean }
    }

    pub(super) fn view(&self, shape: [usize; 2]) -> Nf4<'_> {
        let Self { words, magnitudes, steps, mean } = self;
        Nf4 { words, magnitudes, steps, mean: *mean, shape }
    }

    pub(super) fn bytes(&self) -> usize {
        (self.words.len() + self.steps.len()) * 4 + self.magnitudes.len()
    }
}

/// The nearest codes of a block's values over its largest magnitude.
fn pack_block(values: &[f32], largest: f32, words: &mut [u32]) {
    let inverse = if largest > 0.0 { 1.0 / largest } else { 0.0 };
    for (word, values) in words.iter_mut().zip(values.chunks(LANES)) {
        *word = values.iter().rev().fold(0, |word, value| word << 4 | nearest(value * inverse));
    }
}

/// The place of the code that is nearest to `value`: how many of the middles between two codes are below it.
fn nearest(value: f32) -> u32 {
    let above = |pair: &[f32]| u32::from(value > 0.5 * (pair[0] + pair[1]));
    CODE.windows(2).map(above).sum()
}

/// Nibbles of the 4-bit `NormalFloat` type, with a magnitude for each block of 64.
#[derive(Debug, Clone, Copy)]
pub struct Nf4<'a> {
    words: &'a [u32],
    magnitudes: &'a [i8],
    steps: &'a [f32],
    mean: f32,
    shape: [usize; 2],
}

impl Nf4<'_> {
    pub(super) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// What codes of the block that has value `at` are multiplied by.
    ///
    /// # Safety
    /// There is a value `at`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "must end up in a function with the features")]
    unsafe fn magnitude(&self, at: usize) -> f32 {
        let block = at / BLOCK;
        // SAFETY: each value has a block, and each block a step.
        let (steps, step) = unsafe {
            (*self.magnitudes.get_unchecked(block), *self.steps.get_unchecked(block / STEP_BLOCKS))
        };
        // A block of zeros beside larger ones may come out below zero.
        (f32::from(steps) * step + self.mean).max(0.0)
    }
}

#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
impl Columns for Nf4<'_> {
    const BITS: usize = 4;

    fn address(&self, column: usize) -> *const u8 {
        self.words.as_ptr().wrapping_add(column * self.shape[1] / LANES).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(&self, column: usize, k: usize) -> V {
        let at = column * self.shape[1] + k;
        // SAFETY: as the caller promises; rows are whole words, and k a multiple of eight.
        unsafe {
            let word = *self.words.get_unchecked(at / LANES);
            V::look_up(&CODE, word).mul(V::splat(self.magnitude(at)))
        }
    }

    #[inline(always)]
    fn get(&self, column: usize, k: usize) -> f32 {
        let at = column * self.shape[1] + k;
        let code = CODE[(self.words[at / LANES] >> (4 * (at % LANES)) & 15) as usize];
        // SAFETY: the word of this value was there.
        code * unsafe { self.magnitude(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PackedKind, PackedWeight};
    use super::*;
    use crate::ops::testing::values;

    /// The standard normal distribution's quantile, by bisection of its integral (Simpson's rule).
    fn quantile(p: f64) -> f64 {
        let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let below = |x: f64| {
            let (parts, sign) = (400, x.signum());
            let width = x.abs() / f64::from(parts);
            let weight = |i: i32| if i == 0 || i == parts { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
            let sum: f64 = (0..=parts).map(|i| weight(i) * density(f64::from(i) * width)).sum();
            0.5 + sign * sum * width / 3.0
        };
        let (mut low, mut high) = (-6.0, 6.0);
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            if below(middle) < p { low = middle } else { high = middle }
        }
        0.5 * (low + high)
    }

    #[test]
    fn the_code_is_the_papers() {
        // Section 3 and bitsandbytes' create_normal_map: evenly spaced quantiles, eight from `offset` to a half on
        // one side and seven on the other, and zero, over the largest.
        let offset = 0.967_708_3;
        let side = |count: u32| {
            let step = (0.5 - offset) / f64::from(count);
            (0..count).map(move |i| quantile(offset + f64::from(i) * step))
        };
        let mut code: Vec<f64> = side(8).chain(side(7).map(|value| -value)).chain([0.0]).collect();
        let largest = code.iter().copied().fold(0.0, f64::max);
        for value in &mut code {
            *value /= largest;
        }
        code.sort_by(f64::total_cmp);
        for (got, expected) in CODE.iter().zip(code) {
            assert!((f64::from(*got) - expected).abs() < 2e-7, "{got} {expected}");
        }
    }

    #[test]
    fn values_are_the_nearest_codes_of_their_blocks() {
        // Blocks of different magnitudes, so that the second quantisation has something to do; rows are not blocks.
        let shape = [32 * 257, 48];
        let mut data = values(shape[0] * shape[1], 3);
        for (block, values) in data.chunks_mut(64).enumerate() {
            let factor = 0.02 * (1.0 + (block % 7) as f32);
            for value in values {
                *value *= factor;
            }
        }
        data[64..128].fill(0.0);
        let packed = PackedWeight::pack(&data, shape, PackedKind::Nf4);
        assert_eq!(packed.bytes(), PackedKind::Nf4.bytes(data.len()));
        let unpacked = packed.unpacked();
        // Plainly, in f64: each block by its own largest magnitude, and that one in 127ths of the furthest from the mean.
        let largest = |block: &[f32]| block.iter().fold(0.0f64, |most, v| most.max(f64::from(*v).abs()));
        let exact: Vec<f64> = data.chunks(64).map(largest).collect();
        let mean = exact.iter().sum::<f64>() / exact.len() as f64;
        for (at, (block, got)) in data.chunks(64).zip(unpacked.chunks(64)).enumerate() {
            let group = &exact[at / 256 * 256..exact.len().min((at / 256 + 1) * 256)];
            let step = group.iter().fold(0.0f64, |most, value| most.max((value - mean).abs())) / 127.0;
            let magnitude = (((exact[at] - mean) / step).round() * step + mean).max(0.0);
            assert!((magnitude - exact[at]).abs() <= 0.5001 * step);
            for (value, got) in block.iter().zip(got) {
                let scaled = if exact[at] > 0.0 { f64::from(*value) / exact[at] } else { 0.0 };
                let distance = |code: &f32| (f64::from(*code) - scaled).abs();
                let least = CODE.iter().map(distance).fold(f64::MAX, f64::min);
                let code = f64::from(*got) / magnitude.max(1e-30);
                assert!((code - scaled).abs() < least + 1e-5, "block {at}: {value} became {got}");
            }
        }
        assert!(unpacked[64..128].iter().all(|value| *value == 0.0), "a block of zeros stays one");
    }
}
