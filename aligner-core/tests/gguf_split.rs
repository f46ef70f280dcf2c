//! Models in several GGUF files.

#[path = "gguf_split/splitter.rs"]
mod splitter;

use std::path::{Path, PathBuf};

use aligner_core::weights::{Checkpoint, Gguf};
use splitter::{Stated, Whole};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf");

fn tiny() -> PathBuf {
    Path::new(GOLDEN).join("tiny.gguf")
}

fn contents(path: &Path) -> Vec<(String, Vec<usize>, Vec<u32>)> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let tensor = |name: &str| {
        let (shape, values) = checkpoint.read(name).unwrap();
        (name.to_owned(), shape, values.into_iter().map(f32::to_bits).collect())
    };
    checkpoint.names().map(tensor).collect()
}

#[test]
fn several_files_are_the_one_that_they_were_split_from() {
    let families = std::fs::read_dir(Path::new(GOLDEN).join("families")).unwrap();
    let families = families.map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = families.filter(|path| path.extension().unwrap() == "gguf").collect();
    paths.push(tiny());
    for path in paths {
        let (dir, whole) = (tempfile::tempdir().unwrap(), Whole::read(&path));
        let tensors = whole.tensors();
        // The first file may have no tensor of its own.
        for ends in [vec![3, tensors / 2, tensors], vec![0, tensors], vec![tensors]] {
            let files = whole.write(dir.path(), "model", &ends);
            let (split, one) = (Gguf::open(&files[0]).unwrap(), Gguf::open(&path).unwrap());
            assert_eq!(split.files().collect::<Vec<_>>(), files);
            let own = split.keys().filter(|key| !key.starts_with("split."));
            assert!(own.eq(one.keys()) && one.keys().all(|key| split.value(key) == one.value(key)));
            assert_eq!(contents(&files[0]), contents(&path), "{}", path.display());
        }
    }
}

#[test]
fn a_file_that_was_merged_again_may_still_speak_of_files() {
    let (dir, whole) = (tempfile::tempdir().unwrap(), Whole::read(&tiny()));
    let path = dir.path().join("merged.gguf");
    for (number, count) in [(0, 0), (0, 1)] {
        let stated = Stated { number, count, tensors: whole.tensors() as i32 };
        std::fs::write(&path, whole.file(0..whole.tensors(), &stated)).unwrap();
        assert_eq!(contents(&path), contents(&tiny()));
    }
}

/// Three files, of which some say or hold something else.
struct Case {
    dir: tempfile::TempDir,
    whole: Whole,
    files: Vec<PathBuf>,
}

impl Case {
    fn new() -> Self {
        let (dir, whole) = (tempfile::tempdir().unwrap(), Whole::read(&tiny()));
        let files = whole.write(dir.path(), "model", &[4, 9, whole.tensors()]);
        Self { dir, whole, files }
    }

    fn stated(&self, number: u16, count: u16) -> Stated {
        Stated { number, count, tensors: self.whole.tensors() as i32 }
    }
}

fn refused(path: &Path, parts: &[&str]) {
    let message = Gguf::open(path).unwrap_err().to_string();
    assert_eq!(Checkpoint::open(path).unwrap_err().to_string(), message);
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn files_that_are_not_the_first_are_refused_with_its_name() {
    let case = Case::new();
    let parts = [
        "model-00002-of-00003.gguf: ",
        "file 2 of a model in 3",
        "give the first one, model-00001-of-00003.gguf",
    ];
    refused(&case.files[1], &parts);
    let renamed = case.dir.path().join("second.gguf");
    std::fs::copy(&case.files[1], &renamed).unwrap();
    refused(&renamed, &["second.gguf", "file 2 of a model in 3", "…-00001-of-00003.gguf"]);
    std::fs::copy(&case.files[0], &renamed).unwrap();
    refused(&renamed, &["second.gguf", "expected a name that ends in -00001-of-00003.gguf"]);
    std::fs::write(&case.files[0], case.whole.file(0..4, &case.stated(3, 3))).unwrap();
    refused(&case.files[0], &["split.no", "below split.count 3, got 3"]);
}

#[test]
fn files_that_are_missing_or_cut_are_named() {
    let case = Case::new();
    let last = std::fs::read(&case.files[2]).unwrap();
    std::fs::write(&case.files[2], &last[..last.len() - 40]).unwrap();
    refused(&case.files[0], &["model-00003-of-00003.gguf", "truncated"]);
    std::fs::remove_file(&case.files[2]).unwrap();
    refused(
        &case.files[0],
        &["model-00001-of-00003.gguf", "in 3 files", "model-00003-of-00003.gguf is missing"],
    );
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let case = Case::new();
    let (first, second, all) = (&case.files[0], &case.files[1], case.whole.tensors());
    let parts = std::fs::read(second).unwrap();
    for (stated, expected) in [
        (case.stated(1, 4), ["split.count", "expected 3", "got 4"]),
        (case.stated(2, 3), ["split.no", "expected 1", "got 2"]),
    ] {
        std::fs::write(second, case.whole.file(4..9, &stated)).unwrap();
        refused(first, &[&["model-00002-of-00003.gguf"], expected.as_slice()].concat());
    }
    std::fs::copy(tiny(), second).unwrap();
    refused(first, &["model-00002-of-00003.gguf", "no `split.count`"]);
    std::fs::write(second, case.whole.file(3..9, &case.stated(1, 3))).unwrap();
    refused(first, &["model-00002-of-00003.gguf", "is there twice", "model-00001-of-00003.gguf"]);
    std::fs::write(second, case.whole.file(5..9, &case.stated(1, 3))).unwrap();
    refused(first, &["split.tensors.count", &format!("expected {all} tensors"), &format!("got {}", all - 1)]);
    std::fs::write(second, parts).unwrap();
    assert!(Checkpoint::open(first).is_ok());
}
