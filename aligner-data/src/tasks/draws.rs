//! Draws of one question, one after the other.

use aligner_core::rng::{Rng, key_of};

/// A cursor over the random numbers of one question.
#[derive(Debug, Clone)]
pub(super) struct Draws {
    rng: Rng,
    next: u64,
}

impl Draws {
    /// The draws of the question `index` of a task's stream `seed`.
    pub(super) fn new(task: &str, seed: u64, index: u64) -> Self {
        Self { rng: Rng::new(&[key_of(task), seed, index]), next: 0 }
    }

    /// A number in 0..limit; 0 where the limit is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next += 1;
        self.rng.below(self.next - 1, limit)
    }

    /// A number in `least..=most`; `least` where the range is empty.
    pub(super) fn between(&mut self, least: i64, most: i64) -> i64 {
        let width = (i128::from(most) - i128::from(least) + 1).clamp(0, i128::from(u64::MAX));
        least.wrapping_add_unsigned(self.below(width as u64))
    }

    /// A count in `least..=most`.
    pub(super) fn count(&mut self, least: usize, most: usize) -> usize {
        least + self.below((most.saturating_sub(least) + 1) as u64) as usize
    }

    /// One of `items`, which are not empty.
    pub(super) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Puts `items` in any order, each as likely (Fisher–Yates).
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_cover_their_range_and_nothing_else() {
        let mut draws = Draws::new("test", 1, 2);
        let mut seen = [0; 5];
        for _ in 0..5000 {
            seen[usize::try_from(draws.between(-2, 2) + 2).expect("in range")] += 1;
        }
        // Expected 1000 each with a standard deviation of 28.
        assert!(seen.iter().all(|count| (850..1150).contains(count)), "{seen:?}");
        assert_eq!(draws.between(i64::MIN, i64::MIN), i64::MIN);
        assert_eq!(draws.count(3, 3), 3);
    }
}
