//! A temporary directory with a tiny model, data and a run file, in which the real program runs.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// What a call of the program gave.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Call {
    fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the program writes UTF-8");
        let call =
            Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(!call.stderr.contains("panicked"), "{}", call.stderr);
        call
    }

    /// What a program that was started with [`Scene::start_with`] gave, once it has ended.
    pub(crate) fn end_of(child: Child) -> Self {
        Self::of(child.wait_with_output().expect("it ends"))
    }

    /// Asserts success and gives standard output.
    #[track_caller]
    pub(crate) fn succeeds(&self) -> &str {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        &self.stdout
    }

    /// Asserts a failure with `code` whose message has all `parts`.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in:\n{}", self.stderr);
        }
    }
}

/// The directory. Its model is the golden `llama_gqa_untied`: two layers, 320 tokens.
pub(crate) struct Scene {
    dir: TempDir,
}

impl Scene {
    /// A model in `model`, 32 preference pairs in `pairs.jsonl`, 32 texts in `texts.jsonl`.
    pub(crate) fn new() -> Self {
        let scene = Self { dir: tempfile::tempdir().expect("a temporary directory") };
        copy_dir(&golden().join("models/llama_gqa_untied"), &scene.path("model"));
        let (mut pairs, mut texts) = (String::new(), String::new());
        for row in 0..32 {
            let prompt = format!("Say {row} in words.");
            let chosen = "yes ".repeat(1 + row % 5);
            let rejected = "never ".repeat(1 + row % 3);
            let pair = serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
            let text = serde_json::json!({ "prompt": prompt, "completion": chosen });
            writeln!(pairs, "{pair}").expect("a string");
            writeln!(texts, "{text}").expect("a string");
        }
        scene.write("pairs.jsonl", &pairs);
        scene.write("texts.jsonl", &texts);
        scene
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("the scene is writable");
    }

    pub(crate) fn read(&self, name: &str) -> String {
        String::from_utf8(self.bytes(name)).expect("text")
    }

    #[track_caller]
    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let path = self.path(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Writes `run.toml`: DPO on the pairs, 12 steps of 4, into `run`.
    pub(crate) fn dpo(&self) -> &Self {
        self.run_file("pairs.jsonl", "dpo", "beta = 0.5")
    }

    /// A run that draws samples of its own, for a count of vowels.
    pub(crate) fn ppo(&self) -> &Self {
        let rows: Vec<String> =
            (0..32).map(|row| format!("{{\"prompt\": \"Say {row} in words.\"}}\n")).collect();
        self.write("prompts.jsonl", rows.concat());
        self.write(
            "run.toml",
            "[model]\npath = \"model\"\n\n[data.train]\npath = \"prompts.jsonl\"\nholdout = 4\n\n[algorithm.ppo]\n\n\
             [reward.vowels]\nkind = \"regex\"\npattern = \"[aeiou]\"\nmode = \"count\"\n\n\
             [learner]\nlearning_rate = 1e-3\n\n[run]\ndir = \"run\"\nsteps = 4\nbatch_size = 4\nsave_every = 2\n\
             rollouts_every = 1\nrollout_groups = 4\n\n[rollout]\nnum_generations = 3\nmax_completion_length = 12\n",
        );
        self
    }

    /// Writes `run.toml`: fine-tuning on the texts.
    pub(crate) fn sft(&self) -> &Self {
        self.run_file("texts.jsonl", "sft", "")
    }

    pub(crate) fn run_file(&self, data: &str, algorithm: &str, settings: &str) -> &Self {
        self.write(
            "run.toml",
            format!(
                "[model]\npath = \"model\"\n\n[data.train]\npath = \"{data}\"\nholdout = 8\n\n\
                 [algorithm.{algorithm}]\n{settings}\n\n[learner]\nlearning_rate = 1e-3\n\n\
                 [run]\ndir = \"run\"\nsteps = 12\nbatch_size = 4\nsample_prompts = 2\nsample_tokens = 8\n"
            ),
        );
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aligner"));
        command.args(arguments).current_dir(self.dir.path());
        for name in ["RUST_LOG", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.path("hub"));
        command
    }

    /// Runs the program to its end.
    pub(crate) fn aligner(&self, arguments: &[&str]) -> Call {
        Call::of(self.command(arguments).stdin(Stdio::null()).output().expect("the program starts"))
    }

    /// Runs the program with variables of the environment set.
    pub(crate) fn aligner_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Call {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied()).stdin(Stdio::null());
        Call::of(command.output().expect("the program starts"))
    }

    /// Runs the program with `input` on standard input.
    pub(crate) fn aligner_fed(&self, input: impl AsRef<[u8]>, arguments: &[&str]) -> Call {
        self.write("input.txt", input);
        let input = fs::File::open(self.path("input.txt")).expect("just written");
        Call::of(self.command(arguments).stdin(input).output().expect("the program starts"))
    }

    /// Runs the program where no file may grow past `blocks` of 512 bytes, as on a full disk.
    pub(crate) fn aligner_with_little_disk(&self, blocks: usize, arguments: &[&str]) -> Call {
        Call::end_of(self.start_with_disk(&blocks.to_string(), &[], arguments))
    }

    /// Starts the program with variables of the environment set, and keeps what it says.
    pub(crate) fn start_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program starts")
    }

    /// The same where files may grow to so many blocks of 512 bytes.
    pub(crate) fn start_with_disk(
        &self,
        blocks: &str,
        variables: &[(&str, &str)],
        arguments: &[&str],
    ) -> Child {
        let mut command = Command::new("sh");
        // Without the signal, the write call itself fails, as it does where the disk is full.
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_aligner")).args(arguments);
        command.envs(variables.iter().copied()).current_dir(self.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("sh starts")
    }

    /// Starts the program and lets it run.
    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the program starts")
    }
}

/// The golden files: `ALIGNER_GOLDEN`, or those of the repository.
pub(crate) fn golden() -> PathBuf {
    std::env::var_os("ALIGNER_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden"), PathBuf::from)
}

pub(crate) fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the scene is writable");
    for entry in fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let entry = entry.expect("a readable directory");
        // Content only: the copy is changed by tests, whatever the original's permissions.
        let content = fs::read(entry.path()).expect("a readable file");
        fs::write(to.join(entry.file_name()), content).expect("the scene is writable");
    }
}
