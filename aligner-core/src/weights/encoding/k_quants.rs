//! GGUF "K" blocks of 256: eight or sixteen runs, each with a quantised scale of its own.

use super::half_at;

/// Block layout: 16 bytes of scales and minima, 64 bytes of two-bit `q`, `f16 d`, `f16 dmin`.
///
/// `x = d scale q - dmin minimum`, for each 16 elements a byte with the scale in its low four bits and the minimum in
/// its high ones. Each half of 128 elements takes 32 bytes, and run `r` of its four runs of 32 the bits at `2 r`.
pub(super) fn decode_q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    for (run, out) in out.chunks_mut(32).enumerate() {
        let quants = &block[16 + run / 4 * 32..][..32];
        for (at, out) in out.iter_mut().enumerate() {
            let packed = block[run * 2 + at / 16];
            let quant = quants[at] >> (2 * (run % 4)) & 3;
            let (scale, minimum) = (scale * f32::from(packed & 15), minimum * f32::from(packed >> 4));
            *out = scale * f32::from(quant) - minimum;
        }
    }
}

/// Block layout: 32 bytes of high bits, 64 bytes of low two bits as in [`decode_q2_k`], 12 bytes of scales, `f16 d`.
///
/// `x = d (scale - 32) q`, a scale for each 16 elements. Bit `r` of byte `i` of the high bits belongs to element `i` of
/// run `r`; where it is not set, `q` is the low bits less 4. Of the 16 scales of six bits, bytes 0-7 hold the lower four
/// bits (those of the first eight low), and bytes 8-11 the upper two: of scale `s` in byte `8 + s % 4` at `2 (s / 4)`.
pub(super) fn decode_q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, packed) = (&block[..32], &block[96..108]);
    let scale = half_at(block, 108);
    for (run, out) in out.chunks_mut(32).enumerate() {
        let low = &block[32 + run / 4 * 32..][..32];
        for (at, out) in out.iter_mut().enumerate() {
            let own = run * 2 + at / 16;
            let lower = packed[own % 8] >> (4 * (own / 8)) & 15;
            let upper = packed[8 + own % 4] >> (2 * (own / 4)) & 3;
            let quant =
                i16::from(low[at] >> (2 * (run % 4)) & 3) - if high[at] >> run & 1 == 1 { 0 } else { 4 };
            *out = scale * (f32::from(lower | upper << 4) - 32.0) * f32::from(quant);
        }
    }
}

/// Block layout: `f16 d`, `f16 dmin`, 12 bytes of scales and minima, 128 bytes of 4-bit `q`.
///
/// `x = d scale q - dmin minimum`. 32 bytes hold two runs of 32: low bits, then high bits.
pub(super) fn decode_q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let quants = &block[16..];
    for (run, out) in out.chunks_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(block, run);
        let shift = 4 * (run % 2);
        for (out, &byte) in out.iter_mut().zip(&quants[run / 2 * 32..]) {
            *out = scale * f32::from(byte >> shift & 15) - minimum;
        }
    }
}

/// Block layout: as [`decode_q4_k`], with 32 bytes of fifth bits before the 128 of low bits.
///
/// Bit `r` of byte `i` of the fifth bits belongs to element `i` of run `r`.
pub(super) fn decode_q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (fifth_bits, quants) = (&block[16..48], &block[48..]);
    for (run, out) in out.chunks_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(block, run);
        let shift = 4 * (run % 2);
        let bytes = quants[run / 2 * 32..].iter().zip(fifth_bits);
        for (out, (&low, &high)) in out.iter_mut().zip(bytes) {
            *out = scale * f32::from(low >> shift & 15 | (high >> run & 1) << 4) - minimum;
        }
    }
}

/// Block layout: 128 bytes of low four bits, 64 bytes of high two bits, 16 signed scales, `f16 d`.
///
/// `x = d scale (q - 32)`, a scale for each 16 elements. Each half of 128 elements takes 64 and
/// 32 bytes: runs 0 and 1 of 32 the low bits of the first and second 32 bytes, runs 2 and 3 their
/// high bits; run `r`'s upper bits are at `2 r` in the 32 bytes.
pub(super) fn decode_q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    for (run, out) in out.chunks_mut(32).enumerate() {
        let (part, within) = (run / 4, run % 4);
        let low = &block[part * 64 + within % 2 * 32..][..32];
        let high = &block[128 + part * 32..][..32];
        let scales = &block[192 + run * 2..];
        let (low_shift, high_shift) = (4 * (within / 2), 2 * within);
        for (at, out) in out.iter_mut().enumerate() {
            let quant = low[at] >> low_shift & 15 | (high[at] >> high_shift & 3) << 4;
            let own = scale * f32::from(scales[at / 16].cast_signed());
            *out = own * (f32::from(quant) - 32.0);
        }
    }
}

/// The scale and the minimum of one of eight runs, times the block's `d` and `dmin`.
///
/// Six bits each. Bytes 0-3 and 4-7 hold those of runs 0-3, and in their upper two bits the upper
/// bits of runs 4-7; bytes 8-11 hold the lower four bits of runs 4-7: scale low, minimum high.
fn scale_and_minimum(block: &[u8], run: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, minimum) = if run < 4 {
        (packed[run] & 63, packed[run + 4] & 63)
    } else {
        let (low, scale_top, minimum_top) = (packed[run + 4], packed[run - 4] >> 6, packed[run] >> 6);
        (low & 15 | scale_top << 4, low >> 4 | minimum_top << 4)
    };
    (half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(minimum))
}
