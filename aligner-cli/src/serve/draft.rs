//! A request before and after its prompts are tokens.

use aligner_core::rng::key_of;
use aligner_core::{Prompt, Request};
use aligner_data::{Message, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Settings;
use super::failure::Failure;
use super::fields::Fields;
use super::options::Options;
use crate::generate::prompt;

/// The two kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// A request as it came.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) form: Form,
    pub(super) options: Options,
    /// Whether responses begin with their prompt.
    pub(super) echo: bool,
    /// The adapter that answers.
    pub(super) adapter: Option<String>,
    sources: Vec<Source>,
}

#[derive(Debug)]
enum Source {
    Conversation(Vec<Message>, Map<String, Value>),
    Text(String),
    Tokens(Vec<u32>),
}

/// A prompt in tokens.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) tokens: Vec<u32>,
    /// What stands before the response where it is echoed.
    pub(super) echo: String,
}

/// What `OpenAI`'s completions without a limit have.
const COMPLETION_TOKENS: usize = 16;

impl Draft {
    pub(super) fn take(form: Form, mut fields: Fields, settings: &Settings) -> Result<Self, Failure> {
        let model: Option<String> = fields.take("model")?;
        let adapter = settings.adapter(model.as_deref())?;
        let draft = match form {
            Form::Chat => Self::chat(&mut fields, settings),
            Form::Text => Self::text(&mut fields, settings),
        };
        draft.map(|draft| Self { adapter, ..draft })
    }

    fn chat(fields: &mut Fields, settings: &Settings) -> Result<Self, Failure> {
        let mut options = Options::take(fields, settings, settings.max_tokens_limit)?;
        let top: Option<usize> = fields.take("top_logprobs")?;
        match (fields.take("logprobs")?.unwrap_or(false), top) {
            (true, top) => options.report("top_logprobs", top.unwrap_or(0))?,
            (false, Some(1..)) => {
                return Err(Failure::field("top_logprobs", "only taken where `logprobs` is true"));
            }
            _ => {}
        }
        let turns: Vec<Turn> =
            fields.take("messages")?.ok_or_else(|| Failure::field("messages", "is missing"))?;
        if turns.is_empty() {
            return Err(Failure::field("messages", "expected at least one message"));
        }
        let messages: Result<Vec<Message>, Failure> = turns.into_iter().map(Turn::message).collect();
        let variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
        let sources = vec![Source::Conversation(messages?, variables)];
        Ok(Self { form: Form::Chat, options, echo: false, adapter: None, sources })
    }

    fn text(fields: &mut Fields, settings: &Settings) -> Result<Self, Failure> {
        let mut options = Options::take(fields, settings, COMPLETION_TOKENS)?;
        if let Some(top) = fields.take("logprobs")? {
            options.report("logprobs", top)?;
        }
        let echo = fields.take("echo")?.unwrap_or(false);
        if echo && options.logprobs {
            return Err(Failure::field("echo", "not supported together with `logprobs`"));
        }
        let prompt: Value = fields.take("prompt")?.ok_or_else(|| Failure::field("prompt", "is missing"))?;
        let wrong = |_| {
            Failure::field(
                "prompt",
                "expected a text, a list of texts, a list of token ids, or lists of those",
            )
        };
        let sources = match serde_json::from_value(prompt).map_err(wrong)? {
            Prompts::Text(text) => vec![Source::Text(text)],
            Prompts::Tokens(tokens) => vec![Source::Tokens(tokens)],
            Prompts::Texts(texts) => texts.into_iter().map(Source::Text).collect(),
            Prompts::TokenLists(lists) => lists.into_iter().map(Source::Tokens).collect(),
        };
        Ok(Self { form: Form::Text, options, echo, adapter: None, sources })
    }

    /// How many requests of the engine it makes.
    pub(super) fn requests(&self) -> usize {
        self.sources.len().saturating_mul(self.options.samples)
    }

    /// The prompts in tokens; long ones take their time.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, settings: &Settings) -> Result<Vec<Ready>, Failure> {
        self.sources.iter().map(|source| self.encode_one(source, tokenizer, settings)).collect()
    }

    fn encode_one(
        &self,
        source: &Source,
        tokenizer: &Tokenizer,
        settings: &Settings,
    ) -> Result<Ready, Failure> {
        let name = if self.form == Form::Chat { "messages" } else { "prompt" };
        let refused = |error: anyhow::Error| Failure::field(name, format!("{error:#}"));
        let tokens = match source {
            Source::Conversation(messages, variables) => {
                prompt::conversation(tokenizer, messages, variables).map_err(refused)?
            }
            Source::Text(text) => prompt::text(tokenizer, text).map_err(refused)?,
            Source::Tokens(tokens) => tokens.clone(),
        };
        if tokens.is_empty() {
            return Err(Failure::field(name, "no token to start from"));
        }
        if let Some(unknown) = tokens.iter().find(|&&token| token as usize >= settings.vocab_size) {
            let vocab = settings.vocab_size;
            return Err(Failure::field(
                name,
                format!("token {unknown} is outside of the vocabulary of {vocab}"),
            ));
        }
        if tokens.len() >= settings.context_tokens {
            return Err(Failure::too_long(name, tokens.len(), settings.context_tokens));
        }
        let echo = match source {
            Source::Text(text) if self.echo => text.clone(),
            Source::Tokens(tokens) if self.echo => tokenizer.decode(tokens).unwrap_or_default(),
            _ => String::new(),
        };
        Ok(Ready { tokens, echo })
    }
}

impl Ready {
    /// The requests for `samples` responses. Draws are keyed by the prompt's tokens and the sample's number:
    /// the same request with the same seed gets the same responses, whatever else runs.
    pub(super) fn requests(
        &self,
        options: &Options,
        adapter: Option<&String>,
        context: usize,
    ) -> Vec<Request> {
        // No longer than what the context leaves.
        let mut sampling = options.sampling.clone();
        sampling.max_tokens = sampling.max_tokens.min(context.saturating_sub(self.tokens.len()));
        sampling.min_tokens = sampling.min_tokens.min(sampling.max_tokens);
        let id = format!("{:016x}", key_of(&format!("{:?}", self.tokens)));
        let prompt = Prompt { id, tokens: self.tokens.clone(), metadata: Value::Null };
        let request = Request { adapter: adapter.cloned(), ..Request::new(prompt, sampling) };
        (0..options.samples as u64).map(|sample| Request { sample, ..request.clone() }).collect()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// A message as clients send it.
#[derive(Deserialize)]
struct Turn {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl Turn {
    fn message(self) -> Result<Message, Failure> {
        let content = match self.content {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let text = |part: Part| match (part.kind.as_str(), part.text) {
                    ("text", Some(text)) => Ok(text),
                    (kind, _) => {
                        let what = format!("content parts of type `{kind}` are not supported, only text");
                        Err(Failure::field("messages", what))
                    }
                };
                parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.concat()
            }
        };
        // What newer clients call the system's turn.
        let role = if self.role == "developer" { "system".into() } else { self.role };
        Ok(Message { fields: self.fields, ..Message::new(role, content).context() })
    }
}
