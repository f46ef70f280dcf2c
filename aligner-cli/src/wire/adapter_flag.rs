//! `--adapter`: one adapter that answers everything, or several by name.

use std::path::{Path, PathBuf};

use aligner_core::weights::AdapterCheckpoint;
use anyhow::ensure;

use crate::Usage;

/// The name of the model without any of its named adapters.
pub(crate) const BASE: &str = "base";

/// What the flag was given.
#[derive(Debug, Default)]
pub(crate) struct GivenAdapters {
    /// One without a name.
    pub(crate) alone: Option<PathBuf>,
    /// In the order of the flags.
    pub(crate) named: Vec<(String, PathBuf)>,
}

impl GivenAdapters {
    /// Reads `DIR` or any number of `NAME=DIR`.
    ///
    /// # Errors
    /// [`Usage`] for several without a name, a name that is there twice, and both kinds together.
    pub(crate) fn read(flags: &[String]) -> anyhow::Result<Self> {
        let mut given = Self::default();
        for flag in flags {
            match flag.split_once('=') {
                // A directory may have the sign in its name.
                Some((name, path)) if !Path::new(flag).exists() => {
                    ensure!(
                        !name.is_empty() && name != BASE,
                        Usage(format!(
                            "--adapter {flag}: expected a name other than `{BASE}` before the sign"
                        ))
                    );
                    let is_new = given.named.iter().all(|(known, _)| known != name);
                    ensure!(is_new, Usage(format!("--adapter: the name `{name}` is there twice")));
                    given.named.push((name.into(), path.into()));
                }
                _ => {
                    let advice = "several adapters need names, as in --adapter polite=runs/polite/model";
                    ensure!(given.alone.is_none(), Usage(format!("--adapter: {advice}")));
                    given.alone = Some(flag.into());
                }
            }
        }
        let one_kind = given.alone.is_none() || given.named.is_empty();
        ensure!(one_kind, Usage("--adapter: expected a directory, or NAME=DIR for all, not both".into()));
        Ok(given)
    }

    /// Opens the named ones.
    ///
    /// # Errors
    /// What is no adapter.
    pub(crate) fn open(&self) -> anyhow::Result<Vec<(String, AdapterCheckpoint)>> {
        let open = |(name, path): &(String, PathBuf)| Ok((name.clone(), super::adapter::opened(path)?));
        self.named.iter().map(open).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_one_without_or_several_with_a_name() {
        let read =
            |flags: &[&str]| GivenAdapters::read(&flags.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(read(&["runs/a"]).unwrap().alone, Some("runs/a".into()));
        let given = read(&["a=x", "b=y=z"]).unwrap();
        assert_eq!(given.named, [("a".to_string(), "x".into()), ("b".to_string(), "y=z".into())]);
        for (flags, part) in [
            (&["x", "y"][..], "need names"),
            (&["a=x", "y"], "not both"),
            (&["a=x", "a=y"], "twice"),
            (&["=x"], "before the sign"),
            (&["base=x"], "other than `base`"),
        ] {
            assert!(read(flags).unwrap_err().to_string().contains(part), "{flags:?}");
        }
    }
}
