//! Files that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Bytes gathered before they go to the system.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes a file so that a reader, or a machine that loses power, sees the old content or the new
/// one and nothing between.
///
/// The content goes to a temporary name in the same directory, is flushed to the disk and renamed
/// over `path`; then the directory is flushed.
///
/// # Errors
/// [`Error::Io`] names `path`. The temporary file is removed and the old file stays as it was,
/// also where the disk is full.
///
/// ```
/// # use std::io::Write;
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("state.json");
/// aligner_core::weights::atomic_write(&path, |file| file.write_all(b"{}"))?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn atomic_write(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    write_and_rename(path, write).map_err(Error::io(path))
}

fn write_and_rename(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let (temporary, file) = Temporary::create(path)?;
    let mut buffer = BufWriter::with_capacity(BUFFER_BYTES, file);
    write(&mut buffer)?;
    let file = buffer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    drop(file);
    temporary.rename(path)?;
    // Without this the rename itself may be lost with the power.
    File::open(directory(path))?.sync_all()
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A temporary file that is removed unless it was renamed, also when the writer panics.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    fn create(target: &Path) -> io::Result<(Self, File)> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().ok_or_else(|| io::Error::other("the path has no file name"))?;
        // Process and counter keep writers apart, so nobody's file is taken over.
        let unique = format!("{}.{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let path = directory(target).join(format!(".{}.{unique}.tmp", name.to_string_lossy()));
        // A process of the same id may have been killed here; its remains are nobody's.
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        Ok((Self { path, renamed: false }, file))
    }

    fn rename(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // The error that led here is the one to report.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn failed_write_leaves_the_old_file_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        atomic_write(&path, |file| file.write_all(b"old")).unwrap();
        let full = |file: &mut dyn Write| {
            file.write_all(b"new, but only a part")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        let message = atomic_write(&path, full).unwrap_err().to_string();
        assert!(message.contains("weights"), "{message}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(dir.path()), ["weights"]);
    }

    #[test]
    fn panicking_writer_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let caught = std::panic::catch_unwind(|| atomic_write(&path, |_| panic!("writer")));
        assert!(caught.is_err());
        assert_eq!(entries(dir.path()), [] as [&str; 0]);
    }

    #[test]
    fn missing_directory_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("absent/weights");
        let message = atomic_write(&path, |_| Ok(())).unwrap_err().to_string();
        assert!(message.contains("absent/weights"), "{message}");
    }
}
