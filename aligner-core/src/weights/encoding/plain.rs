//! Plain little-endian numbers.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Single precision.
pub(super) fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f32::from_le_bytes(*bytes);
    }
}

/// Double precision, rounded to the nearest.
pub(super) fn decode_f64(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = f64::from_le_bytes(*bytes) as f32;
    }
}

/// Half precision, in runs that the vector units convert at once.
pub(super) fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    let mut halves = [f16::ZERO; 64];
    for (bytes, out) in bytes.chunks(128).zip(out.chunks_mut(64)) {
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves[..out.len()].convert_to_f32_slice(out);
    }
}

/// The upper half of a single.
pub(super) fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = bf16::from_le_bytes(*bytes).to_f32();
    }
}
