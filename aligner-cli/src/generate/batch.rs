//! All prompts at once, into a file.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aligner_core::weights::atomic_write;
use aligner_core::{Drawn, Engine, Request};
use aligner_data::Tokenizer;
use serde_json::{Value, json};

use super::answer::{Answer, Answers, News, reason_name};
use super::input::{Asked, Question};
use crate::progress::say;

/// How the answers are written.
pub(super) struct Output<'a> {
    pub(super) path: &'a Path,
    /// Whether each line has its log-probabilities.
    pub(super) logps: bool,
}

/// Progress is told no more often.
const INTERVAL: Duration = Duration::from_secs(10);

/// Answers every request and writes a line for each, in their order. `requests` says which of `asked` each
/// belongs to.
pub(super) fn run(
    engine: &mut dyn Engine,
    tokenizer: &Tokenizer,
    asked: &[Asked],
    requests: Vec<(usize, Request)>,
    output: &Output<'_>,
) -> anyhow::Result<()> {
    let samples: Vec<(usize, u64)> = requests.iter().map(|(of, request)| (*of, request.sample)).collect();
    let mut answers = Answers::new(engine, Arc::new(tokenizer.clone()));
    for (at, (_, request)) in requests.into_iter().enumerate() {
        answers.submit(at, request)?;
    }
    let mut lines: Vec<Option<String>> = vec![None; samples.len()];
    let (started, mut told) = (Instant::now(), Instant::now());
    let (mut done, mut tokens) = (0, 0);
    while !answers.is_done() {
        for news in answers.step()? {
            let News::Done(at, answer) = news else { continue };
            done += 1;
            tokens += answer.drawn.len();
            let (of, sample) = samples[at];
            lines[at] = Some(line(&asked[of], sample, &answer, output.logps).to_string());
        }
        if told.elapsed() >= INTERVAL || answers.is_done() {
            told = Instant::now();
            let rate = tokens as f64 / started.elapsed().as_secs_f64();
            say(&format!("{done}/{} answers, {tokens} tokens, {rate:.0} tokens/s", lines.len()));
        }
    }
    atomic_write(output.path, |out| lines.iter().flatten().try_for_each(|line| writeln!(out, "{line}")))?;
    Ok(())
}

fn line(asked: &Asked, sample: u64, answer: &Answer, logps: bool) -> Value {
    let mut line = json!({ "id": asked.id, "sample": sample });
    match &asked.question {
        Question::Prompt(prompt) => line["prompt"] = prompt.as_str().into(),
        Question::Conversation(turns) => {
            line["messages"] = turns.iter().map(aligner_data::Message::to_value).collect();
        }
    }
    if let Some(adapter) = &asked.adapter {
        line["adapter"] = adapter.as_str().into();
    }
    let of_each = |value: fn(&Drawn) -> Value| answer.drawn.iter().map(value).collect::<Value>();
    line["text"] = answer.text.as_str().into();
    line["tokens"] = of_each(|drawn| drawn.token.into());
    line["finish_reason"] = reason_name(answer.reason).into();
    if logps {
        line["logps"] = of_each(|drawn| drawn.logp.into());
        line["raw_logps"] = of_each(|drawn| drawn.raw_logp.into());
    }
    line
}
