//! The fields of a request's body, taken one by one.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::failure::Failure;

/// A JSON object. Fields that nobody takes are ignored: clients send many that change nothing here.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Failure> {
        let text = std::str::from_utf8(body)
            .map_err(|error| Failure::malformed(format!("the body is not UTF-8: {error}")))?;
        match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(Failure::malformed("expected the body to be a JSON object")),
            Err(error) => Err(Failure::malformed(format!("the body is not JSON: {error}"))),
        }
    }

    /// Takes a field; `null` is as good as absent.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value).map(Some).map_err(|error| Failure::field(name, error))
            }
        }
    }

    /// Takes a field into `place`, which keeps its value where the field is absent.
    pub(super) fn set<T: DeserializeOwned>(&mut self, name: &str, place: &mut T) -> Result<(), Failure> {
        if let Some(value) = self.take(name)? {
            *place = value;
        }
        Ok(())
    }

    /// Refuses what would change the answer's meaning and is not done here, unless its value asks for
    /// nothing.
    pub(super) fn refuse_unsupported(&self) -> Result<(), Failure> {
        for (name, harmless) in UNSUPPORTED {
            if self.0.get(name).is_some_and(|value| !value.is_null() && !harmless(value)) {
                return Err(Failure::unsupported(name));
            }
        }
        Ok(())
    }
}

/// Which value of a field asks for nothing.
type Harmless = fn(&Value) -> bool;

const UNSUPPORTED: [(&str, Harmless); 31] = [
    ("tools", is_empty),
    ("functions", is_empty),
    ("tool_choice", |value| value == "none" || value == "auto"),
    ("function_call", |value| value == "none" || value == "auto"),
    ("response_format", |value| value["type"] == "text"),
    ("modalities", |value| value.as_array().is_some_and(|all| all.iter().all(|one| one == "text"))),
    ("audio", is_empty),
    ("web_search_options", never),
    ("suffix", is_empty),
    ("use_beam_search", is_false),
    ("length_penalty", |value| value.as_f64() == Some(1.0)),
    ("prompt_logprobs", is_false),
    ("bad_words", is_empty),
    ("logits_processors", is_empty),
    ("truncate_prompt_tokens", never),
    ("include_stop_str_in_output", is_false),
    ("skip_special_tokens", |value| value == true),
    ("continue_final_message", is_false),
    ("add_generation_prompt", |value| value == true),
    ("chat_template", never),
    ("documents", is_empty),
    ("structured_outputs", never),
    ("guided_json", never),
    ("guided_regex", never),
    ("guided_choice", never),
    ("guided_grammar", never),
    ("grammar", is_empty),
    ("json_schema", is_empty),
    ("regex", is_empty),
    ("mirostat", |value| value.as_f64() == Some(0.0)),
    ("prompt_embeds", never),
];

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    value == false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn values_that_ask_for_nothing_are_not_refused() {
        for body in [
            r#"{"tools": [], "response_format": {"type": "text"}, "modalities": ["text"], "suffix": null}"#,
            r#"{"user": "me", "metadata": {"a": 1}, "tool_choice": "none", "unheard_of": [1]}"#,
        ] {
            assert!(fields(body).refuse_unsupported().is_ok(), "{body}");
        }
        for body in [
            r#"{"tools": [{}]}"#,
            r#"{"response_format": {"type": "json_object"}}"#,
            r#"{"modalities": ["text", "audio"]}"#,
            r#"{"suffix": "end"}"#,
        ] {
            assert!(fields(body).refuse_unsupported().is_err(), "{body}");
        }
    }

    #[test]
    fn a_value_of_another_type_names_its_field() {
        let failure = fields(r#"{"n": -1}"#).take::<usize>("n").unwrap_err();
        assert_eq!(failure.to_value()["error"]["param"], "n");
        assert_eq!(fields(r#"{"n": null}"#).take::<usize>("n").unwrap(), None);
    }
}
