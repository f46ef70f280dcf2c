//! The one error type of the library crates.

use std::path::{Path, PathBuf};

/// What can go wrong, with the file, line, key, shape or id that is at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{path}: {cause}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A file's content is not what its format promises.
    #[error("{path}: {message}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was expected and what came.
        message: String,
    },
    /// One row of a data set is not usable.
    #[error("{path}:{line}: {message}", path = path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Line of the file, or row of the array, from 1.
        line: usize,
        /// What was expected and what came.
        message: String,
    },
    /// A tensor does not have the shape that an operation needs.
    #[error("{what}: expected shape {expected}, got {got:?}")]
    Shape {
        /// The tensor or the operation.
        what: String,
        /// The expected shape, in axis words.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A setting has a value that cannot work.
    #[error("{key}: {message}")]
    Setting {
        /// The setting's full name, as in the run file.
        key: String,
        /// What was expected and what came.
        message: String,
    },
    /// A loss asked for something that the step's batch does not carry.
    #[error("the batch has no `{field}`; return `{need}` from `Algorithm::needs`")]
    Missing {
        /// The absent field.
        field: &'static str,
        /// The need that brings it.
        need: &'static str,
    },
    /// A loss or an engine asked for something that the model has no head for.
    #[error("the model has no {head}, which `{field}` needs")]
    Head {
        /// The absent field.
        field: &'static str,
        /// The head that gives it.
        head: &'static str,
    },
    /// A loss, gradient or reward is not finite.
    #[error("{what} is not finite; samples: {}", samples.join(", "))]
    NotFinite {
        /// Which value.
        what: String,
        /// Ids of the samples in the micro-batch that caused it.
        samples: Vec<String>,
    },
    /// Ranks did not meet in a collective.
    #[error(transparent)]
    Collective(Box<crate::CollectiveError>),
    /// Input that is well formed but not usable.
    #[error("{0}")]
    Invalid(String),
}

/// The library crates' result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Io`] for `path`, for use with `map_err`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |cause| Self::Io { path, cause }
    }

    /// An [`Error::Format`] for `path`.
    pub fn format(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Format { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// An [`Error::Row`] for `line` (from 1) of `path`.
    pub fn row(path: impl AsRef<Path>, line: usize, message: impl Into<String>) -> Self {
        Self::Row { path: path.as_ref().to_path_buf(), line, message: message.into() }
    }

    /// An [`Error::Shape`].
    pub fn shape(what: impl Into<String>, expected: impl Into<String>, got: &[usize]) -> Self {
        Self::Shape { what: what.into(), expected: expected.into(), got: got.to_vec() }
    }

    /// An [`Error::Setting`] for the run file's `key`.
    pub fn setting(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), message: message.into() }
    }
}
