//! A small seeded generator: the demo's text must be the same on every machine, for ever.

/// `SplitMix64` (Steele, Lea and Flood, 2014): one 64-bit state, one output a step.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    /// A generator whose whole sequence follows from `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound`, which must not be 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        // The bias of the remainder is under 1e-15 for the bounds of a word list.
        (self.next() % bound as u64) as usize
    }

    /// One of `items`; none where there is none.
    pub(super) fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { items.get(self.below(items.len())) }
    }

    /// A sample of the normal distribution with mean 0 and deviation 1 (Box and Muller, 1958).
    pub(super) fn normal(&mut self) -> f32 {
        // 53 bits, moved by one half so that the logarithm never sees 0.
        let uniform = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        let (radius, angle) = (uniform(self.next()), uniform(self.next()));
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    }
}

/// A hash of `text` that does not change with the compiler: FNV-1a, then one mixing step.
pub(super) fn stable_hash(text: &str) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64;
    mix(text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
}

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_the_published_one() {
        // First outputs of SplitMix64 from seed 0.
        let mut random = Random::new(0);
        assert_eq!(random.next(), 0xE220_A839_7B1D_CDAF);
        assert_eq!(random.next(), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn normal_has_mean_0_and_deviation_1() {
        let mut random = Random::new(7);
        let values: Vec<f64> = (0..20_000).map(|_| f64::from(random.normal())).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
