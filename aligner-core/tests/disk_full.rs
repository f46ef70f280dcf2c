//! A disk that runs full while a model is saved.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use aligner_core::weights::{read_tensors, save_tensors};
use aligner_core::{Device, Tensor};

/// Names the target in the child process.
const TARGET: &str = "ALIGNER_DISK_FULL_TARGET";

fn save(path: &Path, elements: usize) -> aligner_core::Result<()> {
    let tensor = Tensor::<1>::ones([elements], &Device::flex());
    save_tensors(path, &[("w".to_string(), vec![elements], tensor)], &BTreeMap::new())
}

/// The child: a file-size limit makes its write fail in the middle, as a full disk does.
#[test]
#[ignore = "run by the test below, in a process with a file-size limit"]
fn child_saves_more_than_fits() {
    let target = std::env::var(TARGET).expect("the parent names the target");
    let message = save(Path::new(&target), 1 << 20).unwrap_err().to_string();
    assert!(message.contains(&target), "{message}");
}

#[test]
fn full_disk_keeps_the_old_file_and_leaves_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    save(&path, 8).unwrap();
    // The limit is in blocks of 512 or 1024 bytes: 128 or 256 KiB of the 4 MiB. The signal that
    // comes with it must not end the process.
    let limited = "trap '' XFSZ; ulimit -f 256; exec \"$0\" --ignored --exact child_saves_more_than_fits";
    let output = Command::new("sh")
        .args(["-c", limited])
        .arg(std::env::current_exe().unwrap())
        .env(TARGET, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    assert_eq!(read_tensors(&path).unwrap()["w"].0, [8]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file stayed behind");
}
