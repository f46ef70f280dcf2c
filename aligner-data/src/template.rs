//! Chat templates: a conversation as text, and as tokens with a mask of what the model says.

mod bounds;
mod environment;
mod generation;
pub(crate) mod mask;
mod python_json;
mod rewrite;
mod turns;
mod work;

use std::ops::Range;

use aligner_core::{Error, Result};
use minijinja::Environment;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::environment::now_secs;
use self::generation::Markers;
use self::work::{Bounded, allow, too_long};
use crate::{Message, Tokenizer};

/// Which tokens of a conversation are targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Those of every turn whose [`Message::learn`] is set.
    #[default]
    Assistant,
    /// Those of the last turn, if its [`Message::learn`] is set.
    Last,
    /// All of them.
    All,
    /// None: the tokens are a prompt.
    Nothing,
}

/// A conversation in tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The rendered text.
    pub text: String,
    /// Token ids, `[tokens]`. No special token is there that the template did not write.
    pub tokens: Vec<u32>,
    /// True where the token is a target, `[tokens]`.
    pub mask: Vec<bool>,
}

/// What a template sees beside the conversation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenderOptions {
    /// Whether the text ends with the header of the turn that is to be generated.
    pub add_generation_prompt: bool,
    /// Tools that the model may call, as a JSON array of function descriptions.
    pub tools: Option<Value>,
    /// Further variables, as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// A Jinja chat template, with transformers' settings, filters and functions.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    rewritten: String,
    environment: Environment<'static>,
    has_marks: bool,
    variables: Map<String, Value>,
    /// What `strftime_now` takes for now, in seconds since 1970; none is the moment of each rendering.
    now_secs: Option<i64>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// ```
    /// use aligner_data::{ChatTemplate, Message};
    ///
    /// let template = ChatTemplate::new("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")?;
    /// assert_eq!(template.render(&[Message::new("user", "Hi")], false)?, "[user] Hi\n");
    /// # Ok::<(), aligner_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] with the line of a syntax error.
    pub fn new(source: impl Into<String>) -> Result<Self> {
        let source = source.into();
        let (rewritten, has_marks) = generation::rewrite(&source);
        let environment =
            environment::compile(&rewritten, Markers::USUAL, None).map_err(|error| failed(&error))?;
        Ok(Self { source, rewritten, environment, has_marks, variables: Map::new(), now_secs: None })
    }

    /// The same template, for which it is always `now_secs` (seconds since 1970, UTC): it renders the
    /// same on any day.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at(mut self, now_secs: i64) -> Result<Self> {
        self.now_secs = Some(now_secs);
        self.environment = self.compiled(Markers::USUAL)?;
        Ok(self)
    }

    fn compiled(&self, markers: Markers) -> Result<Environment<'static>> {
        environment::compile(&self.rewritten, markers, self.now_secs).map_err(|error| failed(&error))
    }

    /// The same template with `variables` (`bos_token` and so on) in sight.
    #[must_use]
    pub fn with_variables(mut self, variables: Map<String, Value>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template itself marks what the model writes, with `{% generation %}`.
    pub fn has_generation_marks(&self) -> bool {
        self.has_marks
    }

    /// The conversation as text.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the template refuses the conversation or fails, where it writes, or makes on
    /// the way, more than 16 MiB, and where it takes more work than any conversation needs.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_with(messages, &RenderOptions { add_generation_prompt, ..RenderOptions::default() })
    }

    /// [`Self::render`] with tools and further variables.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_with(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        Ok(self.render_marked(messages, options)?.0)
    }

    /// The conversation as tokens, with the mask of `target` taken from the rendering.
    ///
    /// Where the template marks the model's turns, the marks say which text is the model's. Elsewhere
    /// the text is compared to that of the conversation cut before and after each turn.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the template fails, or where it has no marks and writes earlier turns
    /// differently once later ones follow.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], target: Target) -> Result<Encoded> {
        self.encode_with(tokenizer, messages, target, &RenderOptions::default())
    }

    /// [`Self::encode`] with tools and further variables.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_with(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        target: Target,
        options: &RenderOptions,
    ) -> Result<Encoded> {
        let (text, marks) = self.render_marked(messages, options)?;
        let spans = match target {
            Target::Nothing => Vec::new(),
            Target::All => std::iter::once(0..text.len()).collect(),
            Target::Assistant | Target::Last => {
                let learnt = turns::learnt(messages, target == Target::Last);
                self.spans(messages, &learnt, &text, marks, options)?
            }
        };
        let (tokens, offsets) = tokenizer.encode_offsets(&text)?;
        let mask = mask::mask_of(&offsets, &spans);
        Ok(Encoded { text, tokens, mask })
    }

    /// The rendered text without markers, and the spans that they marked, in bytes.
    fn render_marked(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let context = self.context(messages, options);
        let markers = Markers::unused_in(&[&context])
            .ok_or_else(|| Error::Invalid("the conversation uses every private-use character".into()))?;
        let other;
        let environment = if markers == Markers::USUAL {
            &self.environment
        } else {
            other = self.compiled(markers)?;
            &other
        };
        let template = environment.get_template(environment::NAME).map_err(|error| failed(&error))?;
        allow(&context);
        let mut written = Bounded::default();
        if let Err(error) = template.render_captured_to(&context, &mut written) {
            let full =
                || Error::Invalid(format!("chat template: {} writes {}", environment::NAME, too_long()));
            return Err(if written.is_full() { full() } else { failed(&error) });
        }
        let rendered = String::from_utf8(written.into_bytes())
            .map_err(|error| Error::Invalid(format!("chat template: {error}")))?;
        if !self.has_marks {
            return Ok((rendered, Vec::new()));
        }
        markers.cut(&rendered).ok_or_else(|| {
            Error::Invalid("chat template: text between `generation` marks was taken apart".into())
        })
    }

    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let mut context = self.variables.clone();
        context.extend(options.variables.clone());
        context.insert("messages".into(), messages.iter().map(Message::to_value).collect());
        context.insert("tools".into(), options.tools.clone().unwrap_or_default());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        Value::Object(context)
    }
}

fn failed(error: &minijinja::Error) -> Error {
    let mut message = format!("chat template: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    Error::Invalid(message)
}
