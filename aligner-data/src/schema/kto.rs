//! Single responses with a verdict: desirable or not.

use serde_json::{Map, Value};

use super::{Dialogue, Record, missing, optional, turns};
use crate::Message;

const LABELS: [&str; 2] = ["label", "kto_tag"];

/// Whether the row has a verdict.
pub(super) fn has_label(row: &Map<String, Value>) -> bool {
    LABELS.iter().any(|key| optional(row, key).is_some_and(|value| verdict(value).is_some()))
}

pub(super) fn record(row: &Map<String, Value>) -> Result<Record, String> {
    let (key, label) =
        LABELS.iter().find_map(|key| Some((*key, optional(row, key)?))).ok_or_else(|| missing("label"))?;
    let desirable = verdict(label).ok_or_else(|| format!("`{key}`: expected true or false, got {label}"))?;
    let dialogue = match turns::list(row) {
        Some(_) => last_turn_only(turns::conversation(row)?),
        None => turns::prompt_completion(row)?,
    };
    Ok(Record::Kto { dialogue, desirable })
}

fn verdict(value: &Value) -> Option<bool> {
    match (value.as_bool(), value.as_u64()) {
        (Some(verdict), _) => Some(verdict),
        (None, Some(0)) => Some(false),
        (None, Some(1)) => Some(true),
        _ => None,
    }
}

/// The verdict is on the last response: the model's earlier turns are context.
fn last_turn_only(dialogue: Dialogue) -> Dialogue {
    let Dialogue::Chat { mut messages, tools } = dialogue else { return dialogue };
    let last = messages.iter().rposition(Message::is_model).unwrap_or(0);
    for message in &mut messages[..last] {
        message.learn = false;
    }
    Dialogue::Chat { messages, tools }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_verdict_is_on_the_last_turn_of_the_model() {
        let row = json!({"label": false, "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]});
        let record = record(row.as_object().unwrap()).unwrap();
        let Record::Kto { dialogue: Dialogue::Chat { messages, .. }, desirable } = record else { panic!() };
        assert!(!desirable);
        assert_eq!(messages.iter().map(|m| m.learn).collect::<Vec<_>>(), [false, false, false, true]);
    }

    #[test]
    fn a_label_that_is_no_verdict_is_shown() {
        let row = json!({"prompt": "p", "completion": "c", "label": "good"});
        assert!(record(row.as_object().unwrap()).unwrap_err().contains("got \"good\""));
    }
}
