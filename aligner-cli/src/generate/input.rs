//! Prompts from a file of JSON lines.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use aligner_core::Error;
use aligner_data::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Usage;

/// A line.
#[derive(Debug)]
pub(super) struct Asked {
    /// As in the file, or the line's number.
    pub(super) id: Value,
    pub(super) question: Question,
    /// The name of the adapter that is to answer.
    pub(super) adapter: Option<String>,
}

/// What is to be answered.
#[derive(Debug, Clone)]
pub(super) enum Question {
    Prompt(String),
    Conversation(Vec<Message>),
}

#[derive(Deserialize)]
struct Line {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Turn>>,
    adapter: Option<String>,
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// Reads all lines; empty ones are passed over.
///
/// # Errors
/// A line that is no prompt, with the file and its number.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Asked>> {
    let absent = |error| Usage(format!("{}: {error}", path.display()));
    let file = BufReader::new(File::open(path).map_err(absent)?);
    let mut asked = Vec::new();
    for (at, line) in file.split(b'\n').enumerate() {
        let line = line.map_err(Error::io(path))?;
        let number = at + 1;
        let wrong = |what: String| Usage(format!("{}:{number}: {what}", path.display()));
        let text = std::str::from_utf8(&line).map_err(|error| wrong(format!("not UTF-8: {error}")))?;
        if !text.trim().is_empty() {
            asked.push(parse(text, number).map_err(wrong)?);
        }
    }
    Ok(asked)
}

fn parse(text: &str, number: usize) -> Result<Asked, String> {
    let line: Line = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let question = match (line.prompt, line.messages) {
        (Some(prompt), None) => Question::Prompt(prompt),
        (None, Some(turns)) if !turns.is_empty() => {
            let message =
                |turn: Turn| Message { fields: turn.fields, ..Message::new(turn.role, turn.content) };
            Question::Conversation(turns.into_iter().map(message).collect())
        }
        (Some(_), Some(_)) => return Err("expected `prompt` or `messages`, got both".into()),
        (None, Some(_)) => return Err("`messages` is empty".into()),
        (None, None) => return Err("expected `prompt` or `messages`, got neither".into()),
    };
    Ok(Asked { id: line.id.unwrap_or_else(|| number.into()), question, adapter: line.adapter })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_prompt_or_messages() {
        let asked = parse(r#"{"prompt": "hi", "answer": 3}"#, 7).unwrap();
        assert_eq!(asked.id, 7);
        assert!(matches!(asked.question, Question::Prompt(text) if text == "hi"));
        let asked = parse(r#"{"id": "a", "messages": [{"role": "user", "content": "hi"}]}"#, 7).unwrap();
        assert_eq!(asked.id, "a");
        for (text, part) in [
            (r#"{"prompt": "a", "messages": []}"#, "both"),
            (r#"{"messages": []}"#, "empty"),
            (r#"{"id": 1}"#, "neither"),
            (r#"{"prompt": 1}"#, "expected a string"),
            ("nonsense", "line 1"),
        ] {
            assert!(parse(text, 1).unwrap_err().contains(part), "{text}");
        }
    }
}
