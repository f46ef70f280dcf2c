//! The learner's state on disk: all that the next step depends on beside the parameters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aligner_core::weights::{open_tensors, read_metadata, save_tensors};
use aligner_core::{Error, Result};

use super::Learner;

impl Learner {
    /// Writes the optimizer's moments and counts to `optimizer.safetensors` in `dir`, bitwise.
    ///
    /// All ranks call it together; the main one writes the state of whole parameters for all.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be written.
    pub fn save_state(&self, dir: &Path) -> Result<()> {
        let params = self.policy.params();
        let state = self.optimizer.state(params)?;
        if !self.ranks.all.is_main() {
            return Ok(());
        }
        let updates = serde_json::json!(state.steps).to_string();
        let metadata = BTreeMap::from([
            ("step".to_owned(), self.step.to_string()),
            ("num_tokens".to_owned(), self.tokens.to_string()),
            ("updates".to_owned(), updates),
        ]);
        save_tensors(&file(dir), &state.tensors, &metadata)
    }

    /// Continues from what [`Learner::save_state`] wrote, with the parameters of the same step.
    ///
    /// # Errors
    /// A file that is absent, damaged, or of another model. The learner is then as it was.
    pub fn load_state(&mut self, dir: &Path) -> Result<()> {
        let path = file(dir);
        let metadata = read_metadata(&path)?;
        let text = |key: &str| {
            metadata.get(key).ok_or_else(|| Error::format(&path, format!("the metadata have no `{key}`")))
        };
        let number = |key: &str| {
            let value = text(key)?;
            value
                .parse::<u64>()
                .map_err(|error| Error::format(&path, format!("`{key}` is {value:?}: {error}")))
        };
        let (step, tokens) = (number("step")?, number("num_tokens")?);
        let updates: BTreeMap<String, u64> = serde_json::from_str(text("updates")?)
            .map_err(|error| Error::format(&path, format!("`updates`: {error}")))?;
        self.optimizer.restore(self.policy.params(), open_tensors(&path)?, &updates)?;
        (self.step, self.tokens) = (step, tokens);
        Ok(())
    }
}

fn file(dir: &Path) -> PathBuf {
    dir.join("optimizer.safetensors")
}
