//! Small files, read whole.

use std::path::Path;

use crate::{Error, Result};

/// The bytes of a file of at most `most_bytes`: settings, names, vocabularies.
///
/// # Errors
/// No such file, a directory, a device or a pipe in its place, a file that is larger.
pub fn read_whole(path: &Path, most_bytes: u64) -> Result<Vec<u8>> {
    // Asked before it is opened: opening a pipe waits for a writer.
    let metadata = std::fs::metadata(path).map_err(Error::io(path))?;
    if !metadata.is_file() {
        return Err(Error::format(path, "expected a file"));
    }
    let len = metadata.len();
    if len > most_bytes {
        return Err(Error::format(path, format!("expected at most {most_bytes} bytes, got {len}")));
    }
    std::fs::read(path).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_and_what_is_too_large_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("settings.json");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_whole(&path, 5).unwrap(), b"12345");
        let fault = |path: &Path| read_whole(path, 4).unwrap_err().to_string();
        assert!(fault(&path).contains("settings.json") && fault(&path).contains("at most 4 bytes, got 5"));
        assert!(fault(dir.path()).contains("expected a file"));
        let link = dir.path().join("link.json");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert!(fault(&link).contains("expected a file"));
        assert!(fault(&dir.path().join("absent")).contains("absent"));
    }
}
