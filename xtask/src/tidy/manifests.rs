//! Versions stand in the workspace table only, and every member takes the workspace's lints.

use std::path::Path;

use anyhow::{Context, Result};
use toml::{Table, Value};

use crate::workspace::Member;

/// One line for each dependency with a version of its own, and each member without the lints.
pub(super) fn check(members: &[Member]) -> Result<Vec<String>> {
    let mut violations = Vec::new();
    for member in members {
        let text = std::fs::read_to_string(&member.manifest)
            .with_context(|| format!("cannot read {}", member.manifest.display()))?;
        let manifest: Table =
            text.parse().with_context(|| format!("{} is not TOML", member.manifest.display()))?;
        violations.extend(check_manifest(&member.manifest, &manifest));
    }
    Ok(violations)
}

fn check_manifest(path: &Path, manifest: &Table) -> Vec<String> {
    let mut violations = Vec::new();
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let table = manifest.get(section).and_then(Value::as_table).into_iter().flatten();
        for (name, _) in table.filter(|(_, value)| !from_workspace(value)) {
            violations.push(format!("{}: {section}.{name} must say `workspace = true`", path.display()));
        }
    }
    if !manifest.get("lints").is_some_and(from_workspace) {
        violations.push(format!("{}: [lints] must say `workspace = true`", path.display()));
    }
    violations
}

fn from_workspace(value: &Value) -> bool {
    value.get("workspace").and_then(Value::as_bool) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(text: &str) -> Vec<String> {
        check_manifest(Path::new("a/Cargo.toml"), &text.parse().unwrap())
    }

    #[test]
    fn a_version_in_a_member_is_reported() {
        let found =
            violations("lints.workspace = true\n[dependencies]\nserde = \"1\"\nburn.workspace = true");
        assert_eq!(found, ["a/Cargo.toml: dependencies.serde must say `workspace = true`"]);
    }

    #[test]
    fn lints_of_the_workspace_are_required() {
        assert_eq!(violations("").len(), 1);
    }

    #[test]
    fn features_of_a_workspace_dependency_are_allowed() {
        let text =
            "lints.workspace = true\n[dependencies]\nburn = { workspace = true, features = [\"std\"] }";
        assert!(violations(text).is_empty());
    }
}
