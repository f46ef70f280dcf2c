//! How a GGUF file that is written stores the elements of its tensors.

use crate::weights::SaveDtype;
use crate::weights::encoding::{Encoding, encode_q8_0};

/// Elements of one block of [`GgufDtype::Q8_0`].
const BLOCK: usize = 32;

/// How the matrices of a GGUF file are stored. Vectors, routers and learned positions stay `f32`, as
/// llama.cpp's converter writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes, 11 bits of mantissa.
    F16,
    /// 2 bytes, 8 bits of mantissa.
    Bf16,
    /// Blocks of 32 signed bytes with a scale in half precision; half precision where rows are not whole
    /// blocks.
    Q8_0,
}

impl GgufDtype {
    /// What a tensor is stored as in a file of this type.
    pub(super) fn of(self, stored: &str, shape: &[usize]) -> Self {
        let plain = shape.len() < 2
            || stored.ends_with("_norm.weight")
            || stored.ends_with(".ffn_gate_inp.weight")
            || stored == "position_embd.weight";
        match self {
            _ if plain => Self::F32,
            Self::Q8_0 if shape.last().is_none_or(|row| !row.is_multiple_of(BLOCK)) => Self::F16,
            own => own,
        }
    }

    pub(super) fn encoding(self) -> Encoding {
        match self {
            Self::F32 => Encoding::F32,
            Self::F16 => Encoding::F16,
            Self::Bf16 => Encoding::BF16,
            Self::Q8_0 => Encoding::Q8_0,
        }
    }

    /// `general.file_type`, as llama.cpp numbers them.
    pub(super) fn file_type(self) -> i64 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }

    /// Whether every value is finite, also as it is stored.
    pub(super) fn holds(self, values: &[f32]) -> bool {
        match self {
            Self::F32 => SaveDtype::F32.holds(values),
            Self::F16 => SaveDtype::F16.holds(values),
            Self::Bf16 => SaveDtype::Bf16.holds(values),
            // The scale is the largest value's 127th part, in half precision.
            Self::Q8_0 => values.iter().all(|value| value.abs() < 127.0 * 65_504.0),
        }
    }

    /// Little-endian bytes of `values`, whole blocks.
    pub(super) fn encode(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            Self::F32 => SaveDtype::F32.encode(values, bytes),
            Self::F16 => SaveDtype::F16.encode(values, bytes),
            Self::Bf16 => SaveDtype::Bf16.encode(values, bytes),
            Self::Q8_0 => {
                bytes.clear();
                bytes.extend(values.as_chunks().0.iter().flat_map(encode_q8_0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_small_or_delicate_stays_in_single_precision() {
        let of = |stored: &str, shape: &[usize]| GgufDtype::Q8_0.of(stored, shape);
        assert_eq!(of("blk.0.attn_q.weight", &[8, 64]), GgufDtype::Q8_0);
        assert_eq!(of("blk.0.attn_q.weight", &[64, 48]), GgufDtype::F16);
        assert_eq!(of("blk.0.attn_q.bias", &[64]), GgufDtype::F32);
        assert_eq!(of("blk.0.ffn_gate_inp.weight", &[4, 64]), GgufDtype::F32);
        assert_eq!(of("position_embd.weight", &[4, 64]), GgufDtype::F32);
        assert_eq!(GgufDtype::Bf16.of("blk.0.ffn_up_exps.weight", &[2, 4, 48]), GgufDtype::Bf16);
    }

    #[test]
    fn values_that_a_type_cannot_hold_are_seen() {
        assert!(GgufDtype::Q8_0.holds(&[8.0e6]) && !GgufDtype::Q8_0.holds(&[8.4e6]));
        assert!(!GgufDtype::F16.holds(&[7e4]) && GgufDtype::Bf16.holds(&[7e4]));
        assert!(!GgufDtype::F32.holds(&[f32::NAN]) && !GgufDtype::Q8_0.holds(&[f32::INFINITY]));
    }
}
