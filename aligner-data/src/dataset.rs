//! A data file as groups of samples, by row.

mod config;
mod encode;
mod fate;

use std::sync::Arc;

use aligner_core::{Error, Group, Result};

pub use self::config::{DatasetConfig, EqualPairs, Overlong};
use self::encode::Encoder;
pub use self::fate::Stats;
use self::fate::{Fate, Fates};
use crate::read::Rows;
use crate::schema::Record;
use crate::shuffle::permutation;
use crate::tasks::{Split, TaskConfig, TaskRow, TaskStream};
use crate::{Format, Kind, Tokenizer};

/// The rows of a data file, or a part of them, each as a [`Group`]. Parts share the open file.
///
/// A row is read, parsed and tokenised when it is asked for; what stays in memory is where each row
/// stands in the file.
#[derive(Debug, Clone)]
pub struct Dataset {
    shared: Arc<Shared>,
    /// The rows of this part, as indices into the file.
    rows: Vec<usize>,
}

#[derive(Debug)]
struct Shared {
    config: DatasetConfig,
    format: Format,
    kind: Kind,
    name: String,
    rows: Rows,
    encoder: Encoder,
    fates: Fates,
}

impl Dataset {
    /// Opens a data file, tells its schema, and checks every row against it.
    ///
    /// Rows are tokenised later, when they are asked for: [`Self::retain_usable`] does it at once.
    ///
    /// # Errors
    /// A file that cannot be read or is empty; settings that cannot work; the first row that is not
    /// UTF-8, not JSON, not of the schema, or a pair of equals, with its line.
    pub fn open(config: &DatasetConfig, tokenizer: &Tokenizer) -> Result<Self> {
        config.check()?;
        let rows = match &config.task {
            Some(task) => made(task, config)?,
            None => Rows::open(&config.path)?,
        };
        let format = match config.format {
            Format::Auto => Format::detect(&rows.get(0)?)
                .map_err(|message| Error::row(rows.path(), rows.number(0), message))?,
            format => format,
        };
        let kind =
            format.kind().ok_or_else(|| Error::setting("format", "could not be told from the first row"))?;
        let name =
            rows.path().file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        // A task's rows are as many as are asked for, and then those held out.
        let limit = config.limit.filter(|_| config.task.is_none());
        let len = limit.unwrap_or(usize::MAX).min(rows.len());
        let encoder = Encoder::new(config, tokenizer.clone());
        let fates = Fates::new(rows.len());
        let shared = Shared { config: config.clone(), format, kind, name, rows, encoder, fates };
        let mut dataset = Self { shared: Arc::new(shared), rows: (0..len).collect() };
        dataset.check_rows()?;
        Ok(dataset)
    }

    fn check_rows(&mut self) -> Result<()> {
        let shared = &self.shared;
        let mut kept = Vec::with_capacity(self.rows.len());
        for &row in &self.rows {
            match shared.record(row)? {
                Record::Preference { chosen, rejected, .. } if chosen.says_the_same(&rejected) => {
                    if shared.config.equal_pairs == EqualPairs::Error {
                        return Err(shared.fault(
                            row,
                            "chosen and rejected are equal: nothing is preferred \
                             (equal_pairs = \"drop\" leaves such rows out)",
                        ));
                    }
                    shared.fates.set(row, Fate::EqualPair);
                    tracing::debug!(row = shared.id(row), "dropped: chosen and rejected are equal");
                }
                _ => kept.push(row),
            }
        }
        self.rows = kept;
        let dropped = self.stats().equal_pairs;
        if dropped > 0 {
            tracing::warn!(
                file = shared.name,
                dropped,
                "pairs whose chosen and rejected are equal are dropped"
            );
        }
        self.refuse_empty("every pair's chosen and rejected are equal")
    }

    /// How many rows this part has, those included that turn out too long.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether this part has no row: only a held-out part of no rows can.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// What the data set trains.
    pub fn kind(&self) -> Kind {
        self.shared.kind
    }

    /// The schema of the file: never [`Format::Auto`].
    pub fn format(&self) -> Format {
        self.shared.format
    }

    /// The settings that it was opened with.
    pub fn config(&self) -> &DatasetConfig {
        &self.shared.config
    }

    /// The stable id of a row, as `pairs.jsonl:17`: file name and line, or row where the file has no lines.
    ///
    /// # Panics
    /// `index` is not below [`Self::len`].
    pub fn id(&self, index: usize) -> String {
        self.shared.id(self.rows[index])
    }

    /// The samples of a row; `None` if it is dropped, which [`Self::stats`] counts.
    ///
    /// # Errors
    /// A row that cannot be read or has no target, and, by setting, one that is too long.
    ///
    /// # Panics
    /// `index` is not below [`Self::len`].
    pub fn group(&self, index: usize) -> Result<Option<Group>> {
        self.shared.group(self.rows[index])
    }

    /// Tokenises every row once and leaves out those that are dropped, so that each row that stays
    /// gives a group. Returns the packed length of each in tokens, `[rows]`.
    ///
    /// # Errors
    /// As [`Self::group`]; and if no row is left.
    pub fn retain_usable(&mut self) -> Result<Vec<usize>> {
        self.retain_usable_watched(&mut |_| {})
    }

    /// As [`Self::retain_usable`]; `watch` is told before each row how many are behind.
    ///
    /// # Errors
    /// As [`Self::retain_usable`].
    pub fn retain_usable_watched(&mut self, watch: &mut dyn FnMut(usize)) -> Result<Vec<usize>> {
        let mut lengths = Vec::with_capacity(self.rows.len());
        let mut kept = Vec::with_capacity(self.rows.len());
        for (done, &row) in self.rows.iter().enumerate() {
            watch(done);
            if let Some(group) = self.shared.group(row)? {
                kept.push(row);
                lengths.push(group.packed_tokens());
            }
        }
        self.rows = kept;
        let max_length = self.shared.config.max_length;
        self.refuse_empty(&format!("every row is longer than max_length = {max_length} tokens"))?;
        Ok(lengths)
    }

    /// Splits off `holdout` rows (from the settings), drawn by a seeded permutation: the rest to
    /// train on, in file order, and the held-out rows. Together they are all rows, and none is in both.
    ///
    /// # Errors
    /// [`Error::Setting`] where no row would be left to train on.
    pub fn split(self) -> Result<(Self, Self)> {
        let holdout = self.shared.config.holdout;
        let len = self.rows.len();
        if holdout >= len {
            let message = format!("{holdout} of {len} rows leave none to train on");
            return Err(Error::setting("holdout", message));
        }
        let config = &self.shared.config;
        let (holdout, order) = match config.task {
            Some(_) => {
                // Those past the limit are of the task's other split.
                let first = config.limit.unwrap_or(TASK_ROWS);
                let apart = self.rows.iter().filter(|&&row| row >= first).count();
                (apart, (0..len).rev().collect())
            }
            None => (holdout, permutation(len, config.holdout_seed)),
        };
        let part = |mut picked: Vec<usize>| {
            picked.sort_unstable();
            Self {
                shared: Arc::clone(&self.shared),
                rows: picked.into_iter().map(|at| self.rows[at]).collect(),
            }
        };
        Ok((part(order[holdout..].to_vec()), part(order[..holdout].to_vec())))
    }

    /// How many rows of the whole file were used, cut and dropped so far. A row counts once.
    pub fn stats(&self) -> Stats {
        self.shared.fates.stats()
    }

    fn refuse_empty(&self, why: &str) -> Result<()> {
        if self.rows.is_empty() {
            return Err(Error::format(self.shared.rows.path(), format!("no row is left: {why}")));
        }
        Ok(())
    }
}

/// Rows of a task without a `limit`.
const TASK_ROWS: usize = 10_000;
/// The share of a task's questions that no training row asks.
const TASK_HELD_OUT: f64 = 0.2;

/// The questions of a task: those to train on, then those held out, of which none is among the others.
fn made(task: &TaskConfig, config: &DatasetConfig) -> Result<Rows> {
    let stream = |split| TaskStream::new(task.clone().build()?, config.task_seed, split, TASK_HELD_OUT);
    let (train, held_out) = (stream(Split::Train)?, stream(Split::HeldOut)?);
    let (rows, apart) = (config.limit.unwrap_or(TASK_ROWS) as u64, config.holdout as u64);
    let all = (0..rows).map(|at| train.row(at)).chain((0..apart).map(|at| held_out.row(at)));
    let texts = all.map(|row| {
        let TaskRow { prompt, mut metadata, .. } = row?;
        if let Some(fields) = metadata.as_object_mut() {
            fields.insert("prompt".into(), prompt.into());
        }
        Ok(metadata.to_string())
    });
    Rows::made(task.name(), texts)
}

impl Shared {
    fn id(&self, row: usize) -> String {
        format!("{}:{}", self.name, self.rows.number(row))
    }

    fn fault(&self, row: usize, message: impl Into<String>) -> Error {
        Error::row(self.rows.path(), self.rows.number(row), message)
    }

    fn record(&self, row: usize) -> Result<Record> {
        let fields = self.rows.get(row)?;
        self.format.parse(&fields).map_err(|message| self.fault(row, message))
    }

    fn group(&self, row: usize) -> Result<Option<Group>> {
        let fields = self.rows.get(row)?;
        let record = self.format.parse(&fields).map_err(|message| self.fault(row, message))?;
        let (samples, fate) = self.encoder.samples(&record).map_err(|error| match error {
            // Where a path is named already, the fault is not the row's.
            Error::Invalid(message) => self.fault(row, message),
            other => other,
        })?;
        let first = self.fates.set(row, fate);
        self.log(row, fate, first);
        let mut metadata = Format::metadata(&fields);
        if let Record::Prompt(dialogue) = &record {
            metadata.insert("prompt".into(), dialogue.question().into());
        }
        let metadata = serde_json::Value::Object(metadata);
        Ok(fate.is_kept().then(|| Group { id: self.id(row), samples, metadata }))
    }

    /// Says at once that rows are cut or dropped at all; each further one is for the debug log.
    fn log(&self, row: usize, fate: Fate, first: bool) {
        let (id, max_length) = (self.id(row), self.config.max_length);
        match (fate, first) {
            (Fate::Truncated, true) => {
                tracing::warn!(row = id, max_length, "rows longer than max_length are cut");
            }
            (Fate::Truncated, false) => tracing::debug!(row = id, max_length, "cut to max_length"),
            (Fate::Overlong, true) => {
                tracing::warn!(row = id, max_length, "rows longer than max_length are dropped");
            }
            (Fate::Overlong, false) => {
                tracing::debug!(row = id, max_length, "dropped: longer than max_length");
            }
            (Fate::EqualPair, true) => {
                tracing::warn!(row = id, max_length, "pairs with equal tokens are dropped");
            }
            (Fate::EqualPair, false) => tracing::debug!(row = id, "dropped: its sides have equal tokens"),
            (Fate::Unseen | Fate::Used, _) => {}
        }
    }
}
