//! Scores responses that are JSON of a given shape.

mod schema;

use std::path::PathBuf;

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::finite;
pub use schema::Schema;

/// Settings of [`JsonSchema`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JsonSchemaConfig {
    /// The schema itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<Value>,
    /// The file that holds it, where it is not given here.
    pub schema_file: Option<PathBuf>,
    /// Whether the JSON may stand between lines of three backticks, the first with or without `json`.
    pub allow_fence: bool,
    /// The score of a response that the schema allows.
    pub valid: f64,
    /// The score of JSON that it does not.
    pub invalid: f64,
    /// The score of what is no JSON.
    pub no_json: f64,
}

impl Default for JsonSchemaConfig {
    fn default() -> Self {
        Self { schema: None, schema_file: None, allow_fence: true, valid: 1.0, invalid: 0.0, no_json: 0.0 }
    }
}

/// Whether the response is one JSON value that a [`Schema`] allows.
#[derive(Debug, Clone)]
pub struct JsonSchema {
    config: JsonSchemaConfig,
    schema: Schema,
}

impl JsonSchema {
    /// The reward with these settings; reads the schema's file.
    ///
    /// # Errors
    /// [`Error::Setting`] for a schema that is absent, given twice or not of the subset that [`Schema`] knows, and a
    /// score that is not finite; a file that cannot be read or is no JSON.
    pub fn new(config: JsonSchemaConfig) -> Result<Self> {
        for (key, value) in
            [("valid", config.valid), ("invalid", config.invalid), ("no_json", config.no_json)]
        {
            finite(key, value)?;
        }
        let schema = match (&config.schema, &config.schema_file) {
            (Some(schema), None) => {
                Schema::new(schema).map_err(|message| Error::setting("schema", message))?
            }
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
                let schema =
                    serde_json::from_str(&text).map_err(|error| Error::format(path, error.to_string()))?;
                Schema::new(&schema).map_err(|message| Error::format(path, message))?
            }
            (Some(_), Some(_)) => {
                return Err(Error::setting("schema_file", "must not be set where `schema` is"));
            }
            (None, None) => return Err(Error::setting("schema", "must be set, or `schema_file`")),
        };
        Ok(Self { config, schema })
    }

    fn rate(&self, text: &str) -> f64 {
        let text = if self.config.allow_fence { unfenced(text) } else { text };
        match serde_json::from_str(text) {
            Err(_) => self.config.no_json,
            Ok(value) if self.schema.allows(&value) => self.config.valid,
            Ok(_) => self.config.invalid,
        }
    }
}

/// The text between a pair of fences that encloses all of it; else the text itself.
fn unfenced(text: &str) -> &str {
    let inside = || {
        let inside = text.trim().strip_prefix("```")?.strip_suffix("```")?;
        let (language, inside) = inside.split_once('\n')?;
        (language.trim().is_empty() || language.trim().eq_ignore_ascii_case("json")).then_some(inside)
    };
    inside().unwrap_or(text)
}

impl Reward for JsonSchema {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(|sample| Score::Sample(self.rate(&sample.text) as f32)).collect())
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the scores are the settings' own")]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> JsonSchemaConfig {
        let schema =
            json!({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}});
        JsonSchemaConfig { schema: Some(schema), invalid: 0.25, ..JsonSchemaConfig::default() }
    }

    #[test]
    fn json_is_told_from_valid_json() {
        let reward = JsonSchema::new(config()).expect("a schema");
        assert_eq!(reward.rate(r#" {"name": "Ann"} "#), 1.0);
        assert_eq!(reward.rate(r#"{"name": 7}"#), 0.25);
        assert_eq!(reward.rate(r#"{"name": "Ann"} and more"#), 0.0);
        assert_eq!(reward.rate(""), 0.0);
    }

    #[test]
    fn a_fence_around_all_of_it_is_looked_through() {
        let reward = JsonSchema::new(config()).expect("a schema");
        for text in ["```json\n{\"name\": \"Ann\"}\n```", "\n```\n{\"name\": \"Ann\"}```\n"] {
            assert_eq!(reward.rate(text), 1.0, "{text}");
        }
        assert_eq!(reward.rate("```yaml\n{\"name\": \"Ann\"}\n```"), 0.0);
        let strict = JsonSchema::new(JsonSchemaConfig { allow_fence: false, ..config() }).expect("a schema");
        assert_eq!(strict.rate("```json\n{\"name\": \"Ann\"}\n```"), 0.0);
    }

    #[test]
    fn a_schema_can_come_from_a_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("schema.json");
        let from_file = || {
            JsonSchema::new(JsonSchemaConfig { schema: None, schema_file: Some(path.clone()), ..config() })
        };
        assert!(from_file().expect_err("no file").to_string().contains("schema.json"));
        std::fs::write(&path, r#"{"type": "integer"}"#).expect("space");
        assert_eq!(from_file().expect("a schema").rate("7"), 1.0);
        std::fs::write(&path, r#"{"typ": "integer"}"#).expect("space");
        let message = from_file().expect_err("unknown keyword").to_string();
        assert!(message.contains("schema.json") && message.contains("`typ`"), "{message}");
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config| JsonSchema::new(config).expect_err("no reward").to_string();
        assert!(refused(JsonSchemaConfig::default()).starts_with("schema: "));
        let both = JsonSchemaConfig { schema_file: Some("a".into()), ..config() };
        assert!(refused(both).starts_with("schema_file: "));
        assert!(refused(JsonSchemaConfig { valid: f64::NAN, ..config() }).starts_with("valid: "));
        let unknown = JsonSchemaConfig { schema: Some(json!({"$ref": "#/a"})), ..config() };
        let message = refused(unknown);
        assert!(message.starts_with("schema: ") && message.contains("`$ref`"), "{message}");
    }
}
