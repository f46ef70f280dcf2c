//! Scores by a service, over JSON lines in HTTP.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};

use super::protocol::Answers;
use super::{names_only, seconds};

/// Longest body of an answer that is read, in bytes.
const MOST_BODY_BYTES: u64 = 256 << 20;
/// Characters of a refusal's body that an error shows.
const SHOWN_CHARS: usize = 500;
/// Longest pause before another try.
const MOST_PAUSE: Duration = Duration::from_mins(1);

/// Settings of [`RemoteReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RemoteConfig {
    /// Where requests are posted, with `http://` or `https://`.
    pub url: String,
    /// Headers beside the content type, such as `Authorization`. They may be secrets: written out, they are their names.
    #[serde(serialize_with = "names_only", skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Headers whose values stand in environment variables of this program, by header.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers_from_env: BTreeMap<String, String>,
    /// Longest time for a try, in seconds.
    pub timeout_secs: f64,
    /// Further tries after one that failed: no connection, no answer in time, status 408, 429 or from 500 on.
    pub retries: usize,
    /// Pause before the second try, in seconds; it doubles from try to try, up to a minute.
    pub backoff_secs: f64,
    /// Most samples of one request.
    pub batch_size: usize,
    /// Whether requests carry the sample's token ids, and the mask of the response's.
    pub send_tokens: bool,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            headers: BTreeMap::new(),
            headers_from_env: BTreeMap::new(),
            timeout_secs: 60.0,
            retries: 3,
            backoff_secs: 0.5,
            batch_size: 256,
            send_tokens: false,
        }
    }
}

/// A service that is posted the lines of the process protocol and answers with the lines of scores.
#[derive(Debug)]
pub struct RemoteReward {
    config: RemoteConfig,
    agent: ureq::Agent,
    backoff: Duration,
}

/// Why a try failed.
struct Failure {
    message: String,
    may_pass: bool,
}

impl RemoteReward {
    /// The reward with these settings; connects to nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] for another kind of URL, a header that cannot be one or whose variable is not set, times that are not above 0, and a
    /// batch of no sample.
    pub fn new(mut config: RemoteConfig) -> Result<Self> {
        let is_http = ["http://", "https://"].iter().any(|scheme| config.url.starts_with(scheme));
        if !is_http || ureq::get(&config.url).request_url().is_err() {
            let message = format!("must be an address with http:// or https://, got {:?}", config.url);
            return Err(Error::setting("url", message));
        }
        for (name, variable) in &config.headers_from_env {
            let key = || format!("headers_from_env.{name}");
            let value = std::env::var(variable).map_err(|_| {
                Error::setting(key(), format!("the environment has no text in a variable `{variable}`"))
            })?;
            if config.headers.insert(name.clone(), value).is_some() {
                return Err(Error::setting(key(), "is set in `headers` too"));
            }
        }
        for (name, value) in &config.headers {
            let is_name = !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
            if !is_name || value.chars().any(char::is_control) {
                return Err(Error::setting(format!("headers.{name}"), "is no HTTP header"));
            }
        }
        if config.batch_size == 0 {
            return Err(Error::setting("batch_size", "must be at least 1"));
        }
        let timeout = seconds("timeout_secs", config.timeout_secs)?;
        let backoff = seconds("backoff_secs", config.backoff_secs)?;
        let agent = ureq::AgentBuilder::new().timeout(timeout).build();
        Ok(Self { config, agent, backoff })
    }

    /// Posts lines until an answer comes or the tries are used up.
    fn post(&self, lines: &str) -> Result<String> {
        let mut pause = self.backoff.min(MOST_PAUSE);
        let mut tries = 1;
        loop {
            let failure = match self.try_post(lines) {
                Ok(body) => return Ok(body),
                Err(failure) => failure,
            };
            let url = &self.config.url;
            if !failure.may_pass || tries > self.config.retries {
                let times = if tries == 1 { String::new() } else { format!(" (after {tries} tries)") };
                return Err(Error::Invalid(format!("{url}: {}{times}", failure.message)));
            }
            tracing::warn!(url, error = failure.message, "a reward's service failed; trying again");
            std::thread::sleep(pause);
            pause = (pause * 2).min(MOST_PAUSE);
            tries += 1;
        }
    }

    fn try_post(&self, lines: &str) -> Result<String, Failure> {
        let mut request = self.agent.post(&self.config.url).set("Content-Type", "application/x-ndjson");
        for (name, value) in &self.config.headers {
            request = request.set(name, value);
        }
        let response = match request.send_bytes(lines.as_bytes()) {
            Ok(response) => response,
            Err(ureq::Error::Status(status, response)) => {
                let body = read(response).unwrap_or_else(|error| format!("unreadable: {error}"));
                let body: String = body.trim().chars().take(SHOWN_CHARS).collect();
                let may_pass = [408, 429].contains(&status) || status >= 500;
                return Err(Failure { message: format!("status {status}: {body}"), may_pass });
            }
            Err(ureq::Error::Transport(error)) => {
                // Its own text repeats the address.
                let cause = error.message().map_or_else(|| error.kind().to_string(), str::to_owned);
                return Err(Failure { message: format!("no answer: {cause}"), may_pass: true });
            }
        };
        if response.status() >= 300 {
            let message = format!("status {}, not an answer", response.status());
            return Err(Failure { message, may_pass: false });
        }
        read(response)
            .map_err(|error| Failure { message: format!("a broken answer: {error}"), may_pass: true })
    }

    fn ask(&self, samples: &[Sample], places: &[usize]) -> Result<Vec<Score>> {
        let mut answers = Answers::new(samples, places, 0);
        let body = self.post(&answers.requests(self.config.send_tokens))?;
        let error = |message: String| Error::Invalid(format!("{}: {message}", self.config.url));
        for (at, line) in body.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            answers
                .take(line)
                .map_err(|message| error(format!("line {} of its answer {message}", at + 1)))?;
        }
        answers.into_scores().map_err(|cause| error(cause.to_string()))
    }
}

fn read(response: ureq::Response) -> std::io::Result<String> {
    let mut body = String::new();
    let read = response.into_reader().take(MOST_BODY_BYTES + 1).read_to_string(&mut body)?;
    if read as u64 > MOST_BODY_BYTES {
        return Err(std::io::Error::other(format!("over {MOST_BODY_BYTES} bytes long")));
    }
    Ok(body)
}

impl Reward for RemoteReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let places: Vec<usize> = (0..samples.len()).collect();
        let mut scores = Vec::with_capacity(samples.len());
        for places in places.chunks(self.config.batch_size) {
            scores.extend(self.ask(samples, places)?);
        }
        Ok(scores)
    }
}
