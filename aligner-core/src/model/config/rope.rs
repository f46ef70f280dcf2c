//! Rotary positions in a configuration: the base of the frequencies, and their scaling.

mod json;

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies `theta^(-2i / head_dim)`.
    pub theta: f32,
    /// Stretches the low frequencies, as Llama 3.1 does.
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3.1's scaling of rotary frequencies for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Low frequencies are divided by it.
    pub factor: f32,
    /// Wavelengths above `original_max_positions / low_freq_factor` are divided by `factor`.
    pub low_freq_factor: f32,
    /// Wavelengths below `original_max_positions / high_freq_factor` stay; between, interpolated.
    pub high_freq_factor: f32,
    /// Context, in tokens, before the scaling.
    pub original_max_positions: usize,
}

impl RopeConfig {
    /// What each frequency is divided by, `[head_dim / 2]`: 1 everywhere without scaling.
    pub fn frequency_divisors(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2).map(|i| self.divisor(i, head_dim)).collect()
    }

    /// Frequencies in radians per position, `[head_dim / 2]`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency =
            |(i, divisor): (usize, f32)| 1.0 / self.theta.powf(2.0 * i as f32 / head_dim as f32) / divisor;
        self.frequency_divisors(head_dim).into_iter().enumerate().map(frequency).collect()
    }

    fn divisor(&self, index: usize, head_dim: usize) -> f32 {
        let Some(scaling) = self.scaling else { return 1.0 };
        let frequency = 1.0 / self.theta.powf(2.0 * index as f32 / head_dim as f32);
        let wavelength = 2.0 * std::f32::consts::PI / frequency;
        let original = scaling.original_max_positions as f32;
        if wavelength < original / scaling.high_freq_factor {
            return 1.0;
        }
        if wavelength > original / scaling.low_freq_factor {
            return scaling.factor;
        }
        let smooth = (original / wavelength - scaling.low_freq_factor)
            / (scaling.high_freq_factor - scaling.low_freq_factor);
        1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    }

    /// Adds every violation, in words.
    pub(super) fn problems(&self, problems: &mut Vec<String>) {
        let theta = self.theta;
        if !(theta > 1.0 && theta.is_finite()) {
            problems.push(format!("rope_theta must be a finite number above 1, got {theta}"));
        }
        let Some(scaling) = self.scaling else { return };
        if !(scaling.factor >= 1.0 && scaling.factor.is_finite()) {
            problems.push(format!("rope_scaling.factor must be at least 1, got {}", scaling.factor));
        }
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        if !(low > 0.0 && high > low && high.is_finite()) {
            problems.push(format!(
                "rope_scaling.low_freq_factor {low} must be above 0 and below high_freq_factor {high}"
            ));
        }
        if scaling.original_max_positions == 0 {
            problems.push("rope_scaling.original_max_position_embeddings must be at least 1".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_divisors_keep_high_and_divide_low_frequencies() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let rope = RopeConfig { theta: 500_000.0, scaling: Some(scaling) };
        let divisors = rope.frequency_divisors(128);
        assert_eq!((divisors[0], divisors[63]), (1.0, 8.0));
        assert!(divisors.is_sorted());
        assert!(divisors.iter().any(|&d| d > 1.0 && d < 8.0), "no interpolated band");
    }
}
