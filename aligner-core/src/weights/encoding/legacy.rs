//! GGUF blocks of 32: one scale, with or without an offset.
//!
//! Where two elements share a byte, its low four bits are element `i` and its high four bits
//! element `i + 16`.

use super::half_at;

/// `f16 d`, 16 bytes of 4-bit `q`: `x = d (q - 8)`.
pub(super) fn decode_q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (at, &byte) in block[2..].iter().enumerate() {
        out[at] = scale * (f32::from(byte & 15) - 8.0);
        out[at + 16] = scale * (f32::from(byte >> 4) - 8.0);
    }
}

/// `f16 d`, `f16 m`, 16 bytes of 4-bit `q`: `x = d q + m`.
pub(super) fn decode_q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    for (at, &byte) in block[4..].iter().enumerate() {
        out[at] = scale * f32::from(byte & 15) + offset;
        out[at + 16] = scale * f32::from(byte >> 4) + offset;
    }
}

/// `f16 d`, 4 bytes with the fifth bits, 16 bytes of low bits: `x = d (q - 16)`.
pub(super) fn decode_q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let fifth = fifth_bits(block, 2);
    for (at, &byte) in block[6..].iter().enumerate() {
        out[at] = scale * (f32::from(byte & 15 | fifth(at)) - 16.0);
        out[at + 16] = scale * (f32::from(byte >> 4 | fifth(at + 16)) - 16.0);
    }
}

/// `f16 d`, `f16 m`, 4 bytes with the fifth bits, 16 bytes of low bits: `x = d q + m`.
pub(super) fn decode_q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    let fifth = fifth_bits(block, 4);
    for (at, &byte) in block[8..].iter().enumerate() {
        out[at] = scale * f32::from(byte & 15 | fifth(at)) + offset;
        out[at + 16] = scale * f32::from(byte >> 4 | fifth(at + 16)) + offset;
    }
}

/// `f16 d`, 32 signed bytes `q`: `x = d q`.
pub(super) fn decode_q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, &byte) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(byte.cast_signed());
    }
}

/// The inverse of [`decode_q8_0`]: the scale is the largest magnitude's 127th part, and each value the nearest of its
/// multiples, halves away from zero.
pub(crate) fn encode_q8_0(values: &[f32; 32]) -> [u8; 34] {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut block = [0; 34];
    block[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
    for (out, value) in block[2..].iter_mut().zip(values) {
        *out = ((value * inverse).round() as i8).cast_unsigned();
    }
    block
}

/// Bit `i` of the 32 at `at`, moved to the fifth place.
fn fifth_bits(block: &[u8], at: usize) -> impl Fn(usize) -> u8 {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |element| ((bits >> element & 1) << 4) as u8
}
