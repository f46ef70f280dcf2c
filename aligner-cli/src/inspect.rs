//! `aligner inspect`: a run's model in numbers, and one group of its data as the model will see it.

use std::fmt::Write as _;
use std::path::PathBuf;

use aligner_core::{Batch, Group, Sample};
use aligner_data::Tokenizer;
use anyhow::{Context as _, ensure};

use crate::arguments::RunFile;
use crate::plan::memory::parameters;
use crate::progress::{colour, result};
use crate::wire::{self, LoadedModel};
use crate::{Registry, Usage};

/// Show a run's model in numbers, and one group of its data: tokens, targets, positions, and how it is packed.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: RunFile,
    /// Which row of the training data, from 0.
    #[arg(long, default_value_t = 0)]
    row: usize,
    /// Show a low-rank adapter of the run's model instead.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// List every token with its row, position, id and segment.
    #[arg(long)]
    tokens: bool,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<()> {
    let run = arguments.file.load(registry)?;
    let model = LoadedModel::of_run(&run)?;
    if let Some(path) = &arguments.adapter {
        result(&wire::describe_adapter(path, &model)?);
        return Ok(());
    }
    let data = wire::Data::open(&run, &model)?;
    let rows = data.train_rows();
    ensure!(arguments.row < rows, Usage(format!("--row: the training data has {rows} rows, from 0")));
    let group = data.train_group(arguments.row)?;
    let group =
        group.with_context(|| format!("row {}: left out, see `overlong` in [data.train]", arguments.row))?;
    let view = View { tokenizer: &model.tokenizer, colour: colour() };
    let config = model.checkpoint.config();
    let (family, parameters) = (config.model_type(), parameters(config));
    result(&format!("family      {family}\n{parameters}\n{}", view.group(&group, arguments.tokens)?));
    Ok(())
}

/// How tokens are shown.
struct View<'a> {
    tokenizer: &'a Tokenizer,
    colour: bool,
}

const DIM: &str = "\x1b[2m";
const TARGET: &str = "\x1b[30;42m";
const RESET: &str = "\x1b[0m";

impl View<'_> {
    fn group(&self, group: &Group, every_token: bool) -> anyhow::Result<String> {
        let batch = Batch::collate([group])?;
        let mut out = format!(
            "row {}: {} samples, {} tokens packed, of which {} are a common prompt stored once\n",
            group.id,
            group.samples.len(),
            batch.tokens.len(),
            group.shared_prefix()
        );
        for (at, sample) in group.samples.iter().enumerate() {
            let role = match (group.samples.len(), at) {
                (2, 0) => " (chosen)",
                (2, 1) => " (rejected)",
                _ => "",
            };
            let _ = writeln!(
                out,
                "\nsample {at}{role}: {} tokens, {} targets",
                sample.tokens.len(),
                sample.targets()
            );
            let _ = writeln!(out, "{}", self.sample(sample));
        }
        let _ = writeln!(out, "\n{}", segments(&batch));
        if every_token {
            let _ = writeln!(out, "{}", self.table(&batch));
        }
        if !self.colour {
            out.push_str("\ntargets stand between ⟦ and ⟧");
        }
        Ok(out)
    }

    /// The sample's text with its targets marked.
    fn sample(&self, sample: &Sample) -> String {
        let mut out = String::new();
        let mut inside = None;
        for (at, &token) in sample.tokens.iter().enumerate() {
            let target = at > 0 && sample.mask.get(at).copied().unwrap_or(false);
            if inside != Some(target) {
                out.push_str(self.turn(inside, target));
                inside = Some(target);
            }
            out.push_str(&self.token(token));
        }
        out.push_str(if self.colour {
            RESET
        } else if inside == Some(true) {
            "⟧"
        } else {
            ""
        });
        out
    }

    fn turn(&self, inside: Option<bool>, target: bool) -> &'static str {
        match (self.colour, inside, target) {
            (true, _, true) => "\x1b[0m\x1b[30;42m",
            (true, _, false) => "\x1b[0m\x1b[2m",
            (false, _, true) => "⟦",
            (false, Some(true), false) => "⟧",
            (false, _, false) => "",
        }
    }

    /// A token's own text, line ends made visible.
    fn token(&self, token: u32) -> String {
        let text = self.tokenizer.decode_with_specials(&[token]).ok().filter(|text| !text.is_empty());
        let text = text.or_else(|| self.tokenizer.id_token(token)).unwrap_or_else(|| format!("<{token}?>"));
        text.replace('\n', "⏎\n")
    }

    fn table(&self, batch: &Batch) -> String {
        let mut out = String::from("    row  position       id  segment  predicts  token\n");
        let owner = |row: usize| batch.segments.iter().position(|segment| segment.rows().contains(&row));
        for (row, &token) in batch.tokens.iter().enumerate() {
            let predicts: Vec<String> = (batch.rows.iter().zip(&batch.targets))
                .filter(|(from, _)| **from as usize == row)
                .map(|(_, target)| target.to_string())
                .collect();
            let segment = owner(row).map_or("-".to_string(), |at| at.to_string());
            let (open, close) = match (self.colour, predicts.is_empty()) {
                (true, true) => (DIM, RESET),
                (true, false) => (TARGET, RESET),
                _ => ("", ""),
            };
            let _ = writeln!(
                out,
                "{row:>7} {:>9} {token:>8} {segment:>8} {:>9}  {open}{}{close}",
                batch.positions[row],
                predicts.join("+"),
                self.token(token).replace('\n', ""),
            );
        }
        out
    }
}

fn segments(batch: &Batch) -> String {
    let mut out = String::from("segment      rows  tokens  first position  continues\n");
    for (at, segment) in batch.segments.iter().enumerate() {
        let rows = format!("{}..{}", segment.start, segment.start + segment.len);
        let parent = segment.parent.map_or("-".to_string(), |parent| parent.to_string());
        let _ = writeln!(out, "{at:>7} {rows:>9} {:>7} {:>15} {parent:>10}", segment.len, segment.position);
    }
    out
}
