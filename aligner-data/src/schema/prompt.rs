//! Prompts to answer: of rows that have nothing else, and of rows whose answer is left aside.

use serde_json::{Map, Value};

use super::{Dialogue, alpaca, missing, optional, optional_text, turns};
use crate::Message;

/// A row's prompt: its `prompt`, else its turns up to the last answer, its `instruction`, or its `text`.
pub(super) fn dialogue(row: &Map<String, Value>) -> Result<Dialogue, String> {
    match optional(row, "prompt") {
        Some(Value::String(text)) => return plain("prompt", text),
        Some(other) => return chat(row, turns::turns("prompt", other)?),
        None => {}
    }
    if let Some((key, value)) = turns::list(row) {
        let mut messages = turns::turns(key, value)?;
        while messages.last().is_some_and(|message| message.role == "assistant") {
            messages.pop();
        }
        if messages.is_empty() {
            return Err(format!("`{key}` has no turn before the answer: nothing asks for one"));
        }
        return chat(row, messages);
    }
    if optional(row, "instruction").is_some() {
        return Ok(Dialogue::Chat { messages: turns::context(alpaca::prompt(row)?), tools: None });
    }
    match optional_text(row, "text")? {
        Some(text) => plain("text", text),
        None => Err(missing("prompt")),
    }
}

fn plain(key: &str, text: &str) -> Result<Dialogue, String> {
    if text.is_empty() {
        return Err(format!("`{key}` is empty: there is nothing to answer"));
    }
    Ok(Dialogue::Plain { text: text.to_owned(), prompt_len: text.len() })
}

fn chat(row: &Map<String, Value>, messages: Vec<Message>) -> Result<Dialogue, String> {
    let messages = turns::context(turns::with_system(row, messages)?);
    Ok(Dialogue::Chat { messages, tools: turns::tools(row)? })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(row: &Value) -> Result<Dialogue, String> {
        dialogue(row.as_object().unwrap())
    }

    fn roles(row: &Value) -> Vec<String> {
        match of(row).unwrap() {
            Dialogue::Chat { messages, .. } => messages.into_iter().map(|message| message.role).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_answer_is_left_aside() {
        let turns = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        assert_eq!(roles(&json!({"messages": turns})), ["user"]);
        assert_eq!(roles(&json!({"messages": turns, "system": "s"})), ["system", "user"]);
        assert_eq!(roles(&json!({"instruction": "i", "input": "x", "output": "o"})), ["user"]);
        assert_eq!(of(&json!({"prompt": "p", "completion": "c"})), plain("prompt", "p"));
        assert_eq!(of(&json!({"text": "once"})), plain("text", "once"));
    }

    #[test]
    fn a_row_that_asks_nothing_is_refused() {
        for (row, part) in [
            (json!({"prompt": ""}), "`prompt` is empty"),
            (json!({"messages": [{"role": "assistant", "content": "b"}]}), "before the answer"),
            (json!({"question": "q"}), "`prompt` is missing"),
        ] {
            let message = of(&row).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }
}
