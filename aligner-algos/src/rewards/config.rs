//! Rewards as a run file names them.

use aligner_core::{Result, Reward};
use serde::{Deserialize, Serialize};

use super::{
    Answer, AnswerConfig, Format, FormatConfig, JsonSchema, JsonSchemaConfig, Length, LengthConfig, Lexicon,
    LexiconConfig, ProcessConfig, ProcessReward, RegexConfig, RegexReward, RemoteConfig, RemoteReward,
    TaskReward, TaskRewardConfig,
};

/// A reward that needs neither model nor tokenizer, with its settings: `kind` is its name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RewardConfig {
    /// Sentiment.
    Lexicon(LexiconConfig),
    /// A pattern.
    Regex(RegexConfig),
    /// The data set's answer.
    Answer(AnswerConfig),
    /// A JSON schema.
    JsonSchema(JsonSchemaConfig),
    /// Instructions of format.
    Format(FormatConfig),
    /// A length.
    Length(LengthConfig),
    /// A generated task's answer.
    Task(TaskRewardConfig),
    /// A program that reads and writes JSON lines.
    Process(ProcessConfig),
    /// A service that takes and returns JSON lines.
    Remote(RemoteConfig),
}

impl RewardConfig {
    /// The names that `kind` may have.
    pub const KINDS: [&str; 9] =
        ["lexicon", "regex", "answer", "json_schema", "format", "length", "task", "process", "remote"];

    /// The reward with these settings. Programs and services are asked for nothing before the first sample.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] for settings that cannot work; a file that cannot be read.
    pub fn build(self) -> Result<Box<dyn Reward + Send>> {
        Ok(match self {
            Self::Lexicon(config) => Box::new(Lexicon::new(config)),
            Self::Regex(config) => Box::new(RegexReward::new(config)?),
            Self::Answer(config) => Box::new(Answer::new(config)?),
            Self::JsonSchema(config) => Box::new(JsonSchema::new(config)?),
            Self::Format(config) => Box::new(Format::new(config)?),
            Self::Length(config) => Box::new(Length::new(config)?),
            Self::Task(config) => Box::new(TaskReward::new(config)?),
            Self::Process(config) => Box::new(ProcessReward::new(config)?),
            Self::Remote(config) => Box::new(RemoteReward::new(config)?),
        })
    }
}

/// A reward of a run file's section `[reward.NAME]`: its weight in the sum, and its own settings beside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartConfig {
    /// What its scores are multiplied by.
    #[serde(default = "one")]
    pub weight: f64,
    /// Kind and settings.
    #[serde(flatten)]
    pub reward: RewardConfig,
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(table: Value) -> serde_json::Result<PartConfig> {
        serde_json::from_value(table)
    }

    /// A table of each kind that can be built.
    fn tables() -> Vec<Value> {
        let table = |kind: &&str| match *kind {
            "regex" => json!({"kind": kind, "pattern": "please"}),
            "json_schema" => json!({"kind": kind, "schema": {"type": "object"}}),
            "format" => json!({"kind": kind, "checks": [{"kind": "no_comma"}]}),
            "length" => json!({"kind": kind, "target": 7}),
            "process" => json!({"kind": kind, "command": ["true"]}),
            "remote" => json!({"kind": kind, "url": "http://localhost:1"}),
            _ => json!({"kind": kind}),
        };
        RewardConfig::KINDS.iter().map(table).collect()
    }

    #[test]
    fn every_kind_is_read_built_and_written() {
        for table in tables() {
            let part = read(table.clone()).unwrap_or_else(|error| panic!("{table}: {error}"));
            assert_eq!(read(serde_json::to_value(&part).expect("a table")).expect("its own"), part);
            part.reward.build().unwrap_or_else(|error| panic!("{table}: {error}"));
        }
    }

    #[test]
    fn a_misspelt_key_is_refused_by_name_in_every_kind() {
        for mut table in tables() {
            table["patern"] = json!("please");
            for result in [
                read(table.clone()).map(|part| part.reward),
                serde_json::from_value::<RewardConfig>(table.clone()),
            ] {
                let message = result.expect_err("a misspelt key").to_string();
                assert!(message.contains("`patern`"), "{table}: {message}");
            }
        }
    }

    #[test]
    fn weights_stand_beside_the_settings() {
        let part = read(json!({"kind": "regex", "pattern": "a", "weight": 0.5})).expect("a part");
        assert!((part.weight - 0.5).abs() < f64::EPSILON);
        assert!(matches!(part.reward, RewardConfig::Regex(config) if config.pattern == "a"));
        let message = read(json!({"kind": "regexp"})).expect_err("no kind").to_string();
        assert!(message.contains("regexp") && message.contains("json_schema"), "{message}");
    }
}
