//! From a text or a conversation to the tokens that a model continues.

use aligner_data::{Message, RenderOptions, Tokenizer};
use anyhow::Context as _;
use serde_json::{Map, Value};

/// Tokens of `text` as it is, begun as the tokenizer begins a document.
pub(crate) fn text(tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let mut tokens = tokenizer.encode(text)?;
    if let Some(bos) = tokenizer.bos().filter(|bos| tokenizer.adds_bos() && tokens.first() != Some(bos)) {
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// Tokens of a conversation, up to where the model speaks.
///
/// # Errors
/// A tokenizer without a chat template, or a template that refuses the conversation.
pub(crate) fn conversation(
    tokenizer: &Tokenizer,
    messages: &[Message],
    variables: &Map<String, Value>,
) -> anyhow::Result<Vec<u32>> {
    let template = tokenizer.template().context("the model has no chat template")?;
    let variables = variables.clone();
    let options = RenderOptions { add_generation_prompt: true, variables, ..RenderOptions::default() };
    Ok(tokenizer.encode(&template.render_with(messages, &options)?)?)
}

/// A question as messages, after an optional system turn.
pub(crate) fn question(system: Option<&str>, text: &str) -> Vec<Message> {
    let system = system.map(|system| Message::new("system", system));
    system.into_iter().chain(std::iter::once(Message::new("user", text))).collect()
}
