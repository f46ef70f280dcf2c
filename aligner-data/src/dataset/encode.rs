//! From a row's meaning to samples of tokens.

use aligner_core::{Error, Result, Sample};
use serde_json::Value;

use super::config::{DatasetConfig, EqualPairs, Overlong};
use super::fate::Fate;
use crate::schema::{Dialogue, Record};
use crate::template::RenderOptions;
use crate::template::mask::mask_of;
use crate::{ChatTemplate, Encoded, Message, Target, Tokenizer};

/// Turns records into samples, by the data set's settings.
#[derive(Debug)]
pub(super) struct Encoder {
    tokenizer: Tokenizer,
    max_length: usize,
    overlong: Overlong,
    equal_pairs: EqualPairs,
    train_on: Target,
    system: Option<String>,
    raw_text: bool,
}

impl Encoder {
    pub(super) fn new(config: &DatasetConfig, tokenizer: Tokenizer) -> Self {
        Self {
            tokenizer,
            max_length: config.max_length,
            overlong: config.overlong,
            equal_pairs: config.equal_pairs,
            train_on: config.train_on,
            system: config.system.clone(),
            raw_text: config.raw_text,
        }
    }

    /// The record's samples, and whether they were cut or are to be dropped.
    pub(super) fn samples(&self, record: &Record) -> Result<(Vec<Sample>, Fate)> {
        match record {
            Record::Sft(dialogue) => self.fitted([self.sample(dialogue, self.train_on, None)?]),
            Record::Preference { chosen, rejected, margin } => {
                let pair = self.fitted([
                    self.sample(chosen, Target::Assistant, *margin)?,
                    self.sample(rejected, Target::Assistant, margin.map(|_| 0.0))?,
                ])?;
                self.different(pair)
            }
            Record::Kto { dialogue, desirable } => {
                let reward = f32::from(u8::from(*desirable));
                self.fitted([self.sample(dialogue, Target::Assistant, Some(reward))?])
            }
            Record::Prompt(dialogue) => self.prompt(dialogue),
        }
    }

    /// A prompt up to where its answer begins. It is never cut: the end is what asks.
    fn prompt(&self, dialogue: &Dialogue) -> Result<(Vec<Sample>, Fate)> {
        let template = self.tokenizer.template().filter(|_| !self.raw_text);
        let tokens = match (dialogue, template) {
            (Dialogue::Chat { messages, tools }, Some(template)) => {
                self.asked(template, messages.clone(), tools.clone())?
            }
            (Dialogue::Chat { .. }, None) => return Err(without_template()),
            (other, Some(template)) => {
                self.asked(template, vec![Message::new("user", other.question())], None)?
            }
            (other, None) => self.begun(self.tokenizer.encode(other.question())?),
        };
        let len = tokens.len();
        if len > self.max_length && self.overlong == Overlong::Error {
            return Err(Error::Invalid(format!(
                "a prompt of {len} tokens is longer than max_length = {} (overlong = \"drop\" leaves such rows out)",
                self.max_length
            )));
        }
        if len > self.max_length {
            return Ok((Vec::new(), Fate::Overlong));
        }
        Ok((vec![Sample::new(tokens, vec![false; len])], Fate::Used))
    }

    /// A conversation as tokens, up to where the model's turn begins.
    fn asked(
        &self,
        template: &ChatTemplate,
        messages: Vec<Message>,
        tools: Option<Value>,
    ) -> Result<Vec<u32>> {
        let options = RenderOptions { add_generation_prompt: true, tools, ..RenderOptions::default() };
        let messages = self.with_system(messages);
        Ok(template.encode_with(&self.tokenizer, &messages, Target::Nothing, &options)?.tokens)
    }

    fn with_system(&self, mut messages: Vec<Message>) -> Vec<Message> {
        let begins_with_system = messages.first().is_some_and(|first| first.role == "system");
        if let Some(system) = self.system.as_ref().filter(|_| !begins_with_system) {
            messages.insert(0, Message::new("system", system.clone()));
        }
        messages
    }

    /// Tokens of a document behind the tokenizer's own beginning of one.
    fn begun(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        let bos = self.tokenizer.bos().filter(|_| self.tokenizer.adds_bos());
        if let Some(bos) = bos.filter(|bos| tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
        tokens
    }

    fn sample(&self, dialogue: &Dialogue, target: Target, reward: Option<f32>) -> Result<Sample> {
        let encoded = self.encode(dialogue, target)?;
        let text = dialogue.response().to_owned();
        let sample = Sample { text, reward, ..Sample::new(encoded.tokens, encoded.mask) };
        if sample.targets() == 0 {
            let tokens = sample.tokens.len();
            return Err(Error::Invalid(format!(
                "no target: none of the {tokens} tokens is the model's to learn"
            )));
        }
        Ok(sample)
    }

    /// Applies the limit on length to a row's samples together: a pair is kept or dropped whole.
    fn fitted<const N: usize>(&self, mut samples: [Sample; N]) -> Result<(Vec<Sample>, Fate)> {
        let longest = samples.iter().map(|sample| sample.tokens.len()).max().unwrap_or(0);
        if longest <= self.max_length {
            return Ok((samples.into(), Fate::Used));
        }
        match self.overlong {
            Overlong::Drop => Ok((Vec::new(), Fate::Overlong)),
            Overlong::Error => Err(Error::Invalid(format!(
                "{longest} tokens are more than max_length = {} (overlong = \"truncate\" or \"drop\" lets such rows pass)",
                self.max_length
            ))),
            Overlong::Truncate => {
                for sample in &mut samples {
                    sample.tokens.truncate(self.max_length);
                    sample.mask.truncate(self.max_length);
                }
                let learns = samples.iter().all(|sample| sample.targets() > 0);
                Ok(if learns { (samples.into(), Fate::Truncated) } else { (Vec::new(), Fate::Overlong) })
            }
        }
    }

    /// Takes out a pair whose sides have become equal: cut to the same beginning, or told apart by
    /// nothing that the template shows.
    fn different(&self, (samples, fate): (Vec<Sample>, Fate)) -> Result<(Vec<Sample>, Fate)> {
        match samples.as_slice() {
            [chosen, rejected] if chosen.tokens == rejected.tokens && chosen.mask == rejected.mask => {}
            _ => return Ok((samples, fate)),
        }
        match self.equal_pairs {
            EqualPairs::Drop => Ok((Vec::new(), Fate::EqualPair)),
            EqualPairs::Error => Err(Error::Invalid(format!(
                "chosen and rejected have equal tokens within max_length = {}: nothing is preferred \
                 (equal_pairs = \"drop\" leaves such rows out)",
                self.max_length
            ))),
        }
    }

    fn encode(&self, dialogue: &Dialogue, target: Target) -> Result<Encoded> {
        let template = self.tokenizer.template().filter(|_| !self.raw_text);
        match (dialogue, template) {
            (Dialogue::Plain { text, prompt_len }, _) => self.raw(text, *prompt_len, target),
            (Dialogue::Pair { prompt, completion }, None) => {
                self.raw(&format!("{prompt}{completion}"), prompt.len(), target)
            }
            (Dialogue::Pair { prompt, completion }, Some(template)) => {
                let turns =
                    vec![Message::new("user", prompt.clone()), Message::new("assistant", completion.clone())];
                self.chat(template, turns, None, target)
            }
            (Dialogue::Chat { messages, tools }, Some(template)) => {
                self.chat(template, messages.clone(), tools.clone(), target)
            }
            (Dialogue::Chat { .. }, None) => Err(without_template()),
        }
    }

    fn chat(
        &self,
        template: &ChatTemplate,
        messages: Vec<Message>,
        tools: Option<Value>,
        target: Target,
    ) -> Result<Encoded> {
        let mut messages = self.with_system(messages);
        for message in &mut messages {
            write_out_unread_fields(template.source(), message);
        }
        let options = RenderOptions { tools, ..RenderOptions::default() };
        template.encode_with(&self.tokenizer, &messages, target, &options)
    }

    /// Text as it is, between the tokenizer's own beginning of a document and its end.
    fn raw(&self, text: &str, prompt_len: usize, target: Target) -> Result<Encoded> {
        let learnt = if target == Target::All { 0 } else { prompt_len };
        let (mut tokens, offsets) = self.tokenizer.encode_offsets(text)?;
        let mut mask = mask_of(&offsets, std::slice::from_ref(&(learnt..text.len())));
        let bos = self.tokenizer.bos().filter(|_| self.tokenizer.adds_bos());
        if let Some(bos) = bos.filter(|bos| tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
            mask.insert(0, false);
        }
        if let Some(eos) = self.tokenizer.eos().filter(|eos| tokens.last() != Some(eos)) {
            tokens.push(eos);
            mask.push(true);
        }
        Ok(Encoded { text: text.to_owned(), tokens, mask })
    }
}

fn without_template() -> Error {
    Error::Invalid(
        "a conversation needs a chat template: the tokenizer has none, or raw_text = true is set".into(),
    )
}

impl Dialogue {
    /// The response as text: the last turn, the completion, or what follows the prompt.
    fn response(&self) -> &str {
        match self {
            Self::Chat { messages, .. } => messages.last().map_or("", |message| &message.content),
            Self::Pair { completion, .. } => completion,
            Self::Plain { text, prompt_len } => &text[*prompt_len..],
        }
    }
}

/// Puts reasoning and tool calls into the content where the template would leave them out, so that
/// the model does not learn to say nothing.
fn write_out_unread_fields(template: &str, message: &mut Message) {
    if !template.contains("tool_calls")
        && let Some(Value::Array(calls)) = message.fields.shift_remove("tool_calls")
    {
        let calls = calls.iter().map(|call| call.get("function").unwrap_or(call));
        let lines: Vec<String> = calls.map(Value::to_string).collect();
        let gap = if message.content.is_empty() { "" } else { "\n" };
        message.content = format!("{}{gap}{}", message.content, lines.join("\n"));
    }
    if !template.contains("reasoning_content")
        && let Some(Value::String(reasoning)) = message.fields.shift_remove("reasoning_content")
    {
        message.content = format!("<think>\n{reasoning}\n</think>\n\n{}", message.content);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_a_template_does_not_read_become_text() {
        let mut message = Message::new("assistant", "");
        message.fields.insert("tool_calls".into(), json!([{"type": "function", "function": {"name": "f"}}]));
        message.fields.insert("reasoning_content".into(), "hm".into());
        let mut kept = message.clone();
        write_out_unread_fields("{{ m.content }}", &mut message);
        assert_eq!(message.content, "<think>\nhm\n</think>\n\n{\"name\":\"f\"}");
        write_out_unread_fields("{{ m.tool_calls }}{{ m.reasoning_content }}", &mut kept);
        assert_eq!((kept.content.as_str(), kept.fields.len()), ("", 2));
    }
}
