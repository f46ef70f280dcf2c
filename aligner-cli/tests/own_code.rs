//! An algorithm and a reward of a user's own that panic, hang or give nonsense: errors with names, and nothing that is lost.

mod scene;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aligner_algos::{Grpo, GrpoConfig};
use aligner_cli::Registry;
use aligner_core::{
    Algorithm, Batch, Forward, LossOutput, Needs, Per, Result, Reward, Sample, Score, StepBatch,
};
use scene::Scene;
use serde::{Deserialize, Serialize};

/// `[algorithm.mine]` and `[reward.own]`
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Trouble {
    /// A file that says what is wrong, and where; where it is not there, nothing is.
    file: PathBuf,
    /// How often all is well before.
    from: usize,
}

impl Trouble {
    /// Whether something is wrong with `part` by now; what that is, if it neither panics nor hangs.
    fn with(&self, part: &str, calls: usize) -> Option<String> {
        if calls < self.from {
            return None;
        }
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let (wrong, what) = text.split_once(' ')?;
        match what {
            _ if wrong != part => None,
            "panics" => panic!("no such word"),
            "hangs" => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            other => Some(other.to_owned()),
        }
    }
}

/// GRPO, for some steps.
struct Mine {
    grpo: Grpo,
    trouble: Trouble,
    steps: AtomicUsize,
}

impl Mine {
    fn trouble(&self, part: &str) -> Option<String> {
        self.trouble.with(part, self.steps.load(Ordering::Relaxed))
    }
}

impl Algorithm for Mine {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?.clone();
        match self.trouble("loss").as_deref() {
            Some("not finite") => Ok(LossOutput::new(logps.sum() / 0.0)),
            Some("shape") => Ok(LossOutput::new((logps.clone() + logps.repeat(&[2])).sum())),
            _ => self.grpo.loss(out, batch),
        }
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let wrong = self.trouble("credit");
        self.grpo.credit(step)?;
        let samples = step.groups.iter_mut().flat_map(|group| &mut group.samples);
        match wrong.as_deref() {
            Some("not finite") => samples.for_each(|sample| sample.weights.fill(f32::NAN)),
            Some("shape") => samples.for_each(|sample| sample.weights.push(1.0)),
            _ => {}
        }
        Ok(())
    }

    fn needs(&self) -> Needs {
        self.grpo.needs()
    }

    fn per(&self) -> Per {
        self.grpo.per()
    }
}

/// The length of a response, for some prompts.
struct Own {
    trouble: Trouble,
    groups: AtomicUsize,
}

impl Reward for Own {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let wrong = self.trouble.with("reward", self.groups.fetch_add(1, Ordering::Relaxed));
        let score = |sample: &Sample| match wrong.as_deref() {
            Some("not finite") => Score::Sample(f32::NAN),
            Some("shape") => Score::Tokens(vec![1.0]),
            _ => Score::Sample(sample.text.len() as f32),
        };
        Ok(samples.iter().map(score).collect())
    }
}

fn registry() -> Registry {
    Registry::built_in()
        .with("mine", |trouble: Trouble| {
            let grpo = Grpo::new(GrpoConfig::default())?;
            Ok(Mine { grpo, trouble, steps: AtomicUsize::new(0) })
        })
        .online()
        .with_reward("own", |trouble: Trouble| Ok(Own { trouble, groups: AtomicUsize::new(0) }))
}

const ARGUMENTS: &str = "OWN_ARGUMENTS";

/// Not a test: the program with the parts above, in a process that [`run`] starts.
#[test]
fn the_program() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let arguments = ["own"].into_iter().chain(arguments.split(' ')).map(Into::into);
    assert_eq!(aligner_cli::run_from(arguments, &registry()), ExitCode::SUCCESS);
}

fn run(scene: &Scene, arguments: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_program"]).env(ARGUMENTS, arguments).env_remove("RUST_LOG");
    command.current_dir(scene.path(".")).stdin(Stdio::null()).output().unwrap()
}

/// Five steps on prompts, a checkpoint after each; the third is in trouble.
fn scene() -> Scene {
    let scene = Scene::new();
    let rows: Vec<String> = (0..32).map(|row| format!("{{\"prompt\": \"Say {row} in words.\"}}\n")).collect();
    scene.write("prompts.jsonl", rows.concat());
    scene.write(
        "run.toml",
        "[model]\npath = \"model\"\n[data.train]\npath = \"prompts.jsonl\"\n[algorithm.mine]\nfile = \"trouble\"\n\
         from = 3\n[reward.own]\nfile = \"trouble\"\nfrom = 7\n[rollout]\nnum_generations = 3\nmax_completion_length = 8\n\
         [learner]\nlearning_rate = 1e-3\n\
         [run]\ndir = \"whole\"\nsteps = 5\nbatch_size = 3\nsave_every = 1\nsample_prompts = 0\ncall_timeout_secs = 5\n",
    );
    scene
}

#[test]
fn what_goes_wrong_names_its_samples_and_loses_nothing() {
    let scene = scene();
    let whole = run(&scene, "train run.toml");
    assert!(whole.status.success(), "{whole:?}");
    let weights = |dir: &str| scene.bytes(&format!("{dir}/model/model.safetensors"));
    let of_group = "prompts.jsonl:";
    for (part, what, code, said) in [
        (
            "credit",
            "panics",
            101,
            "`credit` of algorithm `mine` in step 3 panicked: no such word; on the groups ",
        ),
        ("credit", "hangs", 1, "`credit` of algorithm `mine` in step 3, on the groups "),
        ("credit", "not finite", 101, "a weight is not finite; samples: "),
        ("credit", "shape", 101, "`weights` has "),
        (
            "loss",
            "panics",
            101,
            "`loss` of algorithm `mine` in step 3 panicked: no such word; on the samples ",
        ),
        ("loss", "hangs", 1, "`loss` of algorithm `mine` in step 3, on the samples "),
        ("loss", "not finite", 101, "the loss is not finite; samples: "),
        ("loss", "shape", 101, "`loss` of algorithm `mine` in step 3 panicked: "),
        ("reward", "panics", 101, "reward `own` panicked: no such word"),
        ("reward", "hangs", 1, "reward `own`, asked about the 3 samples of group "),
        ("reward", "not finite", 101, "reward `own` is not finite; samples: "),
        ("reward", "shape", 101, "reward `own`: sample 0 has 1 token scores for "),
    ] {
        scene.write("trouble", format!("{part} {what}"));
        let broken = run(&scene, "train run.toml --overwrite --set run.dir=broken");
        let told = String::from_utf8(broken.stderr).unwrap();
        assert_eq!(broken.status.code(), Some(code), "{part} {what}: {told}");
        let line = told.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        assert!(line.contains(said) && line.contains(of_group), "{part} {what}: {told}");
        assert_eq!(code == 1, line.contains("has not returned within 5 seconds"), "{line}");

        let steps = scene.read("broken/metrics.jsonl").matches("\"timing_s/step\"").count();
        assert_eq!(steps, 2, "{part} {what}: the log has every step before");
        std::fs::remove_file(scene.path("trouble")).unwrap();
        let resumed = run(&scene, "train run.toml --resume --set run.dir=broken");
        assert!(resumed.status.success(), "{resumed:?}");
        assert!(weights("broken") == weights("whole"), "{part} {what}: another run than one without trouble");
    }
}

#[test]
fn the_check_of_an_algorithm_ends_whatever_that_does() {
    let scene = scene();
    assert!(run(&scene, "check-algorithm run.toml").status.success());
    for (what, said) in [
        (
            "loss panics",
            "`loss` of algorithm `mine` in the check panicked: no such word; on the samples group 0#",
        ),
        ("loss not finite", "the loss is not finite; samples: group 0#"),
        ("loss hangs", "`loss` of algorithm `mine` in the check, on the samples group 0#"),
        ("credit hangs", "`credit` of algorithm `mine` in the check, on the groups group 0, "),
    ] {
        scene.write("trouble", what);
        let limit = "--set run.call_timeout_secs=2 --set algorithm.mine.from=0";
        let check = run(&scene, &format!("check-algorithm run.toml {limit}"));
        let told = String::from_utf8(check.stderr).unwrap();
        assert!(!check.status.success() && told.contains(said), "{what}: {told}");
    }
}
