//! `aligner generate`: answers to prompts, streamed as they come.

use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;

use aligner_core::{Engine, Event, Prompt, Request, Sampling};
use aligner_data::{Message, Tokenizer};
use anyhow::{Context as _, ensure};

use crate::Usage;
use crate::wire::{self, LoadedModel};

/// Answer prompts with a model; prompts come as arguments or, one a line, on standard input.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A model's directory, a `.gguf` file, or a run's `model` directory.
    model: PathBuf,
    /// What to answer.
    prompts: Vec<String>,
    /// 0 is greedy; else logits are divided by it.
    #[arg(short, long, default_value_t = 0.0)]
    temperature: f32,
    /// Most tokens of an answer.
    #[arg(short = 'n', long, default_value_t = 256)]
    max_tokens: usize,
    /// Seed of the draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A system turn before each prompt.
    #[arg(long)]
    system: Option<String>,
    /// Continue the text as it is, without the chat template.
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// A directory with `tokenizer.json`, where the model's own has none.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let temperature = arguments.temperature;
    ensure!(
        temperature >= 0.0 && temperature.is_finite(),
        Usage(format!("--temperature: expected 0 or more, got {temperature}"))
    );
    let model = LoadedModel::open(&arguments.model, arguments.tokenizer.as_deref())?;
    let scores = model.checkpoint.config().num_labels.is_some();
    ensure!(
        !scores,
        Usage(format!("{}: the model scores answers and writes none", arguments.model.display()))
    );
    let sampling = Sampling {
        temperature,
        max_tokens: arguments.max_tokens,
        stop_tokens: model.stop_tokens(),
        seed: arguments.seed,
    };
    let mut engine = wire::engine(model.policy(&wire::device("cpu")?)?);
    if arguments.prompts.is_empty() {
        for (at, line) in std::io::stdin().lock().split(b'\n').enumerate() {
            let place = || format!("standard input:{}", at + 1);
            let text = String::from_utf8(line.with_context(place)?)
                .map_err(|_| Usage(format!("{}: not UTF-8 text", place())))?;
            let text = text.strip_suffix('\r').unwrap_or(&text);
            answer(&mut engine, &model.tokenizer, text, arguments, &sampling)?;
        }
        return Ok(());
    }
    for prompt in &arguments.prompts {
        answer(&mut engine, &model.tokenizer, prompt, arguments, &sampling)?;
    }
    Ok(())
}

fn answer(
    engine: &mut dyn Engine,
    tokenizer: &Tokenizer,
    text: &str,
    arguments: &Arguments,
    sampling: &Sampling,
) -> anyhow::Result<()> {
    let tokens = prompt_tokens(tokenizer, text, arguments)?;
    // The tokenizer of this model puts nothing before a text.
    ensure!(!tokens.is_empty(), Usage("the prompt is empty: there is no token to go on from".into()));
    let prompt = Prompt { id: String::new(), tokens, metadata: serde_json::Value::Null };
    let mut stream = Stream::default();
    stream_answer(engine, Request { prompt, sampling: sampling.clone(), sample: 0 }, |token| {
        stream.push(tokenizer, token)
    })?;
    stream.finish(tokenizer)
}

/// Runs one request to its end; `on_token` sees each token as it comes.
fn stream_answer(
    engine: &mut dyn Engine,
    request: Request,
    mut on_token: impl FnMut(u32) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    engine.submit(request)?;
    loop {
        for event in engine.poll()? {
            match event {
                Event::Token { token, .. } => on_token(token)?,
                Event::Finished { .. } => return Ok(()),
            }
        }
    }
}

fn prompt_tokens(tokenizer: &Tokenizer, text: &str, arguments: &Arguments) -> anyhow::Result<Vec<u32>> {
    let template = tokenizer.template().filter(|_| !arguments.raw);
    let Some(template) = template else {
        let mut tokens = tokenizer.encode(text)?;
        if let Some(bos) = tokenizer.bos().filter(|bos| tokenizer.adds_bos() && tokens.first() != Some(bos)) {
            tokens.insert(0, bos);
        }
        return Ok(tokens);
    };
    let mut messages = Vec::new();
    messages.extend(arguments.system.as_deref().map(|system| Message::new("system", system)));
    messages.push(Message::new("user", text));
    Ok(tokenizer.encode(&template.render(&messages, true)?)?)
}

/// Text of a growing answer, written as soon as its characters are whole.
#[derive(Default)]
struct Stream {
    tokens: Vec<u32>,
    written: usize,
}

impl Stream {
    fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> anyhow::Result<()> {
        self.tokens.push(token);
        let text = tokenizer.decode(&self.tokens)?;
        // A character of several tokens ends in a replacement mark until its last token is there.
        self.write(text.trim_end_matches('\u{fffd}'))
    }

    fn write(&mut self, text: &str) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if let Some(new) = text.get(self.written..) {
            out.write_all(new.as_bytes())?;
            out.flush()?;
            self.written = text.len();
        }
        Ok(())
    }

    fn finish(mut self, tokenizer: &Tokenizer) -> anyhow::Result<()> {
        let text = tokenizer.decode(&self.tokens)?;
        self.write(&text)?;
        writeln!(std::io::stdout())?;
        Ok(())
    }
}
