//! A model in several files, as llama.cpp's `gguf-split` makes them: each says which one it is of how many. The first has the
//! metadata, and each has tensors of its own.

use std::path::Path;

use super::{Gguf, InFile};
use crate::{Error, Result};

/// A file's place among those of its model, from 0.
const NUMBER: &str = "split.no";
/// How many files there are.
const COUNT: &str = "split.count";
/// How many tensors they have together.
const TENSORS: &str = "split.tensors.count";
/// Names have room for five digits.
const MOST_FILES: usize = 99_999;

/// The model that begins with this file: itself, or with the tensors of the others beside it.
///
/// # Errors
/// A file that is not the first, or whose name does not say where the others are; another that is missing or belongs to another
/// model; a tensor in two files; another number of tensors than the first file says.
pub(super) fn joined(mut first: Gguf) -> Result<Gguf> {
    // Files that were one by one merged again say 0.
    let Some(count) = first.size(COUNT)?.filter(|&count| count > 0) else { return Ok(first) };
    let stem = stem_of_first(&first, count)?;
    for number in 1..count {
        let path = first.path.with_file_name(format!("{stem}{}", end(number, count)));
        if !path.exists() {
            let message =
                format!("key {COUNT}: the model is in {count} files, but {} is missing", path.display());
            return Err(Error::format(&first.path, message));
        }
        let part = Gguf::open_alone(&path)?;
        check_place(&part, number, count)?;
        first.append(part)?;
    }
    let (held, stated) = (first.tensors.len(), required(&first, TENSORS)?);
    if held != stated {
        let message = format!("key {TENSORS}: expected {stated} tensors in {count} files, got {held}");
        return Err(Error::format(&first.path, message));
    }
    Ok(first)
}

/// What the files' names begin with.
fn stem_of_first(file: &Gguf, count: usize) -> Result<String> {
    let wrong = |message: String| Error::format(&file.path, message);
    if count > MOST_FILES {
        return Err(wrong(format!("key {COUNT}: expected at most {MOST_FILES} files, got {count}")));
    }
    let number = required(file, NUMBER)?;
    if number >= count {
        return Err(wrong(format!("key {NUMBER}: expected a number below {COUNT} {count}, got {number}")));
    }
    let name = file.path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| wrong("the other files go by its name: expected one in UTF-8".into()))?;
    let stem = name.strip_suffix(&end(number, count));
    if number > 0 {
        let (own, first) = (number + 1, format!("{}{}", stem.unwrap_or("…"), end(0, count)));
        return Err(wrong(format!("it is file {own} of a model in {count}: give the first one, {first}")));
    }
    // One file alone may have any name.
    let stem = stem.or((count == 1).then_some(name));
    stem.map(str::to_owned).ok_or_else(|| {
        let end = end(0, count);
        wrong(format!("it is the first file of a model in {count}: expected a name that ends in {end}"))
    })
}

/// Refuses a file that says it stands elsewhere, or among so many others.
fn check_place(part: &Gguf, number: usize, count: usize) -> Result<()> {
    for (key, expected) in [(COUNT, count), (NUMBER, number)] {
        let got = required(part, key)?;
        if got != expected {
            let message = format!(
                "key {key}: expected {expected}, since the name ends in {}, got {got}",
                end(number, count)
            );
            return Err(Error::format(&part.path, message));
        }
    }
    Ok(())
}

fn required(file: &Gguf, key: &str) -> Result<usize> {
    let missing = || Error::format(&file.path, format!("the metadata has no `{key}`, but `{COUNT}`"));
    file.size(key)?.ok_or_else(missing)
}

/// What the name of a file ends in; names count from 1.
fn end(number: usize, count: usize) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

impl Gguf {
    /// Adds the tensors of a further file.
    fn append(&mut self, part: Gguf) -> Result<()> {
        for (name, InFile { location, .. }) in part.tensors {
            if let Some(other) = self.tensors.get(&name) {
                let other = self.sources.get(other.file).map_or(self.path(), |source| source.path());
                let message = format!("tensor {name} is there twice: also in {}", other.display());
                return Err(Error::format(&part.path, message));
            }
            self.tensors.insert(name, InFile { file: self.sources.len(), location });
        }
        self.sources.extend(part.sources);
        Ok(())
    }
}

/// A model's name by that of its GGUF file: without `.gguf` and, of a model in several files, without which one it is.
pub fn gguf_name(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_string_lossy();
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = stem.rsplit_once("-of-").filter(|(_, count)| digits(count));
    let name = whole.and_then(|(start, _)| start.rsplit_once('-')).filter(|(_, number)| digits(number));
    Some(name.map_or(stem.as_ref(), |(name, _)| name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_in_several_files_is_named_without_their_numbers() {
        let of = |path: &str| gguf_name(Path::new(path)).unwrap();
        assert_eq!(of("models/Qwen3-4B-00002-of-00010.gguf"), "Qwen3-4B");
        assert_eq!(of("Qwen3-4B.Q4_1.gguf"), "Qwen3-4B.Q4_1");
        assert_eq!(of("best-of-00010.gguf"), "best-of-00010");
        assert_eq!(of("a-1-of-2.gguf"), "a-1-of-2");
    }
}
