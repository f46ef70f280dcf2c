//! Preference pairs: `chosen` and `rejected`, as text or turns, with or without a prompt.

use serde_json::{Map, Value};

use super::turns::{context, continued, list, response, tools, turns, with_system};
use super::{Dialogue, Record, alpaca, expected, missing, optional};
use crate::Message;

pub(super) fn record(row: &Map<String, Value>) -> Result<Record, String> {
    let (chosen_key, chosen) = side(row, ["chosen", "chosen_messages"])?;
    let (rejected_key, rejected) = side(row, ["rejected", "rejected_messages"])?;
    let margin = margin(row)?;
    let (chosen, rejected) = match (prompt(row)?, chosen, rejected) {
        (Prompt::None, Value::String(chosen), Value::String(rejected)) => texts(chosen, rejected),
        (Prompt::Text(prompt), Value::String(chosen), Value::String(rejected)) => {
            let pair =
                |completion: &str| Dialogue::Pair { prompt: prompt.clone(), completion: completion.into() };
            (pair(chosen), pair(rejected))
        }
        (prompt, chosen, rejected) => {
            let chosen = response(chosen_key, chosen)?;
            let rejected = response(rejected_key, rejected)?;
            let (chosen, rejected) = conversations(prompt, chosen, rejected);
            let tools = tools(row)?;
            let chat = |messages| Dialogue::Chat { messages, tools: tools.clone() };
            (chat(chosen), chat(rejected))
        }
    };
    Ok(Record::Preference { chosen, rejected, margin })
}

enum Prompt {
    None,
    Text(String),
    Turns(Vec<Message>),
}

fn side<'a>(
    row: &'a Map<String, Value>,
    keys: [&'static str; 2],
) -> Result<(&'static str, &'a Value), String> {
    keys.into_iter().find_map(|key| Some((key, optional(row, key)?))).ok_or_else(|| missing(keys[0]))
}

fn prompt(row: &Map<String, Value>) -> Result<Prompt, String> {
    if let Some((key, value)) = list(row) {
        return Ok(Prompt::Turns(context(with_system(row, turns(key, value)?)?)));
    }
    if optional(row, "instruction").is_some() {
        return Ok(Prompt::Turns(context(alpaca::prompt(row)?)));
    }
    match optional(row, "prompt") {
        None => Ok(Prompt::None),
        Some(Value::String(text)) => match with_system(row, Vec::new())? {
            system if system.is_empty() => Ok(Prompt::Text(text.clone())),
            system => Ok(Prompt::Turns(continued(system, vec![Message::new("user", text.clone())]))),
        },
        Some(value) => Ok(Prompt::Turns(context(with_system(row, turns("prompt", value)?)?))),
    }
}

fn margin(row: &Map<String, Value>) -> Result<Option<f32>, String> {
    let number = |value: &Value| {
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.ok_or_else(|| expected("margin", "a finite number", value))
    };
    optional(row, "margin").map(number).transpose()
}

/// Whole conversations, in which only what differs is learnt.
fn conversations(
    prompt: Prompt,
    chosen: Vec<Message>,
    rejected: Vec<Message>,
) -> (Vec<Message>, Vec<Message>) {
    let given = match prompt {
        Prompt::None => Vec::new(),
        Prompt::Text(text) => vec![Message::new("user", text)],
        Prompt::Turns(turns) => turns,
    };
    // Some files repeat the prompt in both sides: a side that begins a conversation is whole.
    let is_whole =
        |side: &[Message]| side.first().is_some_and(|first| !first.is_model() && first.role != "tool");
    if given.is_empty() || (is_whole(&chosen) && is_whole(&rejected)) {
        return without_common(chosen, rejected);
    }
    (continued(given.clone(), chosen), continued(given, rejected))
}

/// The turns that both begin with are the prompt; of equal conversations, all but the last turn.
fn without_common(mut chosen: Vec<Message>, mut rejected: Vec<Message>) -> (Vec<Message>, Vec<Message>) {
    let common = chosen.iter().zip(&rejected).take_while(|(a, b)| a.says_the_same(b)).count();
    let common = common.min(chosen.len().min(rejected.len()).saturating_sub(1));
    for message in chosen[..common].iter_mut().chain(&mut rejected[..common]) {
        message.learn = false;
    }
    (chosen, rejected)
}

/// Texts without a prompt: what both begin with, up to the last space, is the prompt.
fn texts(chosen: &str, rejected: &str) -> (Dialogue, Dialogue) {
    let pairs = chosen.char_indices().zip(rejected.chars());
    let common = pairs.take_while(|((_, a), b)| a == b).last().map_or(0, |((at, c), _)| at + c.len_utf8());
    // A word that is cut in two would be one token in the prompt and another in the response.
    let prompt_len = chosen[..common].rfind(char::is_whitespace).unwrap_or(0);
    let plain = |text: &str| Dialogue::Plain { text: text.to_owned(), prompt_len };
    (plain(chosen), plain(rejected))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(row: &Value) -> (Dialogue, Dialogue, Option<f32>) {
        match record(row.as_object().unwrap()).unwrap() {
            Record::Preference { chosen, rejected, margin } => (chosen, rejected, margin),
            other => panic!("{other:?}"),
        }
    }

    fn said(dialogue: &Dialogue) -> Vec<(&str, &str, bool)> {
        let Dialogue::Chat { messages, .. } = dialogue else { panic!("{dialogue:?}") };
        messages.iter().map(|m| (m.role.as_str(), m.content.as_str(), m.learn)).collect()
    }

    #[test]
    fn every_spelling_gives_the_same_conversations() {
        let user = json!({"role": "user", "content": "q"});
        let turn = |text: &str| json!({"role": "assistant", "content": text});
        let rows = [
            json!({"chosen": [user, turn("c")], "rejected": [user, turn("r")]}),
            json!({"prompt": [user], "chosen": [turn("c")], "rejected": [turn("r")]}),
            json!({"prompt": "q", "chosen": [user, turn("c")], "rejected": [user, turn("r")]}),
            json!({"prompt": [user], "chosen": "c", "rejected": "r"}),
            json!({"chosen_messages": [user, turn("c")], "rejected_messages": [user, turn("r")]}),
            json!({"conversations": [{"from": "human", "value": "q"}],
                   "chosen": {"from": "gpt", "value": "c"}, "rejected": {"from": "gpt", "value": "r"}}),
            json!({"instruction": "q", "input": "", "chosen": "c", "rejected": "r"}),
        ];
        for row in rows {
            let (chosen, rejected, margin) = parse(&row);
            assert_eq!(said(&chosen), [("user", "q", false), ("assistant", "c", true)], "{row}");
            assert_eq!(said(&rejected), [("user", "q", false), ("assistant", "r", true)], "{row}");
            assert_eq!(margin, None);
        }
    }

    #[test]
    fn earlier_turns_of_the_model_are_context() {
        let row = json!({
            "conversations": [
                {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}],
            "chosen": {"from": "gpt", "value": "d"}, "rejected": {"from": "gpt", "value": "e"}, "margin": 2});
        let (chosen, _, margin) = parse(&row);
        assert_eq!(said(&chosen).iter().map(|turn| turn.2).collect::<Vec<_>>(), [false, false, false, true]);
        assert_eq!(margin, Some(2.0));
    }

    #[test]
    fn texts_without_a_prompt_share_whole_words() {
        let (chosen, rejected, _) =
            parse(&json!({"chosen": "Q: hi A: goodbye", "rejected": "Q: hi A: good day"}));
        assert_eq!(chosen, Dialogue::Plain { text: "Q: hi A: goodbye".into(), prompt_len: 8 });
        assert!(matches!(rejected, Dialogue::Plain { prompt_len: 8, .. }));
    }

    #[test]
    fn bad_margins_and_missing_sides_are_named() {
        for (row, expected) in [
            (json!({"prompt": "p", "chosen": "c"}), "`rejected` is missing"),
            (json!({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "big"}), "`margin`"),
            (json!({"chosen": [{"role": "user", "content": "c"}], "rejected": "r"}), "no turn to learn from"),
        ] {
            let message = record(row.as_object().unwrap()).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
