//! One repository of the hub: its list of files, their download and their checksums.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use sha2::{Digest as _, Sha256};

use super::DownloadBar;

/// A file of a repository.
#[derive(Debug, Clone)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) size: Option<u64>,
    sha256: Option<String>,
    /// The commit that the list of files is of, where the hub tells it.
    commit: Option<String>,
}

/// A repository at a revision.
pub(super) struct Hub {
    repo: Repo,
    cache: Cache,
    remote: ApiRepo,
    endpoint: String,
    offline: bool,
}

/// How often a broken download goes on within one call.
const RETRIES: u32 = 4;
/// The pause before the first of them; each later one is longer by as much.
const PAUSE: Duration = Duration::from_millis(250);

impl Hub {
    /// The repository as the environment says to reach it.
    pub(super) fn from_environment(name: &str, dataset: bool, revision: &str) -> anyhow::Result<Self> {
        let kind = if dataset { RepoType::Dataset } else { RepoType::Model };
        let repo = Repo::with_revision(name.to_string(), kind, revision.to_string());
        let cache = Cache::new(cache_dir()?);
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        let api = api(&cache, &endpoint)?;
        let offline = variable("HF_HUB_OFFLINE")
            .is_some_and(|value| !["0", "false", "no", "off"].contains(&value.to_lowercase().as_str()));
        Ok(Self { remote: api.repo(repo.clone()), repo, cache, endpoint, offline })
    }

    /// Whether the network may not be used.
    pub(super) fn offline(&self) -> bool {
        self.offline
    }

    /// The repository's address, for messages.
    pub(super) fn shown(&self) -> String {
        format!("{}/{} at {}", self.endpoint, self.repo.url(), self.repo.revision())
    }

    /// The directory of an earlier download.
    pub(super) fn cached(&self) -> anyhow::Result<PathBuf> {
        let dir = self.cache.path().join(self.repo.folder_name());
        let commit = std::fs::read_to_string(dir.join("refs").join(self.repo.revision()));
        let snapshot =
            commit.ok().map(|commit| dir.join("snapshots").join(commit.trim())).filter(|path| path.is_dir());
        snapshot.with_context(|| {
            format!("HF_HUB_OFFLINE is set, and {} is not in {}", self.shown(), self.cache.path().display())
        })
    }

    /// The repository's files.
    pub(super) fn files(&self) -> anyhow::Result<Vec<RemoteFile>> {
        let response = match self.remote.info_request().query("blobs", "true").call() {
            Ok(response) => response,
            Err(error) => {
                let text = error.to_string();
                return Err(self.explain(error.into_response().map(|response| response.status()), &text));
            }
        };
        let info: serde_json::Value = response.into_json().with_context(|| self.shown())?;
        let files = info["siblings"]
            .as_array()
            .with_context(|| format!("{}: the answer lists no files", self.shown()))?;
        let commit = info["sha"].as_str();
        // A commit becomes a path in the cache too.
        ensure!(
            commit.is_none_or(|commit| commit.chars().all(|c| c.is_ascii_alphanumeric())),
            "{}: the answer's commit is no commit",
            self.shown()
        );
        files.iter().map(|file| self.file(file, commit)).collect()
    }

    fn file(&self, entry: &serde_json::Value, commit: Option<&str>) -> anyhow::Result<RemoteFile> {
        let name = entry["rfilename"]
            .as_str()
            .with_context(|| format!("{}: a file without a name", self.shown()))?;
        // A name becomes a path in the cache, and must not lead out of it.
        let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            inside && !name.is_empty(),
            "{}: the file name `{name}` leads out of the repository",
            self.shown()
        );
        let sha256 = entry["lfs"]["sha256"].as_str().map(str::to_string);
        let commit = commit.map(str::to_string);
        Ok(RemoteFile { name: name.to_string(), size: entry["size"].as_u64(), sha256, commit })
    }

    /// Downloads a file unless it is in the cache; the path is that of the cached file.
    pub(super) fn download(&self, file: &RemoteFile) -> anyhow::Result<PathBuf> {
        let path = match self.in_cache(file)? {
            Some(path) => path,
            None => self.get(file)?,
        };
        self.verify(&path, file)?;
        Ok(path)
    }

    /// The file in the cache as the listed commit has it; what an earlier commit had is another file.
    fn in_cache(&self, file: &RemoteFile) -> anyhow::Result<Option<PathBuf>> {
        let cached = self.cache.repo(self.repo.clone());
        let Some(commit) = &file.commit else { return Ok(cached.get(&file.name)) };
        let snapshots = self.cache.path().join(self.repo.folder_name()).join("snapshots");
        let path = snapshots.join(commit).join(&file.name);
        if !path.exists() {
            return Ok(None);
        }
        // The revision may have been elsewhere since the file was fetched.
        cached.create_ref(commit).with_context(|| path.display().to_string())?;
        Ok(Some(path))
    }

    /// Downloads in as many attempts as it takes, each from where the one before broke off.
    ///
    /// The attempts are made here and not by hf-hub: where nothing came, its own begin at the first
    /// byte again and append to what is there.
    fn get(&self, file: &RemoteFile) -> anyhow::Result<PathBuf> {
        let mut failures = 0;
        loop {
            let error = match self.attempt(&file.name) {
                Ok(path) => return Ok(path),
                Err(error) => error,
            };
            failures += 1;
            let last = failures > RETRIES;
            match error {
                ApiError::InvalidResume if !last => self.remove_parts()?,
                ApiError::RequestError(error) => {
                    let text = error.to_string();
                    match (*error).into_response().map(|response| response.status()) {
                        // An earlier call was stopped after the last byte: nothing is left to ask for.
                        Some(416) if !last => self.remove_parts()?,
                        status if last || status.is_some_and(|code| (400..500).contains(&code)) => {
                            return Err(self.explain(status, &text));
                        }
                        _ => std::thread::sleep(PAUSE * failures),
                    }
                }
                error if last => {
                    return Err(anyhow::Error::new(error).context(format!(
                        "{}: {}",
                        self.shown(),
                        file.name
                    )));
                }
                _ => std::thread::sleep(PAUSE * failures),
            }
        }
    }

    fn attempt(&self, name: &str) -> Result<PathBuf, ApiError> {
        if std::io::stderr().is_terminal() {
            self.remote.download_with_progress(name, DownloadBar::new())
        } else {
            self.remote.download_with_progress(name, ())
        }
    }

    /// Removes what is left of broken downloads.
    fn remove_parts(&self) -> anyhow::Result<()> {
        let blobs = self.cache.path().join(self.repo.folder_name()).join("blobs");
        for entry in std::fs::read_dir(&blobs).with_context(|| blobs.display().to_string())?.flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "part") {
                std::fs::remove_file(entry.path()).with_context(|| entry.path().display().to_string())?;
            }
        }
        Ok(())
    }

    /// Checks the size and, where the hub tells it, the checksum; a bad file is removed.
    fn verify(&self, path: &Path, file: &RemoteFile) -> anyhow::Result<()> {
        let mut reader = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let size = reader.metadata()?.len();
        let mut wrong = file
            .size
            .filter(|&expected| expected != size)
            .map(|expected| format!("expected {expected} bytes, got {size}"));
        if let (None, Some(expected)) = (&wrong, &file.sha256) {
            let mut hash = Sha256::new();
            std::io::copy(&mut reader, &mut hash).with_context(|| path.display().to_string())?;
            let got = hexadecimal(&hash.finalize());
            wrong = (got != *expected).then(|| format!("expected sha256 {expected}, got {got}"));
        }
        let Some(wrong) = wrong else { return Ok(()) };
        // The path is a link to the content: both go, so that the next fetch starts afresh.
        for bad in [path.canonicalize().unwrap_or_else(|_| path.to_path_buf()), path.to_path_buf()] {
            let _ = std::fs::remove_file(bad);
        }
        bail!("{}: {}: {wrong}; the file was removed, fetch it again", self.shown(), file.name)
    }

    /// A request's failure in words.
    fn explain(&self, status: Option<u16>, text: &str) -> anyhow::Error {
        let shown = self.shown();
        match status {
            Some(404) => anyhow::anyhow!("{shown}: no such repository or revision (404)"),
            Some(code @ (401 | 403)) => anyhow::anyhow!(
                "{shown}: access refused ({code}); the repository does not exist, or it is private or gated: set HF_TOKEN"
            ),
            Some(code) => anyhow::anyhow!("{shown}: the server answered {code}"),
            None => anyhow::anyhow!("{shown}: {text}"),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(out, "{byte:02x}");
    }
    out
}

fn api(cache: &Cache, endpoint: &str) -> anyhow::Result<Api> {
    let token = variable("HF_TOKEN").or_else(|| cache.token());
    let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.to_string());
    Ok(builder.with_token(token).with_retries(0).with_progress(false).build()?)
}

/// A variable of the environment that is set to something.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn cache_dir() -> anyhow::Result<PathBuf> {
    if let Some(cache) = variable("HF_HUB_CACHE") {
        return Ok(cache.into());
    }
    let home = variable("HF_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cache").join("huggingface")));
    Ok(home.context("neither HF_HOME nor a home directory is set")?.join("hub"))
}
