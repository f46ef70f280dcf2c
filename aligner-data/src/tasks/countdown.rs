//! The numbers game: an expression of given numbers that equals a target.

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::draws::Draws;
use super::{Task, TaskRow, check_range};

const NAME: &str = "countdown";

/// Expressions that are drawn before the settings are said to allow none.
const MOST_TRIES: usize = 10_000;

const QUESTIONS: [&str; 3] = [
    "Using all the numbers {numbers}, create an expression that equals {target}.\nYou can only use each number once.",
    "Find a way to make {target} using all of these numbers: {numbers}.\nEach number can only be used once.",
    "Calculate {target} using all of these numbers: {numbers}.\nEach number may be used at most once.",
];

const FORMAT: &str = "

Final answer format instructions:
1. Provide your solution as a arithmetic expression (no '=' sign).
2. Do not include the target number in the expression.
3. Use '*' for multiplication.
4. Use '/' for division.
5. Do not include any other text or formatting.
";

/// An arithmetic operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// Addition.
    #[serde(rename = "+")]
    Plus,
    /// Subtraction.
    #[serde(rename = "-")]
    Minus,
    /// Multiplication.
    #[serde(rename = "*")]
    Times,
    /// Division without a remainder.
    #[serde(rename = "/")]
    Over,
}

/// Settings of [`Countdown`]; names and defaults as in `reasoning-gym`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownConfig {
    /// Fewest numbers, at least 2.
    pub min_numbers: usize,
    /// Most numbers, up to 100.
    pub max_numbers: usize,
    /// Smallest given number, at least 1.
    pub min_value: i64,
    /// Largest given number, up to a million.
    pub max_value: i64,
    /// Smallest target, at least 1.
    pub min_target: i64,
    /// Largest target, up to 10¹².
    pub max_target: i64,
    /// Operators of the expression that the target is made by.
    pub operators: Vec<Operator>,
    /// Whether the numbers are given in another order than the expression's.
    pub shuffle: bool,
}

impl Default for CountdownConfig {
    fn default() -> Self {
        Self {
            min_numbers: 4,
            max_numbers: 6,
            min_value: 1,
            max_value: 100,
            min_target: 100,
            max_target: 999,
            operators: vec![Operator::Plus, Operator::Minus, Operator::Times, Operator::Over],
            shuffle: true,
        }
    }
}

/// Make 24 from 3, 3, 8 and 8.
#[derive(Debug, Clone)]
pub struct Countdown {
    config: CountdownConfig,
}

/// An expression with its value, and whether its last operation is a sum.
struct Expression {
    text: String,
    value: i64,
    is_sum: bool,
}

impl Countdown {
    /// The task with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for ranges that are empty or too wide, and for no operator.
    pub fn new(config: CountdownConfig) -> Result<Self> {
        check_range(("min_numbers", config.min_numbers), ("max_numbers", config.max_numbers), 2..=100)?;
        check_range(("min_value", config.min_value), ("max_value", config.max_value), 1..=1_000_000)?;
        check_range(
            ("min_target", config.min_target),
            ("max_target", config.max_target),
            1..=1_000_000_000_000,
        )?;
        if config.operators.is_empty() {
            return Err(Error::setting(
                "operators",
                "must name at least one of \"+\", \"-\", \"*\" and \"/\"",
            ));
        }
        Ok(Self { config })
    }

    /// An expression of these numbers, from left to right, by operators that are drawn; none where its value
    /// leaves 64 bits. A division takes the first of the numbers still to come that leaves no remainder,
    /// and becomes a subtraction where there is none.
    fn expression(&self, numbers: &mut [i64], draws: &mut Draws) -> Option<Expression> {
        let first = *numbers.first()?;
        let mut made = Expression { text: first.to_string(), value: first, is_sum: false };
        for at in 1..numbers.len() {
            let mut operator = *draws.pick(&self.config.operators);
            if operator == Operator::Over {
                draws.shuffle(&mut numbers[at..]);
                match numbers[at..].iter().position(|number| made.value % number == 0) {
                    Some(found) => numbers.swap(at, at + found),
                    None => operator = Operator::Minus,
                }
            }
            made = made.then(operator, numbers[at])?;
        }
        Some(made)
    }
}

impl Expression {
    fn then(self, operator: Operator, number: i64) -> Option<Self> {
        let left = match operator {
            Operator::Times | Operator::Over if self.is_sum => format!("({})", self.text),
            _ => self.text,
        };
        let (symbol, value) = match operator {
            Operator::Plus => ('+', self.value.checked_add(number)),
            Operator::Minus => ('-', self.value.checked_sub(number)),
            Operator::Times => ('*', self.value.checked_mul(number)),
            Operator::Over => ('/', self.value.checked_div(number)),
        };
        let is_sum = matches!(operator, Operator::Plus | Operator::Minus);
        Some(Self { text: format!("{left} {symbol} {number}"), value: value?, is_sum })
    }
}

impl Task for Countdown {
    fn name(&self) -> &'static str {
        NAME
    }

    fn sample(&self, seed: u64, index: u64) -> Result<TaskRow> {
        let config = &self.config;
        let mut draws = Draws::new(NAME, seed, index);
        let count = draws.count(config.min_numbers, config.max_numbers);
        let targets = config.min_target..=config.max_target;
        for _ in 0..MOST_TRIES {
            let mut numbers: Vec<i64> =
                (0..count).map(|_| draws.between(config.min_value, config.max_value)).collect();
            let made = self.expression(&mut numbers, &mut draws);
            let Some(made) = made.filter(|made| targets.contains(&made.value)) else { continue };
            if config.shuffle {
                draws.shuffle(&mut numbers);
            }
            let listed: Vec<String> = numbers.iter().map(i64::to_string).collect();
            let question = draws
                .pick(&QUESTIONS)
                .replace("{numbers}", &listed.join(", "))
                .replace("{target}", &made.value.to_string());
            let prompt = format!("{question}{FORMAT}");
            let metadata = json!({
                "task": NAME,
                "prompt": prompt,
                "answer": made.text,
                "numbers": numbers,
                "target": made.value,
            });
            return Ok(TaskRow { id: format!("{NAME}/{seed}/{index}"), prompt, metadata });
        }
        let message = format!(
            "{MOST_TRIES} expressions of {count} numbers met no target from {} to {}",
            config.min_target, config.max_target
        );
        Err(Error::setting("min_target", message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_target_keep_their_ranges() {
        let task = Countdown::new(CountdownConfig::default()).expect("settings");
        for index in 0..200 {
            let row = task.sample(5, index).expect("questions");
            let numbers = row.metadata["numbers"].as_array().expect("a list");
            assert!((4..=6).contains(&numbers.len()));
            assert!(numbers.iter().all(|number| (1..=100).contains(&number.as_i64().expect("an integer"))));
            assert!((100..=999).contains(&row.metadata["target"].as_i64().expect("an integer")));
            let mut used: Vec<i64> = (row.metadata["answer"].as_str().expect("text"))
                .split(|symbol: char| !symbol.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            let mut given: Vec<i64> = numbers.iter().filter_map(serde_json::Value::as_i64).collect();
            used.sort_unstable();
            given.sort_unstable();
            assert_eq!(used, given, "{row:?}");
        }
    }

    #[test]
    fn sums_are_bracketed_before_products() {
        let start = || Expression { text: "2".into(), value: 2, is_sum: false };
        let sum = || start().then(Operator::Plus, 3).expect("small");
        let made =
            sum().then(Operator::Times, 4).and_then(|made| made.then(Operator::Minus, 5)).expect("small");
        assert_eq!((made.text.as_str(), made.value), ("(2 + 3) * 4 - 5", 15));
        assert_eq!(sum().then(Operator::Minus, 1).expect("small").text, "2 + 3 - 1");
        assert!(start().then(Operator::Times, i64::MAX).is_none());
    }

    #[test]
    fn targets_out_of_reach_are_an_error() {
        let config = CountdownConfig { max_value: 2, min_target: 900, ..CountdownConfig::default() };
        let message =
            Countdown::new(config).expect("settings").sample(0, 0).expect_err("too far").to_string();
        assert!(message.starts_with("min_target: "), "{message}");
    }

    #[test]
    fn ranges_that_cannot_work_are_named() {
        let refused = |config| Countdown::new(config).expect_err("no range").to_string();
        let base = CountdownConfig::default;
        assert!(refused(CountdownConfig { min_numbers: 1, ..base() }).starts_with("min_numbers: "));
        assert!(refused(CountdownConfig { min_value: 0, ..base() }).starts_with("min_value: "));
        assert!(refused(CountdownConfig { max_target: 99, ..base() }).starts_with("max_target: "));
        assert!(refused(CountdownConfig { operators: vec![], ..base() }).starts_with("operators: "));
    }
}
