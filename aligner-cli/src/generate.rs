//! `aligner generate`: answers to prompts, streamed as they come or all at once into a file.

mod answer;
mod batch;
mod flags;
mod input;
pub(crate) mod prompt;

use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use aligner_core::{Detokenize, Engine, Prompt, Request, Sampling};
use anyhow::{Context as _, ensure};
use serde_json::{Map, Value};

pub(crate) use answer::stream;
pub(crate) use flags::SamplingFlags;
use input::{Asked, Question};

use crate::Usage;
use crate::wire::{BASE, EngineFlags, LoadedModel, ModelFlags};

/// Answer prompts with a model; prompts come as arguments, one a line on standard input, or from a file.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelFlags,
    /// What to answer.
    #[arg(conflicts_with = "input")]
    prompts: Vec<String>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    engine: EngineFlags,
    /// Answers to each prompt.
    #[arg(long = "n", value_name = "N", default_value_t = 1)]
    samples: u64,
    /// A file of JSON lines with `prompt` or `messages`, and optionally `id` and the name of an `adapter`.
    #[arg(long, value_name = "PROMPTS.JSONL")]
    input: Option<PathBuf>,
    /// Answer all prompts at once, into a file of JSON lines.
    #[arg(long, value_name = "ANSWERS.JSONL")]
    output: Option<PathBuf>,
    /// Write each token's log-probability, as drawn and under the model alone.
    #[arg(long, requires = "output")]
    logps: bool,
    /// A system turn before each prompt.
    #[arg(long)]
    system: Option<String>,
    /// Continue the text as it is, without the chat template.
    #[arg(long, conflicts_with = "system")]
    raw: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let model = arguments.model.writer()?;
    let sampling = arguments.sampling.sampling(&model)?;
    if arguments.system.is_some() && model.tokenizer.template().is_none() {
        return Err(Usage("--system: the model has no chat template".into()).into());
    }
    let from_lines = arguments.prompts.is_empty() && arguments.input.is_none();
    // A mistake in the file is found before the weights are read.
    let asked = match &arguments.input {
        Some(path) => input::read(path)?,
        None if from_lines && arguments.output.is_some() => lines().collect::<anyhow::Result<_>>()?,
        None => arguments.prompts.iter().enumerate().map(numbered).collect(),
    };
    let mut requests = Vec::new();
    for (at, asked) in asked.iter().enumerate() {
        requests.extend(requests_of(asked, &model, &sampling, arguments)?.map(|request| (at, request)));
    }
    let mut engine = arguments.engine.engine(&model)?;
    if let Some(path) = &arguments.output {
        let output = batch::Output { path, logps: arguments.logps };
        return batch::run(&mut engine, &model.tokenizer, &asked, requests, &output);
    }
    let detokenize: Arc<dyn Detokenize> = Arc::new(model.tokenizer.clone());
    for (_, request) in requests {
        answer_aloud(&mut engine, &detokenize, request)?;
    }
    if from_lines {
        for asked in lines() {
            for request in requests_of(&asked?, &model, &sampling, arguments)? {
                answer_aloud(&mut engine, &detokenize, request)?;
            }
        }
    }
    Ok(())
}

/// Prompts from standard input, as they come.
fn lines() -> impl Iterator<Item = anyhow::Result<Asked>> {
    std::io::stdin().lock().split(b'\n').enumerate().map(|(at, line)| {
        let place = || format!("standard input:{}", at + 1);
        let text = String::from_utf8(line.with_context(place)?)
            .map_err(|_| Usage(format!("{}: not UTF-8 text", place())))?;
        Ok(numbered((at, &text.strip_suffix('\r').unwrap_or(&text).to_string())))
    })
}

fn numbered((at, prompt): (usize, &String)) -> Asked {
    Asked { id: (at + 1).into(), question: Question::Prompt(prompt.clone()), adapter: None }
}

/// A request for each sample of a prompt.
fn requests_of(
    asked: &Asked,
    model: &LoadedModel,
    sampling: &Sampling,
    arguments: &Arguments,
) -> anyhow::Result<impl Iterator<Item = Request> + use<>> {
    let (tokenizer, none) = (&model.tokenizer, Map::new());
    let system = arguments.system.as_deref();
    let is_raw = arguments.raw || tokenizer.template().is_none();
    let tokens = match &asked.question {
        Question::Prompt(text) if is_raw => prompt::text(tokenizer, text),
        Question::Prompt(text) => prompt::conversation(tokenizer, &prompt::question(system, text), &none),
        Question::Conversation(_) if arguments.raw => {
            Err(Usage("--raw: a conversation needs the chat template".into()).into())
        }
        Question::Conversation(messages) => prompt::conversation(tokenizer, messages, &none),
    };
    let name = asked.id.as_str().map_or_else(|| asked.id.to_string(), str::to_string);
    let tokens = tokens.with_context(|| format!("prompt {name}"))?;
    // The tokenizer of this model puts nothing before a text.
    ensure!(!tokens.is_empty(), Usage("the prompt is empty: there is no token to go on from".into()));
    let adapter = adapter_of(asked, model).with_context(|| format!("prompt {name}"))?;
    let prompt = Prompt { id: name, tokens, metadata: Value::Null };
    let request = Request { adapter, ..Request::new(prompt, sampling.clone()) };
    Ok((0..arguments.samples).map(move |sample| Request { sample, ..request.clone() }))
}

/// The adapter that answers: the one that the line names, or else the first.
fn adapter_of(asked: &Asked, model: &LoadedModel) -> anyhow::Result<Option<String>> {
    let mut names = model.named.iter().map(|(name, _)| name);
    match &asked.adapter {
        None => Ok(names.next().cloned()),
        Some(name) if name == BASE => Ok(None),
        Some(name) => {
            let advice = format!("expected the name of one that --adapter gives, or `{BASE}`");
            ensure!(names.any(|known| known == name), Usage(format!("adapter `{name}`: {advice}")));
            Ok(Some(name.clone()))
        }
    }
}

fn answer_aloud(
    engine: &mut dyn Engine,
    detokenize: &Arc<dyn Detokenize>,
    request: Request,
) -> anyhow::Result<()> {
    stream(engine, Arc::clone(detokenize), request, || false, write_out)?;
    write_out("\n")
}

/// Writes a part of a result, which is to be seen at once.
pub(crate) fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}
