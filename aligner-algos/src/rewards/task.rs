//! Grades the answers to generated tasks.

use aligner_core::{Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::expression::{Ratio, evaluate};
use super::extract::{Extract, Extractor, last_line, last_number};
use super::{each, finite, number};

/// Settings of [`TaskReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TaskRewardConfig {
    /// Where the answer stands in the response. Where `auto` finds no mark, it is the last number, or, for an
    /// expression, the last line.
    pub extract: Extract,
    /// What the answer follows, for `extract = "marker"` and `"auto"`.
    pub marker: String,
    /// The tag's name, for `extract = "tag"` and `"auto"`.
    pub tag: String,
    /// Whether a countdown's expression has to use all the numbers, not each at most once.
    pub use_all_numbers: bool,
    /// The score of a right answer.
    pub correct: f64,
    /// The score of a number, or an expression, that is not right.
    pub wrong: f64,
    /// The score of a response without a number, or with something that is no expression.
    pub missing: f64,
}

impl Default for TaskRewardConfig {
    fn default() -> Self {
        Self {
            extract: Extract::Auto,
            marker: "####".into(),
            tag: "answer".into(),
            use_all_numbers: false,
            correct: 1.0,
            wrong: 0.0,
            missing: 0.0,
        }
    }
}

/// The grader of the tasks in [`aligner_data::tasks`]: the prompt's metadata say which one it is.
///
/// A number is right if it is the answer; a countdown's expression, if it comes to the target exactly and is made of
/// the given numbers, each used at most once. A sample whose metadata name no task has no score.
#[derive(Debug, Clone)]
pub struct TaskReward {
    config: TaskRewardConfig,
    extractor: Extractor,
}

/// How good an answer is.
enum Grade {
    Correct,
    Wrong,
    Missing,
}

impl TaskReward {
    /// The reward with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`](aligner_core::Error::Setting) for an empty marker or tag, and a score that is not finite.
    pub fn new(config: TaskRewardConfig) -> Result<Self> {
        for (key, value) in
            [("correct", config.correct), ("wrong", config.wrong), ("missing", config.missing)]
        {
            finite(key, value)?;
        }
        let extractor = Extractor::new(config.extract, &config.marker, &config.tag)?;
        Ok(Self { config, extractor })
    }

    fn rate(&self, sample: &Sample) -> Result<Score, String> {
        let metadata = &sample.metadata;
        let Some(task) = metadata.get("task").and_then(Value::as_str) else { return Ok(Score::None) };
        let grade = match task {
            "chain_sum" | "leg_counting" | "letter_counting" => self.grade_number(metadata, &sample.text)?,
            "countdown" => self.grade_expression(metadata, &sample.text)?,
            other => return Err(format!("no grader for the task `{other}`")),
        };
        let score = match grade {
            Grade::Correct => self.config.correct,
            Grade::Wrong => self.config.wrong,
            Grade::Missing => self.config.missing,
        };
        Ok(Score::Sample(score as f32))
    }

    fn grade_number(&self, metadata: &Value, text: &str) -> Result<Grade, String> {
        let answer = metadata.get("answer").and_then(Value::as_str);
        let answer = answer.ok_or("its metadata have no text `answer`")?;
        let expected = number::parse(answer).ok_or_else(|| format!("its answer `{answer}` is no number"))?;
        let Some(found) = self.extractor.find_or(text, last_number) else { return Ok(Grade::Missing) };
        Ok(match number::parse(found) {
            None => Grade::Missing,
            // Past 2⁵³ the digits decide: 64-bit floats no longer tell neighbours apart.
            Some(_) if digits(found).is_some() && digits(answer).is_some() => {
                if digits(found) == digits(answer) { Grade::Correct } else { Grade::Wrong }
            }
            Some(value) if (value - expected).abs() == 0.0 => Grade::Correct,
            Some(_) => Grade::Wrong,
        })
    }

    fn grade_expression(&self, metadata: &Value, text: &str) -> Result<Grade, String> {
        let target = metadata.get("target").and_then(Value::as_i64);
        let target = target.ok_or("its metadata have no whole number `target`")?;
        let given = metadata.get("numbers").and_then(Value::as_array);
        let given: Option<Vec<i64>> = given.and_then(|given| given.iter().map(Value::as_i64).collect());
        let mut left = given.ok_or("its metadata have no list of whole numbers `numbers`")?;
        let found = self.extractor.find_or(text, last_line).and_then(evaluate);
        let Some(found) = found else { return Ok(Grade::Missing) };
        let all_given = found.numbers.iter().all(|number| take(&mut left, *number));
        let allowed = all_given && (left.is_empty() || !self.config.use_all_numbers);
        Ok(if allowed && found.value == Ratio::from(target) { Grade::Correct } else { Grade::Wrong })
    }
}

/// The value of a whole number with thousands set off by commas, and zeros after the point.
fn digits(text: &str) -> Option<i128> {
    let text = text.trim().trim_end_matches('.').replace(',', "").replace('−', "-");
    let whole = match text.split_once('.') {
        Some((whole, decimals)) if decimals.chars().all(|digit| digit == '0') => whole,
        Some(_) => return None,
        None => &text,
    };
    whole.parse().ok()
}

/// Takes `number` out of `left`; false where it is not there.
fn take(left: &mut Vec<i64>, number: i64) -> bool {
    match left.iter().position(|other| *other == number) {
        Some(at) => {
            left.swap_remove(at);
            true
        }
        None => false,
    }
}

impl Reward for TaskReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        each(samples, |sample| self.rate(sample))
    }
}

#[cfg(test)]
mod tests {
    use aligner_data::tasks::{
        ChainSumConfig, CountdownConfig, LegCountingConfig, LetterCountingConfig, TaskConfig,
    };
    use serde_json::json;

    use super::*;

    fn sample(metadata: &Value, text: impl Into<String>) -> Sample {
        Sample { metadata: metadata.clone(), text: text.into(), ..Sample::default() }
    }

    fn score(config: TaskRewardConfig, metadata: &Value, text: &str) -> Score {
        let reward = TaskReward::new(config).expect("settings");
        reward.score(&[sample(metadata, text)]).expect("a task").remove(0)
    }

    /// Marks that tell the grades apart.
    fn marks() -> TaskRewardConfig {
        TaskRewardConfig { wrong: -1.0, missing: -2.0, ..TaskRewardConfig::default() }
    }

    const CORRECT: Score = Score::Sample(1.0);
    const WRONG: Score = Score::Sample(-1.0);
    const MISSING: Score = Score::Sample(-2.0);

    #[test]
    fn every_tasks_own_answer_is_right_and_another_is_not() {
        let tasks = [
            TaskConfig::ChainSum(ChainSumConfig {
                max_digits: 18,
                allow_negation: true,
                ..ChainSumConfig::default()
            }),
            TaskConfig::Countdown(CountdownConfig::default()),
            TaskConfig::LegCounting(LegCountingConfig::default()),
            TaskConfig::LetterCounting(LetterCountingConfig::default()),
        ];
        for task in tasks {
            let task = task.build().expect("defaults");
            for index in 0..100 {
                let row = task.sample(1, index).expect("questions");
                let answer = row.metadata["answer"].as_str().expect("text");
                assert_eq!(score(marks(), &row.metadata, answer), CORRECT, "{row:?}");
                let marked = format!("Well, 3 + 4.\n<answer>{answer}</answer> is it.");
                assert_eq!(score(marks(), &row.metadata, &marked), CORRECT, "{row:?}");
                let other =
                    if task.name() == "countdown" { format!("{answer} + 1") } else { format!("{answer}1") };
                assert_eq!(score(marks(), &row.metadata, &other), WRONG, "{row:?}");
            }
        }
    }

    #[test]
    fn numbers_are_found_and_compared_by_value() {
        let metadata = json!({"task": "chain_sum", "answer": "-1234"});
        for text in ["-1234", "It is -1,234.00.", "first 5, then\n-1234", "\\boxed{-1234}", "#### −1234"] {
            assert_eq!(score(marks(), &metadata, text), CORRECT, "{text}");
        }
        assert_eq!(score(marks(), &metadata, "1234"), WRONG);
        assert_eq!(score(marks(), &metadata, "-1234.5"), WRONG);
        assert_eq!(score(marks(), &metadata, "I cannot say"), MISSING);
        let large = json!({"task": "chain_sum", "answer": "9007199254740993"});
        assert_eq!(score(marks(), &large, "9007199254740992"), WRONG, "neighbours as 64-bit floats");
    }

    #[test]
    fn a_countdown_uses_given_numbers_once() {
        let metadata = json!({"task": "countdown", "numbers": [3, 3, 8, 8], "target": 24});
        let grade = |text| score(marks(), &metadata, text);
        assert_eq!(grade("8 / (3 - 8 / 3)"), CORRECT);
        assert_eq!(grade("So:\n3 * 8\n"), CORRECT, "not all are needed");
        assert_eq!(grade("8 * 8 - 8 * 3 - 8 - 8"), WRONG, "8 four times");
        assert_eq!(grade("24"), WRONG, "not given");
        assert_eq!(grade("3 + 8"), WRONG, "another value");
        assert_eq!(grade("3 * 8 = 24"), MISSING, "no expression");
        assert_eq!(grade("print(24)"), MISSING);
        let all = TaskRewardConfig { use_all_numbers: true, ..marks() };
        assert_eq!(score(all.clone(), &metadata, "3 * 8"), WRONG);
        assert_eq!(score(all, &metadata, "8 / (3 - 8 / 3)"), CORRECT);
    }

    #[test]
    fn what_is_no_task_has_no_score_and_an_unknown_one_is_an_error() {
        assert_eq!(score(marks(), &Value::Null, "7"), Score::None);
        let reward = TaskReward::new(TaskRewardConfig::default()).expect("settings");
        let refused = |metadata: Value| {
            let samples = [sample(&json!({"task": "chain_sum", "answer": "1"}), "1"), sample(&metadata, "7")];
            reward.score(&samples).expect_err("no grader").to_string()
        };
        assert!(refused(json!({"task": "sudoku", "id": "row 3"})).starts_with("sample 1 (row 3): "));
        assert!(refused(json!({"task": "chain_sum"})).contains("`answer`"));
        assert!(refused(json!({"task": "countdown", "target": 1})).contains("`numbers`"));
    }
}
