//! The rows of a run: those to train on and those held out.

use aligner_core::{Error, Group, Prompt};
use aligner_data::{Dataset, DatasetConfig, Kind, Stats};

use super::LoadedModel;
use crate::Run;
use crate::progress::Count;

/// The opened data of a run.
pub(crate) struct Data {
    /// The rows to train on.
    pub(crate) train: Dataset,
    /// The held-out rows; may be empty.
    pub(crate) held_out: Dataset,
    /// Tokens of the longest row of either, packed.
    pub(crate) longest: usize,
    /// Whether the held-out rows come from a file of their own.
    eval_file: bool,
}

impl Data {
    /// Opens the files and checks every row against its schema.
    pub(crate) fn open(run: &Run, model: &LoadedModel) -> anyhow::Result<Self> {
        let data = &run.config.data;
        let (train, mut longest) = open(run, "data.train", &data.train, model)?;
        let (train, mut held_out) = train.split().map_err(|error| run.blame(within("data.train", error)))?;
        if let Some(eval) = &data.eval {
            let (rows, longest_there) = open(run, "data.eval", eval, model)?;
            (held_out, longest) = (rows, longest.max(longest_there));
        }
        Ok(Self { train, held_out, longest, eval_file: data.eval.is_some() })
    }

    /// What this call has made of the rows so far, a line for each file. A row counts once, however
    /// often it is read.
    pub(crate) fn account(&self) -> String {
        let train = [&self.train];
        // Rows held out of the training file are in its count.
        let held_out = self.eval_file.then_some(&self.held_out);
        let lines: Vec<String> = train.into_iter().chain(held_out).map(account).collect();
        lines.join("\n")
    }

    /// How many rows are trained on.
    pub(crate) fn train_rows(&self) -> usize {
        self.train.len()
    }

    /// A training row; none where it is left out for its length.
    pub(crate) fn train_group(&self, row: usize) -> anyhow::Result<Option<Group>> {
        Ok(self.train.group(row)?)
    }

    /// All held-out groups.
    pub(crate) fn held_out_groups(&self) -> anyhow::Result<Vec<Group>> {
        let groups = (0..self.held_out.len()).map(|row| self.held_out.group(row));
        Ok(groups.filter_map(Result::transpose).collect::<Result<_, _>>()?)
    }

    /// Prompts to answer before and after training: held-out ones if there are any.
    pub(crate) fn prompts(&self, count: usize) -> anyhow::Result<Vec<Prompt>> {
        let rows = if self.held_out.is_empty() { &self.train } else { &self.held_out };
        let mut prompts = Vec::new();
        for row in 0..rows.len() {
            if prompts.len() == count {
                break;
            }
            let Some(group) = rows.group(row)? else { continue };
            let Some(sample) = group.samples.first() else { continue };
            let tokens = sample.tokens[..sample.prompt_len()].to_vec();
            prompts.push(Prompt { id: group.id, tokens, metadata: group.metadata });
        }
        Ok(prompts)
    }
}

fn account(rows: &Dataset) -> String {
    let Stats { rows: all, used, truncated, overlong, equal_pairs } = rows.stats();
    format!(
        "{}: {all} rows, {used} used ({truncated} truncated), {overlong} dropped as overlong, {equal_pairs} as equal pairs",
        rows.config().name()
    )
}

fn open(
    run: &Run,
    section: &str,
    config: &DatasetConfig,
    model: &LoadedModel,
) -> anyhow::Result<(Dataset, usize)> {
    // The model refuses longer rows in the middle of a run; `overlong` decides about them here.
    let context = model.checkpoint.config().max_positions;
    let max_length = config.max_length.min(context);
    if max_length < config.max_length {
        tracing::info!(
            "{section}.max_length = {} is cut to the model's context of {context} tokens",
            config.max_length
        );
    }
    let config = &DatasetConfig { max_length, ..config.clone() };
    let rows = Dataset::open(config, &model.tokenizer).map_err(|error| run.blame(within(section, error)))?;
    match run.kind {
        Some(wanted) if wanted != rows.kind() => {
            let message = format!(
                "`{}` trains on {}, but {} holds {}{}",
                run.name,
                described(wanted),
                config.name(),
                described(rows.kind()),
                if wanted == Kind::Prompt { " (format = \"prompt\" takes what they ask)" } else { "" },
            );
            Err(run.blame(Error::setting(format!("{section}.path"), message)))
        }
        _ => usable(rows),
    }
}

/// Tokenises every row once: what cannot be used is left out or refused before a step is made, and
/// epochs and held-out rows count what is there. With the packed length of the longest, in tokens.
fn usable(mut rows: Dataset) -> anyhow::Result<(Dataset, usize)> {
    let mut progress = Count::start("rows read", rows.len());
    let lengths = rows.retain_usable_watched(&mut |done| progress.done(done))?;
    drop(progress);
    Ok((rows, lengths.into_iter().max().unwrap_or(0)))
}

fn described(kind: Kind) -> &'static str {
    match kind {
        Kind::Sft => "conversations or texts",
        Kind::Preference => "preference pairs",
        Kind::Kto => "labelled answers",
        Kind::Prompt => "prompts",
    }
}

/// A section's own finding with its full key.
fn within(section: &str, error: Error) -> Error {
    match error {
        Error::Setting { key, message } => Error::setting(format!("{section}.{key}"), message),
        other => other,
    }
}
