//! Alpaca rows: `instruction`, `input`, `output`, earlier turns in `history`.

use serde_json::{Map, Value};

use super::turns::with_system;
use super::{Dialogue, expected, optional, optional_text, required_text};
use crate::Message;

pub(super) fn dialogue(row: &Map<String, Value>) -> Result<Dialogue, String> {
    let mut messages = prompt(row)?;
    messages.push(Message::new("assistant", required_text(row, "output")?));
    Ok(Dialogue::Chat { messages, tools: None })
}

/// Everything before the response: system, history, then instruction and input on lines of their own.
pub(super) fn prompt(row: &Map<String, Value>) -> Result<Vec<Message>, String> {
    let instruction = required_text(row, "instruction")?;
    let input = optional_text(row, "input")?.unwrap_or_default();
    let parts: Vec<&str> = [instruction, input].into_iter().filter(|part| !part.is_empty()).collect();
    let mut messages = history(row)?;
    messages.push(Message::new("user", parts.join("\n")));
    with_system(row, messages)
}

fn history(row: &Map<String, Value>) -> Result<Vec<Message>, String> {
    let Some(value) = optional(row, "history") else { return Ok(Vec::new()) };
    let rounds = value.as_array().ok_or_else(|| expected("history", "a list of pairs", value))?;
    let mut messages = Vec::new();
    for round in rounds {
        let pair = round.as_array().map(Vec::as_slice);
        let Some([Value::String(user), Value::String(assistant)]) = pair else {
            return Err(format!("`history`: expected pairs of texts, got {round}"));
        };
        messages.push(Message::new("user", user.clone()));
        messages.push(Message::new("assistant", assistant.clone()));
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn turns_stand_in_the_order_of_the_talk() {
        let row = json!({
            "system": "s", "history": [["q", "a"]], "instruction": "do", "input": "this", "output": "done"
        });
        let Dialogue::Chat { messages, .. } = dialogue(row.as_object().unwrap()).unwrap() else { panic!() };
        let said: Vec<_> = messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        let expected =
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "do\nthis"), ("assistant", "done")];
        assert_eq!(said, expected);
    }

    #[test]
    fn an_empty_input_leaves_no_blank_line() {
        let row = json!({"instruction": "do", "input": "", "output": "done"});
        let messages = prompt(row.as_object().unwrap()).unwrap();
        assert_eq!(messages[0].content, "do");
    }

    #[test]
    fn broken_history_is_shown() {
        let row = json!({"instruction": "do", "output": "done", "history": [["q"]]});
        assert!(dialogue(row.as_object().unwrap()).unwrap_err().contains("[\"q\"]"));
    }
}
