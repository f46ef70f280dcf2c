//! Ranks that draw together draw what one rank draws, and learn what it learns.

#[path = "../../../aligner-parallel/tests/faults/watched.rs"]
mod watched;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aligner_algos::{
    Crew, Critic, Learner, LearnerConfig, Online, OnlineParts, Ppo, PpoConfig, Reference, RolloutConfig,
    TrainingRanks, ValueLoss, ValueLossConfig,
};
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::ops::host::to_vec;
use aligner_core::optim::{AdamW, Schedule};
use aligner_core::{
    Batch, Communicator, Device, Error, Group, Needs, ParamSet, Phase, Policy, Prompt, Result, Sample, Score,
};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};
use aligner_parallel::balance::Split;
use aligner_parallel::{Cut, Mesh, MeshAdamW, MeshComms, ParallelLm, PipelineSchedule, ThreadComm};
use serde_json::{Value, json};
use watched::{Fault, Planned, Watched};

use crate::learning::{NoText, single};

const STEPS: usize = 4;
const PROMPTS: usize = 6;

/// What a run was like.
#[derive(Default)]
struct Course {
    /// By step: the groups that all ranks learned from, in the order of their prompts.
    groups: Vec<Vec<Group>>,
    /// By step: the whole policy after it.
    params: Vec<ParamSet>,
    reward: Vec<f64>,
    /// By step: the part of the groups that were learned from.
    kept: Vec<f64>,
    idle: Option<f64>,
}

fn model(labels: Option<usize>) -> CausalLm {
    let config = json!({
        "model_type": "llama", "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": labels.is_none(),
    });
    let config = ModelConfig::from_json("tiny".as_ref(), &config).unwrap();
    let model = CausalLm::init(config, 11, &Device::flex()).unwrap();
    labels.map_or(model.clone(), |labels| model.with_score_head(labels, 12).unwrap())
}

/// A response ends with token 9, so lengths differ; its worth is the part of its tokens below 12.
fn worth(sample: &Sample) -> Score {
    let response = &sample.tokens[sample.prompt_len()..];
    let low = response.iter().filter(|&&token| token < 12).count();
    Score::Sample(low as f32 / response.len().max(1) as f32)
}

/// What one token decides, so that the samples of a group are often worth the same.
fn last(sample: &Sample) -> Score {
    Score::Sample(sample.tokens.last().map_or(0.0, |&token| f32::from(u8::from(token < 12))))
}

/// Twelve prompts, again and again.
fn source() -> impl FnMut(usize) -> Result<Vec<Prompt>> + Send {
    let mut all = (0..12).cycle().map(|at: u32| {
        let tokens = (0..=at % 6).map(|place| (7 * place + at) % 24).collect();
        Prompt { id: format!("p{at}"), tokens, metadata: Value::Null }
    });
    move |count| Ok(all.by_ref().take(count).collect())
}

/// What is drawn how, and what it is worth.
#[derive(Clone)]
struct Draws {
    config: RolloutConfig,
    worth: fn(&Sample) -> Score,
}

fn draws() -> Draws {
    Draws { config: config(), worth }
}

fn config() -> RolloutConfig {
    RolloutConfig {
        num_generations: 3,
        max_completion_length: 40,
        num_iterations: 2,
        num_minibatches: 1,
        ..RolloutConfig::default()
    }
}

fn parts(policy: &CausalLm, critic: Learner, worth: fn(&Sample) -> Score) -> OnlineParts {
    // Room for two prompts at a time: who is done takes the next one.
    let engine =
        EngineConfig { cache: CacheSize::Tokens(1 << 13), max_running: 6, ..EngineConfig::default() };
    OnlineParts {
        engine: Box::new(PagedEngine::new(policy.clone(), engine).unwrap()),
        rewards: single("low", worth),
        score_log: None,
        text: Arc::new(NoText),
        stop_tokens: vec![9],
        reference: Some(Reference::live(Box::new(policy.clone()), 4096)),
        critic: Some(Critic::new(critic, ValueLoss::new(ValueLossConfig::default()).unwrap())),
        watch: Box::new(|_, _, _| {}),
        crew: None,
    }
}

fn learns() -> LearnerConfig {
    LearnerConfig { learning_rate: 1e-3, schedule: Schedule::Constant, ..LearnerConfig::default() }
}

/// Four steps of PPO; `online` and `learner` are one rank's.
fn course(mut online: Online, mut learner: Learner) -> Result<Course> {
    let ppo = Ppo::new(PpoConfig::default()).unwrap();
    let mut course = Course::default();
    let mut prompts = source();
    for _ in 0..STEPS {
        let iteration = online.step(&ppo, &mut learner, PROMPTS, &mut prompts)?;
        let mut groups = online.of_all_ranks(iteration.groups)?;
        groups.sort_by(|a, b| a.id.cmp(&b.id));
        course.groups.push(groups);
        course.params.push(learner.policy().whole()?);
        course.reward.push(iteration.metrics.get("rewards/low/mean").unwrap());
        course.kept.push(iteration.metrics.get("frac_groups_kept").unwrap());
        course.idle = iteration.metrics.get("sampling/idle");
    }
    Ok(course)
}

fn alone(draws: Draws) -> Course {
    let policy = model(None);
    let learner = |model: CausalLm| {
        Learner::new(Box::new(model), learns(), 1000, Arc::new(aligner_parallel::Solo)).unwrap()
    };
    let parts = parts(&policy, learner(model(Some(1))), draws.worth);
    course(Online::new(draws.config, parts, 7).unwrap(), learner(policy)).unwrap()
}

/// Of each rank, whose communicator `watch` may change.
fn on_mesh(
    mesh: [usize; 5],
    split: Split,
    draws: &Draws,
    watch: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Sync,
) -> Vec<Result<Course>> {
    let mesh = Mesh::new(mesh).unwrap();
    let cut = Cut { schedule: PipelineSchedule::OneForwardOneBackward, chunks: 1, ..Cut::default() };
    ThreadComm::run(mesh.size(), |comm| {
        let all = watch(Arc::new(comm));
        let comms = MeshComms::new(mesh, all.clone())?;
        let learner = |model: &CausalLm| {
            let policy = ParallelLm::new(model, &comms, cut)?;
            let optimizer = MeshAdamW::new(&policy, AdamW::new(learns().adamw())?, true)?;
            let ranks = TrainingRanks { all: all.clone(), batches: comms.batches().clone() };
            Learner::on_ranks(Box::new(policy), learns(), 1000, ranks, Box::new(optimizer))
        };
        let policy = model(None);
        let mut parts = parts(&policy, learner(&model(Some(1)))?, draws.worth);
        // A rank's pace is its own.
        let pause = Duration::from_micros(300 * all.rank() as u64);
        parts.watch = Box::new(move |_, _, _| std::thread::sleep(pause));
        parts.crew = Some(Crew::new(all.clone(), comms.batches().clone(), split));
        let course = course(Online::new(draws.config.clone(), parts, 7)?, learner(&policy)?)?;
        all.barrier(Phase::new("test"))?;
        Ok(course)
    })
}

/// Log-probabilities of a group's targets under a policy with `params`.
fn logps(params: &ParamSet, group: &Group) -> Vec<f32> {
    let mut model = model(None);
    *model.params_mut() = params.clone();
    let batch = Batch::collate([group]).unwrap();
    to_vec(model.forward(&batch, Needs::NOTHING).unwrap().logps().unwrap())
}

/// What groups hold that does not hang on who drew them.
fn samples(groups: &[Group]) -> Vec<(&str, Vec<Drawn<'_>>)> {
    groups.iter().map(|group| (group.id.as_str(), group.samples.iter().map(drawn).collect())).collect()
}

type Drawn<'a> = (&'a [u32], Option<f32>, &'a [u64]);

fn drawn(sample: &Sample) -> Drawn<'_> {
    (&sample.tokens, sample.reward, &sample.versions)
}

#[test]
fn groups_of_equal_rewards_are_replaced_on_all_ranks_alike() {
    let draws =
        Draws { config: RolloutConfig { dynamic_sampling: true, max_rounds: 2, ..config() }, worth: last };
    let one = alone(draws.clone());
    assert!(one.kept[0] < 1.0 && !one.groups[0].is_empty(), "{:?}", one.kept);
    for mesh in [[1, 1, 1, 2, 1], [1, 1, 1, 3, 1], [2, 1, 1, 2, 1]] {
        for own in on_mesh(mesh, Split::Stealing, &draws, |comm| comm) {
            let own = own.unwrap();
            assert_eq!(samples(&own.groups[0]), samples(&one.groups[0]), "{mesh:?}");
            assert!((own.kept[0] - one.kept[0]).abs() < 1e-9, "{mesh:?}: {:?} {:?}", own.kept, one.kept);
        }
    }
}

#[test]
fn ranks_that_draw_together_draw_and_learn_as_one() {
    let one = alone(draws());
    let mut courses = Vec::new();
    for (mesh, split) in [
        ([1, 1, 1, 3, 1], Split::Stealing),
        ([2, 1, 1, 2, 1], Split::Stealing),
        ([2, 1, 1, 2, 1], Split::Static),
        ([1, 1, 1, 2, 2], Split::Stealing),
        ([1, 2, 1, 1, 2], Split::Stealing),
    ] {
        let ranks: Vec<Course> =
            on_mesh(mesh, split, &draws(), |comm| comm).into_iter().map(Result::unwrap).collect();
        for own in &ranks {
            assert_eq!(
                samples(&own.groups[0]),
                samples(&one.groups[0]),
                "{mesh:?}: samples and rewards of the first step"
            );
            assert!((own.reward[0] - one.reward[0]).abs() < 1e-6, "{mesh:?}: {:?}", own.reward);
            assert!(own.idle.is_some_and(|idle| (0.0..1.0).contains(&idle)), "{mesh:?}: {:?}", own.idle);
            let mut farthest = 0.0_f32;
            for step in 1..STEPS {
                for group in &one.groups[step] {
                    let now = logps(&own.params[step - 1], group);
                    let then = logps(&one.params[step - 1], group);
                    let before = logps(&one.params[0], group);
                    let far = |a: &[f32], b: &[f32]| {
                        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
                    };
                    farthest = farthest.max(far(&now, &then));
                    assert!(step == 1 || far(&then, &before) > 1e-2, "the policy hardly moves");
                }
            }
            assert!(
                farthest < 1e-3,
                "{mesh:?}, {split:?}: log-probabilities of one rank's samples are {farthest} off"
            );
        }
        courses.push(ranks);
    }
    // Who draws changes no bit.
    let bits = |course: &Course| -> Vec<Vec<f32>> {
        course.params[STEPS - 1].iter().map(|param| to_vec(&param.value)).collect()
    };
    assert_eq!(bits(&courses[1][0]), bits(&courses[2][0]));
}

/// Long beside any wait of a run that goes well, and short enough to wait for.
const DEADLINE: Duration = Duration::from_secs(3);
const CULPRIT: usize = 1;
/// The phases around learning.
const ROLLOUT: [&str; 3] =
    ["asking for the next prompt", "samples of all ranks", "parameters on their way to the engine"];

/// A run of which one rank does what is planned, and the phases of that one.
fn with_fault(mesh: [usize; 5], planned: Option<Planned>) -> (Vec<Result<Course>>, Vec<&'static str>) {
    let culprit = Mutex::new(None);
    let results = on_mesh(mesh, Split::Stealing, &draws(), |comm| {
        let is_culprit = comm.rank() == CULPRIT;
        let watched = Arc::new(Watched::new(comm, DEADLINE, planned.filter(|_| is_culprit)));
        if is_culprit {
            *culprit.lock().unwrap() = Some(watched.clone());
        }
        watched
    });
    let phases = culprit.lock().unwrap().as_ref().map(|watched| watched.phases());
    (results, phases.unwrap_or_default())
}

#[test]
fn a_rank_that_fails_while_samples_are_drawn_learned_from_and_handed_on_is_named() {
    let mut seen = Vec::new();
    for mesh in [[2, 1, 1, 2, 1], [1, 1, 1, 2, 2]] {
        let (results, phases) = with_fault(mesh, None);
        assert!(results.iter().all(Result::is_ok));
        for phase in phases.into_iter().filter(|phase| *phase != "test") {
            if seen.contains(&phase) {
                continue;
            }
            seen.push(phase);
            // The suite of `aligner-parallel` waits in the phases of learning.
            let faults = [Fault::Panic, Fault::Other, Fault::Late];
            let faults = if ROLLOUT.contains(&phase) { &faults[..] } else { &faults[..2] };
            for &fault in faults {
                let began = Instant::now();
                let (results, _) = with_fault(mesh, Some(Planned { fault, phase }));
                let took = began.elapsed();
                assert!(took < DEADLINE + Duration::from_secs(5), "{fault:?} in {phase}: {took:?}");
                for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
                    let what = format!("{fault:?} in {phase}, rank {rank} of {mesh:?}");
                    let error = match result {
                        Err(Error::Collective(error)) => error,
                        Err(error) => panic!("{what}: {error}"),
                        Ok(_) => panic!("{what}: it went well"),
                    };
                    assert!(error.culprits.contains(&CULPRIT), "{what}: {error}");
                    assert!(error.culprits.len() <= 2, "{what}: {error}");
                }
            }
        }
    }
    assert!(ROLLOUT.iter().all(|phase| seen.contains(phase)), "{seen:?}");
}

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let solo: Arc<dyn Communicator> = Arc::new(aligner_parallel::Solo);
    let learner = |model: CausalLm| Learner::new(Box::new(model), learns(), 10, solo.clone()).unwrap();
    let mut parts = parts(&model(None), learner(model(Some(1))), worth);
    parts.crew = Some(Crew::new(solo.clone(), solo.clone(), Split::Static));
    let config = RolloutConfig { max_staleness: 1, ..config() };
    let message = Online::new(config, parts, 1).err().unwrap().to_string();
    assert!(message.contains("max_staleness") && message.contains("several ranks"), "{message}");
}
