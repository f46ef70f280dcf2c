//! Llama 3's scaling of rotary frequencies, which GGUF keeps as a tensor of divisors.

use super::ROPE_DIVISORS;
use crate::model::Family;
use crate::model::config::{Llama3Scaling, ModelConfig, RopeConfig};
use crate::weights::Gguf;
use crate::{Error, Result};

/// Largest relative difference between a stored frequency divisor and the computed one.
const DIVISOR_TOLERANCE: f32 = 1e-4;

/// Rotary settings with the scaling whose divisors a file has.
pub(super) fn scaled(
    file: &Gguf,
    family: &Family,
    config: &ModelConfig,
    divisors: &[f32],
) -> Result<RopeConfig> {
    let key = format!("{}.rope.scaling.original_context_length", family.gguf.architecture);
    let original = file.size(&key)?.unwrap_or(8192);
    llama3_scaling(config.rope, divisors, config.head_dim, original).ok_or_else(|| {
        let message = format!(
            "tensor {ROPE_DIVISORS} does not hold the frequency divisors of Llama 3, the only ones supported"
        );
        Error::format(file.path(), message)
    })
}

/// The scaling whose divisors are `stored`, `[head_dim / 2]`.
///
/// GGUF keeps the divisors and not what they were computed from. The lowest frequency's is the
/// factor; the other settings are the same in all of Llama 3. Whatever does not then agree with
/// every stored divisor is another scaling.
fn llama3_scaling(plain: RopeConfig, stored: &[f32], head_dim: usize, original: usize) -> Option<RopeConfig> {
    // The sizes of the file are not checked yet: no table is made that a false one asks for.
    if stored.len() != head_dim / 2 {
        return None;
    }
    let scaling = Llama3Scaling {
        factor: *stored.last()?,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: original,
    };
    let rope = RopeConfig { scaling: Some(scaling), ..plain };
    let computed = rope.frequency_divisors(head_dim);
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= DIVISOR_TOLERANCE * b.abs();
    stored.iter().zip(&computed).all(close).then_some(rope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_false_head_dimension_costs_no_memory() {
        let plain = RopeConfig { theta: 500_000.0, scaling: None };
        assert!(llama3_scaling(plain, &[1.0, 8.0], usize::MAX, 8192).is_none());
    }

    #[test]
    fn scaling_is_found_from_its_divisors_and_no_other_is_taken_for_it() {
        let plain = RopeConfig { theta: 500_000.0, scaling: None };
        let scaling = Llama3Scaling {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let expected = RopeConfig { scaling: Some(scaling), ..plain };
        let mut divisors = expected.frequency_divisors(64);
        assert_eq!(llama3_scaling(plain, &divisors, 64, 8192), Some(expected));
        assert_eq!(llama3_scaling(plain, &divisors[1..], 64, 8192), None);
        divisors[20] *= 1.01;
        assert_eq!(llama3_scaling(plain, &divisors, 64, 8192), None);
    }
}
