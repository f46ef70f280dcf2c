//! `aligner convert`: a checkpoint in another format or number type.

use std::path::{Path, PathBuf};

use aligner_core::weights::{
    Checkpoint, GgufDtype, GgufValue, SaveDtype, gguf_name, save_checkpoint, save_gguf,
};
use aligner_core::{Error, Result};
use aligner_data::Tokenizer;
use anyhow::ensure;

use crate::Usage;
use crate::progress::{Count, result};
use crate::rundir::write_directory;
use crate::wire::LoadedModel;

/// Write a model in another format or number type: as a Hugging Face directory, or as a GGUF file.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The model: a directory with `config.json`, or a `.gguf` file.
    model: PathBuf,
    /// Where it goes: a directory that is made, or a `.gguf` file.
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// The format.
    #[arg(long, default_value = "safetensors")]
    to: Format,
    /// Number type of the matrices. Of a GGUF file, vectors, routers and learned positions stay f32; `q8_0` is
    /// for GGUF alone.
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    /// Replace the file or the model's directory that is there already.
    #[arg(long)]
    force: bool,
    /// A directory with `tokenizer.json`, where the model has none.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// `config.json`, `model.safetensors` and `tokenizer.json`.
    Safetensors,
    /// One file, as llama.cpp reads it.
    Gguf,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8,
}

impl Dtype {
    fn in_gguf(self) -> GgufDtype {
        match self {
            Self::F32 => GgufDtype::F32,
            Self::F16 => GgufDtype::F16,
            Self::Bf16 => GgufDtype::Bf16,
            Self::Q8 => GgufDtype::Q8_0,
        }
    }

    fn in_safetensors(self) -> Option<SaveDtype> {
        match self {
            Self::F32 => Some(SaveDtype::F32),
            Self::F16 => Some(SaveDtype::F16),
            Self::Bf16 => Some(SaveDtype::Bf16),
            Self::Q8 => None,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { model: path, output, to, dtype, tokenizer, .. } = arguments;
    check_output(arguments)?;
    let model = LoadedModel::open(path, tokenizer.as_deref(), None)?;
    let plain = "--model: it is an adapter; `aligner merge` makes a plain model of it and its base";
    ensure!(model.adapter.is_none(), Usage(plain.into()));
    check_files(&model.checkpoint, output)?;
    let mut count = Count::start("tensors written", 0);
    let mut watch = |done: usize, _: usize| count.done(done);
    let (checkpoint, tokenizer) = (&model.checkpoint, &model.tokenizer);
    match (to, dtype.in_safetensors()) {
        (Format::Gguf, _) => {
            let more = about(path, checkpoint, tokenizer)?;
            save_gguf(output, checkpoint, &more, dtype.in_gguf(), &mut watch)?;
            // What was written is what is read.
            Checkpoint::open(output)?;
        }
        (Format::Safetensors, Some(dtype)) => write_directory(output, |dir| {
            save_checkpoint(dir, checkpoint, dtype, &mut watch)?;
            check_configuration(dir, checkpoint)?;
            tokenizer.save(dir)?;
            copy_generation(path, dir)
        })?,
        (Format::Safetensors, None) => {
            return Err(Usage("--dtype: q8_0 is for `--to gguf` alone".into()).into());
        }
    }
    drop(count);
    let config = checkpoint.config();
    let (family, params) = (config.model_type(), config.num_params());
    result(&format!("model       {}\nfamily      {family}\nparameters  {params}", output.display()));
    Ok(())
}

/// Refuses to write over what is there, and over what is being read.
fn check_output(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { model, output, to, force, .. } = arguments;
    let shown = output.display();
    let is_gguf = output.extension().is_some_and(|end| end == "gguf");
    ensure!(
        *to != Format::Gguf || is_gguf,
        Usage(format!("--output: expected the name of a `.gguf` file, got {shown}"))
    );
    ensure!(
        *to != Format::Safetensors || !is_gguf,
        Usage(format!("--output: expected a directory, got {shown}; `--to gguf` writes a file"))
    );
    if !output.exists() {
        return Ok(());
    }
    ensure!(*force, Usage(format!("--output: {shown} is there already; `--force` replaces it")));
    let same =
        output.canonicalize().ok().zip(model.canonicalize().ok()).is_some_and(|(a, b)| b.starts_with(a));
    ensure!(!same, Usage(format!("--output: {shown} is the model that is read, or has it inside")));
    // A directory is replaced whole, with all that is in it.
    let is_model = output.is_file() || output.join("config.json").is_file();
    ensure!(
        is_model && output.is_dir() == (*to == Format::Safetensors),
        Usage(format!("--output: {shown} is no such model; `--force` replaces nothing else"))
    );
    Ok(())
}

/// Refuses to write over a file of weights that is read, wherever it lies.
fn check_files(checkpoint: &Checkpoint, output: &Path) -> anyhow::Result<()> {
    let Ok(output) = output.canonicalize() else { return Ok(()) };
    let files = checkpoint.files().into_iter().filter_map(|file| file.canonicalize().ok());
    let Some(file) = files.into_iter().find(|file| file.starts_with(&output)) else { return Ok(()) };
    Err(Usage(format!("--output: {} is a part of the model that is read", file.display())).into())
}

/// What a GGUF file says beside the model's sizes.
fn about(path: &Path, checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Vec<(String, GgufValue)>> {
    let name = path.canonicalize().ok().and_then(|path| gguf_name(&path));
    let mut more = tokenizer.gguf_metadata(checkpoint.config().vocab_size)?;
    if let Some(name) = name {
        more.insert(0, ("general.name".into(), GgufValue::Text(name)));
    }
    Ok(more)
}

/// Of a GGUF file that says more than `config.json` can.
fn check_configuration(dir: &Path, checkpoint: &Checkpoint) -> Result<()> {
    let again = Checkpoint::open(dir)?;
    let unlike = checkpoint.config().unlike(again.config());
    if unlike.is_empty() {
        return Ok(());
    }
    let (keys, path) = (unlike.join(", "), checkpoint.path().display());
    Err(Error::Invalid(format!("nothing is written: config.json cannot say what {path} says of {keys}")))
}

/// How text is drawn, and where it ends, as the model's directory has it.
fn copy_generation(model: &Path, dir: &Path) -> Result<()> {
    let name = "generation_config.json";
    let from = model.join(name);
    if !from.is_file() {
        return Ok(());
    }
    let to = dir.join(name);
    std::fs::copy(&from, &to).map(drop).map_err(|cause| Error::Io { path: to, cause })
}
