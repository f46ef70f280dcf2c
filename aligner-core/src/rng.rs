//! Counter-based random numbers: each draw is a pure function of a key and a counter, so that it
//! depends on nothing that ran before.

/// A stream of draws, named by a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rng(u64);

/// `SplitMix64`'s finaliser (Steele, Lea and Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// `SplitMix64`'s increment: 2^64 over the golden ratio.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The `counter`-th number of the sequence that `SplitMix64` draws from `seed`, as published.
pub fn split_mix(seed: u64, counter: u64) -> u64 {
    mix(seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(GAMMA)))
}

/// 64 uniform bits as a number in 0..limit (Lemire 2019, without the rejection: the bias is below
/// limit / 2^64); 0 where the limit is 0.
pub fn scaled(bits: u64, limit: u64) -> u64 {
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
}

/// A word of a key from text, such as a row's id: its FNV-1a hash (Fowler, Noll and Vo 1991).
pub fn key_of(text: &str) -> u64 {
    text.bytes()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

impl Rng {
    /// The stream for the words of `key`, such as (seed, step, prompt, sample).
    pub fn new(key: &[u64]) -> Self {
        Self(key.iter().fold(GAMMA, |state, &word| mix(state ^ mix(word.wrapping_add(GAMMA)))))
    }

    /// The `counter`-th draw, uniform over all of u64.
    pub fn bits(self, counter: u64) -> u64 {
        mix(mix(self.0 ^ counter.wrapping_mul(0xD1B5_4A32_D192_ED03)).wrapping_add(self.0))
    }

    /// The `counter`-th draw, uniform in [0, 1).
    pub fn uniform(self, counter: u64) -> f64 {
        (self.bits(counter) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The `counter`-th draw, uniform in 0..limit; 0 where the limit is 0.
    pub fn below(self, counter: u64, limit: u64) -> u64 {
        scaled(self.bits(counter), limit)
    }

    /// The `counter`-th draw of a standard normal (Box and Muller 1958).
    pub fn normal(self, counter: u64) -> f64 {
        let (u, v) = (1.0 - self.uniform(2 * counter), self.uniform(2 * counter + 1));
        (-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_key_and_counter_alone() {
        let rng = Rng::new(&[1, 2]);
        assert_eq!(rng.bits(7), Rng::new(&[1, 2]).bits(7));
        assert_ne!(rng.bits(7), rng.bits(8));
        assert_ne!(rng.bits(7), Rng::new(&[2, 1]).bits(7));
    }

    #[test]
    fn the_sequence_of_split_mix_is_the_published_one() {
        assert_eq!(
            [0, 1].map(|counter| split_mix(0, counter)),
            [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]
        );
    }

    #[test]
    fn keys_of_text_are_its_published_fnv_1a_hashes() {
        assert_eq!(key_of(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(key_of("foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let rng = Rng::new(&[3]);
        let n = 20_000;
        let mean = (0..n).map(|i| rng.uniform(i)).sum::<f64>() / n as f64;
        let square = (0..n).map(|i| rng.normal(i).powi(2)).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!((square - 1.0).abs() < 0.05, "{square}");
        assert!((0..n).all(|i| rng.below(i, 7) < 7));
    }
}
