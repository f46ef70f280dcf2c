//! What a row means: the field's schemas, detected from the keys and checked row by row.

mod alpaca;
mod kto;
mod preference;
mod prompt;
mod turns;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Message;
use crate::read::kind;

/// The schema of a data file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Told from the first row's keys.
    #[default]
    Auto,
    /// `messages`: a list of `{role, content}`.
    Messages,
    /// `conversations`: a list of `{from, value}`, with an optional `system`.
    Sharegpt,
    /// `instruction`, `output`, optional `input`, `history` and `system`.
    Alpaca,
    /// `prompt` and `completion`, as text or messages.
    PromptCompletion,
    /// `text`, of which every token is a target.
    Text,
    /// `chosen` and `rejected`, as text or messages, with an optional prompt and `margin`.
    Preference,
    /// A response with a `label`: desirable or not.
    Kto,
    /// `prompt`, as text or messages, to be answered in training; of rows of another schema, what comes
    /// before their answer. Told from the keys where a row has a `prompt` alone.
    Prompt,
}

/// What a data set trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Groups of one sample.
    Sft,
    /// Groups of two, chosen first.
    Preference,
    /// Groups of one sample, whose reward is 1 if it is desirable, else 0.
    Kto,
    /// Groups of one sample without a target: a prompt to answer.
    Prompt,
}

/// Text that a sample is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Dialogue {
    /// Turns, for a chat template.
    Chat { messages: Vec<Message>, tools: Option<Value> },
    /// A prompt and its completion: two turns if there is a template, else joined as they are.
    Pair { prompt: String, completion: String },
    /// Text as it is; targets begin at byte `prompt_len`.
    Plain { text: String, prompt_len: usize },
}

/// A row's meaning.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Record {
    Sft(Dialogue),
    Preference { chosen: Dialogue, rejected: Dialogue, margin: Option<f32> },
    Kto { dialogue: Dialogue, desirable: bool },
    Prompt(Dialogue),
}

impl Format {
    /// What the schema trains; `None` until [`Self::detect`] has told which it is.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Auto => None,
            Self::Messages | Self::Sharegpt | Self::Alpaca | Self::PromptCompletion | Self::Text => {
                Some(Kind::Sft)
            }
            Self::Preference => Some(Kind::Preference),
            Self::Kto => Some(Kind::Kto),
            Self::Prompt => Some(Kind::Prompt),
        }
    }

    /// The schema that a row's keys tell, the most specific first.
    ///
    /// # Errors
    /// The keys that are there and those that would have been understood.
    pub fn detect(row: &Map<String, Value>) -> Result<Self, String> {
        let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
        let is_pair =
            (has("chosen") && has("rejected")) || (has("chosen_messages") && has("rejected_messages"));
        let is_response = has("messages") || has("conversations") || has("completion");
        Ok(if is_pair {
            Self::Preference
        } else if is_response && (kto::has_label(row)) {
            Self::Kto
        } else if has("messages") {
            Self::Messages
        } else if has("conversations") {
            Self::Sharegpt
        } else if has("instruction") && has("output") {
            Self::Alpaca
        } else if has("prompt") && has("completion") {
            Self::PromptCompletion
        } else if has("prompt") {
            Self::Prompt
        } else if has("text") {
            Self::Text
        } else {
            let keys: Vec<String> = row.keys().map(|key| format!("`{key}`")).collect();
            return Err(format!(
                "no known schema has the keys {}; expected `messages`, `conversations`, `instruction` and `output`, \
                 `prompt` with or without `completion`, `text`, `chosen` and `rejected`, or one of these with `label`",
                keys.join(", ")
            ));
        })
    }

    /// The row's meaning under this schema.
    pub(crate) fn parse(self, row: &Map<String, Value>) -> Result<Record, String> {
        refuse_media(row)?;
        match self {
            Self::Auto => Self::detect(row)?.parse(row),
            Self::Messages | Self::Sharegpt => Ok(Record::Sft(turns::conversation(row)?)),
            Self::Alpaca => Ok(Record::Sft(alpaca::dialogue(row)?)),
            Self::PromptCompletion => Ok(Record::Sft(turns::prompt_completion(row)?)),
            Self::Text => {
                let text = required_text(row, "text")?.to_owned();
                Ok(Record::Sft(Dialogue::Plain { text, prompt_len: 0 }))
            }
            Self::Preference => preference::record(row),
            Self::Kto => kto::record(row),
            Self::Prompt => Ok(Record::Prompt(prompt::dialogue(row)?)),
        }
    }

    /// Whether some schema reads the key: what else a row has is its metadata.
    pub(crate) fn reads(key: &str) -> bool {
        const READ: [&str; 22] = [
            "messages",
            "conversations",
            "system",
            "tools",
            "instruction",
            "input",
            "output",
            "history",
            "prompt",
            "completion",
            "text",
            "chosen",
            "rejected",
            "chosen_messages",
            "rejected_messages",
            "margin",
            "label",
            "kto_tag",
            // Refused, unless they are empty.
            "images",
            "image",
            "videos",
            "audios",
        ];
        READ.contains(&key)
    }

    /// The keys of a row that no schema reads.
    pub(crate) fn metadata(row: &Map<String, Value>) -> Map<String, Value> {
        let rest = row.iter().filter(|(key, value)| !Self::reads(key) && !value.is_null());
        rest.map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

impl Dialogue {
    /// What is asked: the last turn of a prompt, or its text.
    pub(crate) fn question(&self) -> &str {
        match self {
            Self::Chat { messages, .. } => messages.last().map_or("", |message| &message.content),
            Self::Pair { prompt, .. } => prompt,
            Self::Plain { text, .. } => text,
        }
    }

    /// Whether both would train on the same text.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Chat { messages: a, .. }, Self::Chat { messages: b, .. }) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.says_the_same(b))
            }
            (Self::Plain { text: a, .. }, Self::Plain { text: b, .. }) => a == b,
            _ => self == other,
        }
    }
}

fn refuse_media(row: &Map<String, Value>) -> Result<(), String> {
    for key in ["images", "image", "videos", "audios"] {
        if row
            .get(key)
            .is_some_and(|value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()))
        {
            return Err(format!("`{key}`: only text is supported"));
        }
    }
    Ok(())
}

/// The value of `key` unless it is absent or null.
fn optional<'a>(row: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    row.get(key).filter(|value| !value.is_null())
}

fn optional_text<'a>(row: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, String> {
    let text = |value: &'a Value| value.as_str().ok_or_else(|| expected(key, "a text", value));
    optional(row, key).map(text).transpose()
}

fn required_text<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    optional_text(row, key)?.ok_or_else(|| missing(key))
}

fn missing(key: &str) -> String {
    format!("`{key}` is missing")
}

fn expected(key: &str, what: &str, got: &Value) -> String {
    format!("`{key}`: expected {what}, got {}", kind(got))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn detect(row: &Value) -> Result<Format, String> {
        Format::detect(row.as_object().unwrap())
    }

    #[test]
    fn the_most_specific_schema_is_told_from_the_keys() {
        for (row, expected) in [
            (json!({"messages": [], "label": true}), Format::Kto),
            (json!({"messages": [], "label": "spam"}), Format::Messages),
            (json!({"prompt": "p", "completion": "c", "label": null}), Format::PromptCompletion),
            (json!({"prompt": "p", "chosen": "c", "rejected": "r"}), Format::Preference),
            (json!({"conversations": [], "kto_tag": false}), Format::Kto),
            (json!({"conversations": []}), Format::Sharegpt),
            (json!({"instruction": "i", "output": "o", "text": "t"}), Format::Alpaca),
            (json!({"text": "t", "label": 1}), Format::Text),
            (json!({"prompt": "p", "answer": "7"}), Format::Prompt),
        ] {
            assert_eq!(detect(&row), Ok(expected), "{row}");
        }
    }

    #[test]
    fn unknown_keys_are_listed() {
        let message = detect(&json!({"question": "q", "answer": "a"})).unwrap_err();
        assert!(message.contains("`question`, `answer`"), "{message}");
    }

    #[test]
    fn media_is_refused_by_name() {
        let row = json!({"messages": [{"role": "user", "content": "<image>"}], "images": ["a.jpg"]});
        let message = Format::Auto.parse(row.as_object().unwrap()).unwrap_err();
        assert_eq!(message, "`images`: only text is supported");
    }

    #[test]
    fn what_no_schema_reads_is_metadata() {
        let row = json!({"text": "t", "source": "web", "score": null});
        assert_eq!(Value::Object(Format::metadata(row.as_object().unwrap())), json!({"source": "web"}));
    }
}
