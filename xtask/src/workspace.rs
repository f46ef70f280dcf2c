//! Where the workspace is, and what `cargo metadata` says about it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The workspace's root directory.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask is a directory of the workspace").to_path_buf()
}

/// One member of the workspace.
pub(crate) struct Member {
    /// The package's name.
    pub(crate) name: String,
    /// Its Cargo.toml.
    pub(crate) manifest: PathBuf,
    /// Other members that it depends on, for tests and builds too.
    pub(crate) depends_on: Vec<String>,
    /// Its optional features, without `default`.
    pub(crate) features: Vec<String>,
}

impl Member {
    /// The directory of its Cargo.toml.
    pub(crate) fn directory(&self) -> &Path {
        self.manifest.parent().expect("a manifest lies in a directory")
    }
}

/// The members, in the order of `cargo metadata`.
pub(crate) fn members() -> Result<Vec<Member>> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(root())
        .output()
        .context("cannot start `cargo metadata`")?;
    if !output.status.success() {
        bail!("`cargo metadata` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("`cargo metadata` is not JSON")?;
    parse_members(&metadata)
}

fn parse_members(metadata: &Value) -> Result<Vec<Member>> {
    let packages = metadata["packages"].as_array().context("`cargo metadata` lists no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    packages.iter().map(|package| parse_member(package, &names)).collect()
}

fn parse_member(package: &Value, members: &[&str]) -> Result<Member> {
    let name = package["name"].as_str().context("a package without a name")?;
    let manifest = package["manifest_path"].as_str().context("a package without a manifest")?;
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    let features = package["features"].as_object().into_iter().flatten();
    Ok(Member {
        name: name.to_owned(),
        manifest: PathBuf::from(manifest),
        depends_on: dependencies
            .filter_map(|dependency| dependency["name"].as_str())
            .filter(|dependency| members.contains(dependency))
            .map(str::to_owned)
            .collect(),
        features: features.map(|(feature, _)| feature.clone()).filter(|f| f != "default").collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_their_arrows_and_features() {
        let metadata = serde_json::json!({"packages": [
            {"name": "core", "manifest_path": "/w/core/Cargo.toml",
             "dependencies": [{"name": "serde"}], "features": {"default": [], "cuda": ["burn/cuda"]}},
            {"name": "data", "manifest_path": "/w/data/Cargo.toml",
             "dependencies": [{"name": "core"}, {"name": "serde"}], "features": {}},
        ]});
        let members = parse_members(&metadata).unwrap();
        assert_eq!(members[0].features, ["cuda"]);
        assert!(members[0].depends_on.is_empty());
        assert_eq!(members[1].depends_on, ["core"]);
        assert_eq!(members[1].directory(), Path::new("/w/data"));
    }
}
