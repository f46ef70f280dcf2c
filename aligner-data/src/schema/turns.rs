//! Lists of turns: chat `messages`, and `conversations` as `ShareGPT` has them.

use serde_json::{Map, Value, json};

use super::{Dialogue, expected, missing, optional, optional_text};
use crate::Message;
use crate::read::kind;

/// A row of `messages` or `conversations`, with its optional `system` and `tools`.
pub(super) fn conversation(row: &Map<String, Value>) -> Result<Dialogue, String> {
    let (key, value) = list(row).ok_or_else(|| missing("messages"))?;
    let messages = with_system(row, turns(key, value)?)?;
    if !messages.iter().any(|message| message.learn) {
        return Err(format!("`{key}` has no turn to learn from: expected one of the assistant"));
    }
    Ok(Dialogue::Chat { messages, tools: tools(row)? })
}

/// A row of `prompt` and `completion`, both texts or both lists of turns.
pub(super) fn prompt_completion(row: &Map<String, Value>) -> Result<Dialogue, String> {
    let prompt = optional(row, "prompt").ok_or_else(|| missing("prompt"))?;
    let completion = optional(row, "completion").ok_or_else(|| missing("completion"))?;
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) => {
            Ok(Dialogue::Pair { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::String(_), other) => Err(expected("completion", "a text, as `prompt` is one", other)),
        _ => {
            let prompt = context(with_system(row, turns("prompt", prompt)?)?);
            Ok(Dialogue::Chat {
                messages: continued(prompt, response("completion", completion)?),
                tools: tools(row)?,
            })
        }
    }
}

/// The row's list of turns and the key that it stands under.
pub(super) fn list(row: &Map<String, Value>) -> Option<(&'static str, &Value)> {
    ["messages", "conversations"].into_iter().find_map(|key| Some((key, optional(row, key)?)))
}

/// A response as a text, one turn or several, of which one at least is learnt.
pub(super) fn response(key: &str, value: &Value) -> Result<Vec<Message>, String> {
    let messages = match value {
        Value::String(text) => vec![Message::new("assistant", text.clone())],
        other => turns(key, other)?,
    };
    if messages.iter().any(|message| message.learn) {
        return Ok(messages);
    }
    Err(format!("`{key}` has no turn to learn from: expected one of the assistant"))
}

/// The turns of a prompt, as context.
pub(super) fn context(messages: Vec<Message>) -> Vec<Message> {
    messages.into_iter().map(Message::context).collect()
}

pub(super) fn continued(mut prompt: Vec<Message>, response: Vec<Message>) -> Vec<Message> {
    prompt.extend(response);
    prompt
}

/// Puts the row's `system` before the turns unless they begin with a system turn.
pub(super) fn with_system(
    row: &Map<String, Value>,
    mut messages: Vec<Message>,
) -> Result<Vec<Message>, String> {
    let begins_with_system = messages.first().is_some_and(|message| message.role == "system");
    if let Some(system) = optional_text(row, "system")?.filter(|text| !text.is_empty() && !begins_with_system)
    {
        messages.insert(0, Message::new("system", system));
    }
    Ok(messages)
}

/// `tools` as a list, which some files hold as JSON in a text.
pub(super) fn tools(row: &Map<String, Value>) -> Result<Option<Value>, String> {
    match optional(row, "tools") {
        None => Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(tools)) => Ok(non_empty(tools)),
            _ => Err("`tools`: expected a JSON list in the text".into()),
        },
        Some(Value::Array(tools)) => Ok(non_empty(tools.clone())),
        Some(other) => Err(expected("tools", "a list", other)),
    }
}

fn non_empty(tools: Vec<Value>) -> Option<Value> {
    (!tools.is_empty()).then_some(Value::Array(tools))
}

/// A list of turns, or one turn alone.
pub(super) fn turns(key: &str, value: &Value) -> Result<Vec<Message>, String> {
    let one;
    let list = match value {
        Value::Array(list) => list,
        Value::Object(_) => {
            one = vec![value.clone()];
            &one
        }
        other => return Err(expected(key, "a list of turns", other)),
    };
    if list.is_empty() {
        return Err(format!("`{key}` is empty: expected at least one turn"));
    }
    let numbered = list.iter().enumerate();
    numbered
        .map(|(at, value)| turn(value).map_err(|what| format!("`{key}`, turn {}: {what}", at + 1)))
        .collect()
}

fn turn(value: &Value) -> Result<Message, String> {
    let object = value.as_object().ok_or_else(|| format!("expected an object, got {}", kind(value)))?;
    let (role_key, content_key) =
        if object.contains_key("from") { ("from", "value") } else { ("role", "content") };
    let role = optional_text(object, role_key)?.ok_or_else(|| missing(role_key))?;
    let mut fields = object.clone();
    for key in [role_key, content_key, "loss_weight", "weight"] {
        fields.shift_remove(key);
    }
    // Parquet has a column for each field that any turn has: null means absent.
    fields.retain(|_, value| !value.is_null());
    let mut message = match role {
        "function_call" => {
            let call = optional_text(object, content_key)?.ok_or_else(|| missing(content_key))?;
            fields.insert("tool_calls".into(), tool_calls(call)?);
            Message::new("assistant", "")
        }
        _ => Message::new(if role_key == "from" { speaker(role)? } else { role }, ""),
    };
    message.fields = fields;
    if role != "function_call" {
        fill(&mut message, content_key, object.get(content_key))?;
    }
    if let Some(learn) = learn(object)? {
        message.learn = learn;
    }
    Ok(message)
}

fn speaker(from: &str) -> Result<&'static str, String> {
    match from {
        "human" | "user" => Ok("user"),
        "gpt" | "assistant" | "chatgpt" | "model" | "bing" | "bard" => Ok("assistant"),
        "system" => Ok("system"),
        "observation" | "function_response" | "tool" => Ok("tool"),
        other => Err(format!(
            "unknown speaker `{other}`: expected human, gpt, system, function_call or observation"
        )),
    }
}

/// The content: a text, nothing beside `tool_calls`, or a list of parts.
fn fill(message: &mut Message, key: &str, content: Option<&Value>) -> Result<(), String> {
    match content {
        Some(Value::String(text)) => message.content.clone_from(text),
        Some(Value::Array(parts)) => {
            for part in parts {
                add_part(message, part)?;
            }
        }
        None | Some(Value::Null) if message.fields.contains_key("tool_calls") => {}
        None | Some(Value::Null) => return Err(missing(key)),
        Some(other) => return Err(expected(key, "a text", other)),
    }
    Ok(())
}

fn add_part(message: &mut Message, part: &Value) -> Result<(), String> {
    let kind = part["type"].as_str().unwrap_or("text");
    let text =
        part.get(kind).or_else(|| part.get("text")).or_else(|| part.get("value")).and_then(Value::as_str);
    let text = text.ok_or_else(|| format!("a part of type `{kind}` has no text"))?;
    match kind {
        "text" => message.content.push_str(text),
        "reasoning" | "thinking" => {
            let before = message.fields.get("reasoning_content").and_then(Value::as_str).unwrap_or_default();
            let joined = format!("{before}{text}");
            message.fields.insert("reasoning_content".into(), joined.into());
        }
        "tool_call" => {
            let Value::Array(calls) = tool_calls(text)? else { return Ok(()) };
            match message.fields.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(before) => before.extend(calls),
                None => drop(message.fields.insert("tool_calls".into(), calls.into())),
            }
        }
        other => return Err(format!("a part of type `{other}`: only text is supported")),
    }
    Ok(())
}

/// `{"name", "arguments"}`, or a list of them, as the list that templates read.
fn tool_calls(text: &str) -> Result<Value, String> {
    let parsed: Value =
        serde_json::from_str(text).map_err(|error| format!("a tool call is not JSON: {error}"))?;
    let calls = match parsed {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let wrap = |call: Value| match call {
        call if call.get("function").is_some() => call,
        call => json!({"type": "function", "function": call}),
    };
    Ok(calls.into_iter().map(wrap).collect())
}

/// The turn's own word on whether it is learnt: `loss_weight` or `weight`, 0 or 1.
fn learn(object: &Map<String, Value>) -> Result<Option<bool>, String> {
    for key in ["loss_weight", "weight"] {
        let Some(value) = optional(object, key) else { continue };
        return match value.as_f64().or_else(|| value.as_bool().map(f64::from)) {
            Some(0.0) => Ok(Some(false)),
            Some(1.0) => Ok(Some(true)),
            _ => Err(format!("`{key}`: expected 0 or 1, got {value}")),
        };
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<Vec<Message>, String> {
        turns("messages", value)
    }

    #[test]
    fn both_spellings_give_the_same_turns() {
        let chat = parse(&json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]));
        let sharegpt = parse(&json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]));
        assert_eq!(chat, sharegpt);
        assert_eq!(chat.unwrap().iter().map(|message| message.learn).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn weights_override_who_is_learnt_and_must_be_whole() {
        let turn =
            |weight: Value| parse(&json!([{"role": "assistant", "content": "b", "loss_weight": weight}]));
        assert!(!turn(json!(0.0)).unwrap()[0].learn);
        assert!(turn(json!(1)).unwrap()[0].learn);
        assert!(turn(json!(0.5)).unwrap_err().contains("expected 0 or 1, got 0.5"));
    }

    #[test]
    fn parts_of_text_reasoning_and_calls_are_told_apart() {
        let messages = parse(&json!([{"role": "assistant", "content": [
            {"type": "reasoning", "value": "hm"},
            {"type": "tool_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
            {"type": "text", "text": "done"},
        ]}]))
        .unwrap();
        assert_eq!(messages[0].content, "done");
        assert_eq!(messages[0].fields["reasoning_content"], "hm");
        assert_eq!(messages[0].fields["tool_calls"][0]["function"]["name"], "f");
        assert!(parse(&json!([{"role": "user", "content": [{"type": "image", "image": "x"}]}])).is_err());
    }

    #[test]
    fn faults_name_the_turn() {
        for (value, expected) in [
            (json!([{"role": "user", "content": "a"}, {"content": "b"}]), "turn 2: `role` is missing"),
            (json!([{"from": "alien", "value": "a"}]), "turn 1: unknown speaker `alien`"),
            (json!([{"role": "user", "content": 3}]), "turn 1: `content`: expected a text, got a number"),
            (json!(["hello"]), "turn 1: expected an object, got a text"),
            (json!([]), "`messages` is empty"),
        ] {
            let message = parse(&value).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_conversation_without_the_assistant_has_nothing_to_learn() {
        let row = json!({"messages": [{"role": "user", "content": "a"}]});
        assert!(conversation(row.as_object().unwrap()).unwrap_err().contains("no turn to learn from"));
    }
}
