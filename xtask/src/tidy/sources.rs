//! Rules on source files: length, names of modules, no panic in library code.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace::Member;

/// Past this many lines a file should say why it still holds one idea.
const LONG_FILE_LINES: usize = 600;

/// Names that say nothing about what a module holds.
const VAGUE_NAMES: [&str; 5] = ["utils", "util", "common", "misc", "helpers"];

/// What library code must not call: bad input gets an error.
const PANICS: [&str; 5] = [".unwrap()", "panic!(", "todo!(", "unimplemented!(", "dbg!("];

/// What was found in one crate.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Broken rules.
    pub(super) violations: Vec<String>,
    /// What deserves a look.
    pub(super) warnings: Vec<String>,
}

/// Checks all sources of `member`; the rule on panics holds for the `aligner-*` crates.
pub(super) fn check(member: &Member) -> Result<Report> {
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches"] {
        collect_sources(&member.directory().join(folder), &mut files)?;
    }
    files.sort();
    let texts = files.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let is_library = member.name.starts_with("aligner-");
    let test_modules = test_modules(&files, &texts);
    let mut report = Report::default();
    for (path, text) in files.iter().zip(&texts) {
        check_name_and_length(path, text, &mut report);
        let inside = path.strip_prefix(member.directory()).unwrap_or(path);
        if is_library && !is_test_file(inside) && !test_modules.contains(&path.with_extension("")) {
            for (line, pattern) in scan_library_code(text).panics {
                report.violations.push(format!("{}:{line}: `{pattern}` in library code", path.display()));
            }
        }
    }
    Ok(report)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn collect_sources(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !directory.is_dir() {
        return Ok(());
    }
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect_sources(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn check_name_and_length(path: &Path, text: &str, report: &mut Report) {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    if VAGUE_NAMES.contains(&stem) {
        report.violations.push(format!("{}: `{stem}` does not say what it holds", path.display()));
    }
    let lines = text.lines().count();
    if lines > LONG_FILE_LINES {
        report.warnings.push(format!("{}: {lines} lines; does it still hold one idea?", path.display()));
    }
}

/// A file of tests by its place: in a `tests` or `benches` folder, or called `tests.rs` or `…_tests.rs`.
fn is_test_file(inside_member: &Path) -> bool {
    let stem = inside_member.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let in_folder = |part: Component<'_>| ["tests", "benches"].iter().any(|name| part.as_os_str() == *name);
    inside_member.components().any(in_folder) || stem == "tests" || stem.ends_with("_tests")
}

/// Modules in files of their own that are declared under `#[cfg(test)]`, as paths without `.rs`.
fn test_modules(files: &[PathBuf], texts: &[String]) -> Vec<PathBuf> {
    let declared = |(path, text): (&PathBuf, &String)| {
        let names = scan_library_code(text).test_modules;
        names.into_iter().map(|name| test_module_path(path, name)).collect::<Vec<_>>()
    };
    files.iter().zip(texts).flat_map(declared).collect()
}

/// Where the module `name`, declared in the file `parent`, lies, without `.rs`.
fn test_module_path(parent: &Path, name: &str) -> PathBuf {
    let stem = parent.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let directory = parent.parent().unwrap_or(Path::new(""));
    if stem == "lib" || stem == "main" { directory.join(name) } else { directory.join(stem).join(name) }
}

#[derive(Debug, Default, PartialEq)]
struct Scan<'a> {
    panics: Vec<(usize, &'static str)>,
    test_modules: Vec<&'a str>,
}

/// Finds panics outside comments and outside items under `#[cfg(test)]`.
///
/// Sources are formatted, so an item ends at the closing brace with the indentation of its start.
fn scan_library_code(text: &str) -> Scan<'_> {
    let mut scan = Scan::default();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            let item = lines.by_ref().map(|(_, line)| line).find(|line| !line.trim_start().starts_with("#["));
            let Some(item) = item else { break };
            if let Some(module) = item.trim().strip_suffix(';').and_then(|item| item.rsplit(' ').next()) {
                scan.test_modules.push(module);
            } else {
                let indentation = &item[..item.len() - item.trim_start().len()];
                let end = format!("{indentation}}}");
                lines.by_ref().find(|(_, line)| *line == end);
            }
            continue;
        }
        let code = line.split("//").next().unwrap_or_default();
        let found = PANICS.iter().filter(|pattern| code.contains(**pattern));
        scan.panics.extend(found.map(|pattern| (index + 1, *pattern)));
    }
    scan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_found_outside_tests_and_comments_only() {
        let text = "\
/// value.unwrap()
fn f() {
    g().unwrap();
}

#[cfg(test)]
mod tests {
    fn t() {
        todo!()
    }
}

fn h() {
    panic!(\"no\")
}
";
        let scan = scan_library_code(text);
        assert_eq!(scan.panics, [(3, ".unwrap()"), (14, "panic!(")]);
    }

    #[test]
    fn modules_declared_for_tests_are_known_by_path() {
        let scan = scan_library_code("#[cfg(test)]\nmod golden;\n");
        assert_eq!(scan.test_modules, ["golden"]);
        let path = test_module_path(Path::new("src/weights.rs"), "golden");
        assert_eq!(path, Path::new("src/weights/golden"));
        assert_eq!(test_module_path(Path::new("src/lib.rs"), "golden"), Path::new("src/golden"));
    }

    #[test]
    fn test_folders_are_known_by_name() {
        assert!(is_test_file(Path::new("tests/golden.rs")) && is_test_file(Path::new("src/ops/tests.rs")));
        assert!(is_test_file(Path::new("src/model/json_tests.rs")));
        assert!(!is_test_file(Path::new("src/weights/gguf.rs")));
    }

    #[test]
    fn vague_names_and_long_files_are_reported() {
        let mut report = Report::default();
        check_name_and_length(Path::new("src/utils.rs"), &"x\n".repeat(601), &mut report);
        assert_eq!((report.violations.len(), report.warnings.len()), (1, 1));
    }
}
