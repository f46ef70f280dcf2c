//! Sums and differences of several numbers.

use aligner_core::Result;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::draws::Draws;
use super::{Task, TaskRow, check_range};

const NAME: &str = "chain_sum";

/// Settings of [`ChainSum`]; names and defaults as in `reasoning-gym`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChainSumConfig {
    /// Fewest numbers.
    pub min_terms: usize,
    /// Most numbers, up to 1000.
    pub max_terms: usize,
    /// Fewest digits of each number.
    pub min_digits: u32,
    /// Most digits of each number, up to 18.
    pub max_digits: u32,
    /// Whether numbers may be negative.
    pub allow_negation: bool,
}

impl Default for ChainSumConfig {
    fn default() -> Self {
        Self { min_terms: 2, max_terms: 6, min_digits: 1, max_digits: 4, allow_negation: false }
    }
}

/// `12 - 7 + 30 =`: what does it come to?
#[derive(Debug, Clone, Copy)]
pub struct ChainSum {
    config: ChainSumConfig,
}

impl ChainSum {
    /// The task with these settings.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] for ranges that are empty or too wide.
    pub fn new(config: ChainSumConfig) -> Result<Self> {
        check_range(("min_terms", config.min_terms), ("max_terms", config.max_terms), 1..=1000)?;
        check_range(("min_digits", config.min_digits), ("max_digits", config.max_digits), 1..=18)?;
        Ok(Self { config })
    }
}

impl Task for ChainSum {
    fn name(&self) -> &'static str {
        NAME
    }

    fn sample(&self, seed: u64, index: u64) -> Result<TaskRow> {
        let config = &self.config;
        let mut draws = Draws::new(NAME, seed, index);
        let terms = draws.count(config.min_terms, config.max_terms);
        let digits = draws.count(config.min_digits as usize, config.max_digits as usize) as u32;
        let most = 10_i64.pow(digits) - 1;
        let least = match (config.allow_negation, digits) {
            (true, _) => -most,
            (false, 1) => 0,
            (false, _) => 10_i64.pow(digits - 1),
        };
        let first = draws.between(least, most);
        let (mut words, mut sum) = (vec![first.to_string()], i128::from(first));
        for _ in 1..terms {
            let (plus, term) = (draws.below(2) == 0, draws.between(least, most));
            words.push(format!("{} {term}", if plus { '+' } else { '-' }));
            sum += i128::from(if plus { term } else { -term });
        }
        let expression = words.join(" ");
        let prompt = format!("State the final answer to the following arithmetic problem: {expression} =");
        let metadata = json!({
            "task": NAME,
            "prompt": prompt,
            "answer": sum.to_string(),
            "num_terms": terms,
            "num_digits": digits,
            "expression": expression,
        });
        Ok(TaskRow { id: format!("{NAME}/{seed}/{index}"), prompt, metadata })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_the_expressions_value() {
        for config in [
            ChainSumConfig::default(),
            ChainSumConfig {
                allow_negation: true,
                max_digits: 18,
                max_terms: 40,
                ..ChainSumConfig::default()
            },
        ] {
            let task = ChainSum::new(config).expect("settings");
            for index in 0..200 {
                let row = task.sample(5, index).expect("questions");
                let words: Vec<&str> =
                    row.metadata["expression"].as_str().expect("text").split(' ').collect();
                let mut sum: i128 = words[0].parse().expect("a number");
                for pair in words[1..].chunks(2) {
                    let term: i128 = pair[1].parse().expect("a number");
                    sum += if pair[0] == "+" { term } else { -term };
                }
                assert_eq!(row.metadata["answer"], sum.to_string());
                assert!((2..=config.max_terms).contains(&words.len().div_ceil(2)));
            }
        }
    }

    #[test]
    fn numbers_have_their_digits() {
        let config = ChainSumConfig { min_digits: 3, max_digits: 3, ..ChainSumConfig::default() };
        let task = ChainSum::new(config).expect("settings");
        for index in 0..50 {
            let row = task.sample(0, index).expect("questions");
            let numbers = row.metadata["expression"].as_str().expect("text").split([' ', '+', '-']);
            assert!(numbers.filter(|word| !word.is_empty()).all(|number| number.len() == 3), "{row:?}");
        }
    }

    #[test]
    fn ranges_that_cannot_work_are_named() {
        let refused = |config| ChainSum::new(config).expect_err("no range").to_string();
        let base = ChainSumConfig::default();
        assert!(refused(ChainSumConfig { min_terms: 0, ..base }).starts_with("min_terms: "));
        assert!(refused(ChainSumConfig { max_terms: 1, ..base }).starts_with("max_terms: "));
        assert!(refused(ChainSumConfig { max_digits: 19, ..base }).starts_with("max_digits: "));
    }
}
