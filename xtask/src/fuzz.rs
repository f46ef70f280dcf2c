//! `cargo xtask fuzz`: hostile files for the loaders, one target after the other.
//!
//! The targets are in `fuzz/`, a package of its own, and run under a nightly compiler with `cargo-fuzz`. Each
//! starts from files of `tests/golden`, and from what was found before (`fuzz/regressions`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// Targets to run; all of them where none is named.
    targets: Vec<String>,
    /// How long each runs.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// A target, with what it starts from.
struct Target {
    name: &'static str,
    /// Longest input, in bytes.
    most_bytes: usize,
    /// Seconds after which an input counts as a finding: with a sanitizer, everything takes several times as long.
    timeout: u64,
    /// Beginnings and ends of the paths in `tests/golden` of the files that it starts from.
    seeds: &'static [(&'static str, &'static str)],
}

const TARGETS: [Target; 9] = [
    Target { name: "chat_template", most_bytes: 4096, timeout: 20, seeds: &[("chat/templates", ".jinja")] },
    Target {
        name: "tokenizer_model",
        most_bytes: 16_384,
        timeout: 5,
        seeds: &[("sentencepiece", "tokenizer.model")],
    },
    Target { name: "gguf", most_bytes: 65_536, timeout: 5, seeds: &[("gguf", ".gguf")] },
    Target {
        name: "tokenizer_json",
        most_bytes: 65_536,
        timeout: 5,
        seeds: &[("models", "tokenizer.json"), ("chat/tokenizer", "tokenizer.json")],
    },
    Target {
        name: "tokenizer_config",
        most_bytes: 4096,
        timeout: 5,
        seeds: &[
            ("models", "tokenizer_config.json"),
            ("models", "generation_config.json"),
            ("chat/templates", ".jinja"),
        ],
    },
    Target {
        name: "safetensors",
        most_bytes: 16_384,
        timeout: 5,
        seeds: &[("lora", "adapter_model.safetensors")],
    },
    Target { name: "safetensors_index", most_bytes: 4096, timeout: 5, seeds: &[] },
    Target {
        name: "adapter_config",
        most_bytes: 4096,
        timeout: 5,
        seeds: &[("lora", "adapter_config.json")],
    },
    Target {
        name: "model_config",
        most_bytes: 8192,
        timeout: 5,
        seeds: &[("models", "config.json"), ("models", "config.v4.json")],
    },
];

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(unknown) =
        options.targets.iter().find(|name| !TARGETS.iter().any(|target| target.name == **name))
    {
        bail!("no target {unknown}; there are {}", TARGETS.map(|target| target.name).join(", "));
    }
    let chosen = |target: &&Target| {
        options.targets.is_empty() || options.targets.iter().any(|name| name == target.name)
    };
    let mut found = Vec::new();
    for target in TARGETS.iter().filter(chosen) {
        println!("==> {}", target.name);
        target.plant()?;
        let before = target.findings();
        let status = target.command(options.seconds).status();
        let status = status
            .context("cannot start cargo; are rustup, a nightly toolchain and cargo-fuzz installed?")?;
        let new: Vec<PathBuf> = target.findings().into_iter().filter(|path| !before.contains(path)).collect();
        if !status.success() && new.is_empty() {
            bail!("{}: {status}, and no input was found: it did not build or start", target.name);
        }
        found.extend(new);
    }
    for path in &found {
        println!("found: {}", path.display());
    }
    if found.is_empty() {
        println!("nothing was found");
        return Ok(());
    }
    bail!(
        "{} inputs were found; each belongs into a test of its crate, and into fuzz/regressions",
        found.len()
    )
}

impl Target {
    fn command(&self, seconds: u64) -> Command {
        let mut command = Command::new("cargo");
        command.args(["+nightly", "fuzz", "run", self.name]).arg(self.corpus()).arg(self.regressions());
        command.arg("--").args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={}", self.most_bytes),
            format!("-timeout={}", self.timeout),
            "-rss_limit_mb=512".into(),
            "-print_final_stats=1".into(),
        ]);
        let dictionary = directory().join("dictionaries").join(self.name).with_extension("dict");
        if dictionary.is_file() {
            command.arg(format!("-dict={}", dictionary.display()));
        }
        command.current_dir(directory());
        command
    }

    fn corpus(&self) -> PathBuf {
        directory().join("corpus").join(self.name)
    }

    fn regressions(&self) -> PathBuf {
        directory().join("regressions").join(self.name)
    }

    /// What has been found so far.
    fn findings(&self) -> Vec<PathBuf> {
        let listed = fs::read_dir(directory().join("artifacts").join(self.name));
        listed.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// Puts the golden files into the corpus.
    fn plant(&self) -> Result<()> {
        let corpus = self.corpus();
        for directory in [&corpus, &self.regressions()] {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        let golden = workspace::root().join("tests/golden");
        for (under, end) in self.seeds {
            for path in files(&golden.join(under))? {
                let bytes = fs::read(&path)?;
                if path.to_string_lossy().ends_with(end) && bytes.len() <= self.most_bytes {
                    let inside = path.strip_prefix(&golden).unwrap_or(&path);
                    fs::write(corpus.join(inside.to_string_lossy().replace('/', "-")), bytes)?;
                }
            }
        }
        Ok(())
    }
}

fn directory() -> PathBuf {
    workspace::root().join("fuzz")
}

/// All files below a directory.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_one_of_the_package_and_has_seeds_that_fit() {
        let manifest = fs::read_to_string(directory().join("Cargo.toml")).unwrap();
        assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
        for target in &TARGETS {
            assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{}", target.name);
            for (under, end) in target.seeds {
                let all = files(&workspace::root().join("tests/golden").join(under)).unwrap();
                let fits = |path: &PathBuf| {
                    path.to_string_lossy().ends_with(end)
                        && fs::metadata(path).unwrap().len() <= target.most_bytes as u64
                };
                assert!(all.iter().any(fits), "{}: no seed for {under} {end}", target.name);
            }
        }
    }
}
