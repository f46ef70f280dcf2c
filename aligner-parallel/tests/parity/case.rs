//! A model and batches, what one rank makes of them, and the comparison with what many make of them.

use std::sync::Arc;

use aligner_core::model::{CausalLm, LoraConfig, ModelConfig};
use aligner_core::ops::host::to_vec;
use aligner_core::optim::{AdamW, AdamWConfig, Optimizer};
use aligner_core::{
    Batch, Communicator, Device, Forward, Gradients, Group, LossOutput, Metrics, Needs, ParamSet, Policy,
    Reduce, Result, Sample, Tensor, constant,
};
use aligner_parallel::{Cut, Mesh, MeshAdamW, MeshComms, ParallelLm, PipelineSchedule, Solo, ThreadComm};

/// A mesh, and how the model is cut on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    mesh: [usize; 5],
    cut: Cut,
    /// Whether data-parallel ranks share out the optimizer's state.
    shared: bool,
    checkpointing: bool,
}

impl Layout {
    pub(crate) const fn new(mesh: [usize; 5]) -> Self {
        let cut = Cut {
            sequence: false,
            schedule: PipelineSchedule::OneForwardOneBackward,
            chunks: 1,
            share_parameters: false,
        };
        Self { mesh, cut, shared: false, checkpointing: false }
    }

    pub(crate) fn ranks(self) -> usize {
        self.mesh.iter().product()
    }

    pub(crate) const fn sequence(mut self) -> Self {
        self.cut.sequence = true;
        self
    }

    pub(crate) const fn schedule(mut self, schedule: PipelineSchedule, chunks: usize) -> Self {
        (self.cut.schedule, self.cut.chunks) = (schedule, chunks);
        self
    }

    pub(crate) const fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    pub(crate) const fn share_parameters(mut self) -> Self {
        self.cut.share_parameters = true;
        self
    }

    pub(crate) const fn checkpointing(mut self) -> Self {
        self.checkpointing = true;
        self
    }
}

/// A model, by what is special about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// A head of its own, no biases.
    Plain,
    /// The embedding is the head; every linear has a bias.
    TiedWithBiases,
    /// A scalar head.
    Scores,
    /// A low-rank adapter on every linear.
    Adapted,
    /// Four experts in each layer, of which a token has two.
    Mixture,
    /// Eight layers.
    Deep,
}

/// What a layout makes of a case.
pub(crate) struct Outcome {
    /// The loss over all micro-batches.
    loss: f64,
    norm: f64,
    /// Of the whole model's parameters, in order.
    gradients: Vec<(String, Vec<f32>)>,
    /// The first micro-batch's values, before the steps.
    values: Vec<f32>,
    /// The losses of ten steps.
    losses: Vec<f64>,
    /// After ten steps.
    params: Vec<Vec<f32>>,
    metric: f64,
}

const STEPS: usize = 10;
const LEARNING_RATE: f64 = 1e-5;

impl Case {
    pub(crate) const ALL: [Self; 5] =
        [Self::Plain, Self::TiedWithBiases, Self::Scores, Self::Adapted, Self::Mixture];

    pub(crate) fn model(self) -> CausalLm {
        let biases = self == Self::TiedWithBiases;
        let mut json = serde_json::json!({
            "model_type": "llama", "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": biases, "attention_bias": biases, "mlp_bias": biases,
        });
        if self == Self::Deep {
            json["num_hidden_layers"] = 8.into();
        }
        if self == Self::Mixture {
            json["model_type"] = "mixtral".into();
            json["num_local_experts"] = 4.into();
            json["num_experts_per_tok"] = 2.into();
            let json = json.as_object_mut().unwrap();
            json.retain(|key, _| !key.ends_with("_bias"));
        }
        let config = ModelConfig::from_json("parity".as_ref(), &json).unwrap();
        let model = CausalLm::init(config, 7, &Device::flex()).unwrap();
        let model = grown(model);
        match self {
            Self::Plain | Self::TiedWithBiases | Self::Mixture | Self::Deep => model,
            Self::Scores => model.with_score_head(2, 3).unwrap(),
            Self::Adapted => {
                let lora = LoraConfig { r: 4, ..LoraConfig::default() };
                grown(model.with_adapter(lora, 5).unwrap())
            }
        }
    }

    fn needs(self) -> Needs {
        if self == Self::Scores { Needs::SCORES | Needs::VALUES } else { Needs::ENTROPY }
    }

    /// A loss that every output has a part in, with other weights for each target.
    fn loss(self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let weights = |len: usize, factor: f32| -> Vec<f32> {
            (0..len).map(|i| factor * (1.0 + ((i * 7 + batch.tokens[0] as usize) % 5) as f32)).collect()
        };
        let targets = batch.targets.len();
        let mut metrics = Metrics::default();
        let sum = if self == Self::Scores {
            let scores = out.scores()?.clone();
            let sequences = batch.sequences.len();
            let flat = scores.reshape([sequences * 2]);
            let values = out.values()?;
            (flat.clone() * constant(&weights(2 * sequences, 0.3), &flat)).sum()
                + (values.clone() * constant(&weights(targets, 0.05), values)).sum()
        } else {
            let (logps, entropy) = (out.logps()?, out.entropy()?);
            (logps.clone() * constant(&weights(targets, -0.1), logps)).sum()
                + (entropy.clone() * constant(&weights(targets, 0.02), entropy)).sum()
        };
        metrics.add("accuracy", targets as f64, 1.0);
        Ok(LossOutput { sum, metrics })
    }

    /// Compares a layout of threads with one rank.
    pub(crate) fn check_on_threads(self, layout: Layout, expected: &Outcome) {
        let results = ThreadComm::run(layout.ranks(), |comm| self.outcome(layout, Arc::new(comm)));
        for (rank, outcome) in results.into_iter().enumerate() {
            let what = format!("{self:?} on {layout:?}, rank {rank}");
            match outcome {
                Ok(outcome) => outcome.compare(expected, &what),
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }

    pub(crate) fn on_one(self) -> Outcome {
        self.outcome(Layout::new([1; 5]), Arc::new(Solo)).unwrap()
    }

    /// What this rank gets.
    pub(crate) fn outcome(self, layout: Layout, comm: Arc<dyn Communicator>) -> Result<Outcome> {
        let comms = MeshComms::new(Mesh::new(layout.mesh)?, comm)?;
        let mut model = self.model();
        model.set_gradient_checkpointing(layout.checkpointing);
        let mut policy = ParallelLm::new(&model, &comms, layout.cut)?;
        drop(model);
        // Data-parallel ranks take every n-th micro-batch.
        let batches = comms.batches();
        let micro: Vec<Batch> =
            Self::batches().into_iter().skip(batches.rank()).step_by(batches.size()).collect();
        let needs = self.needs();
        let first = &Self::batches()[0];
        let out = policy.forward(first, needs)?;
        let columns =
            [out.logps, out.entropy, out.values, out.scores.map(|s| s.reshape([2 * first.sequences.len()]))];
        let values = columns.into_iter().flatten().flat_map(|column| to_vec(&column)).collect();

        let adamw = AdamW::new(AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() })?;
        let mut optimizer = MeshAdamW::new(&policy, adamw, layout.shared)?;
        let mut outcome = Outcome {
            loss: 0.0,
            norm: 0.0,
            gradients: Vec::new(),
            values,
            losses: Vec::new(),
            params: Vec::new(),
            metric: 0.0,
        };
        for step in 0..STEPS {
            let mut gradients = policy.accumulate(&micro, needs, &|out, batch| self.loss(out, batch))?;
            let mut loss = [gradients.loss_sum];
            comms.batches().all_reduce_host(&mut loss, Reduce::Sum, aligner_core::Phase::new("test"))?;
            outcome.losses.push(loss[0]);
            if step == 0 {
                outcome.loss = loss[0];
                outcome.metric = gradients.metrics.get("accuracy").unwrap_or(f64::NAN);
                outcome.gradients = Self::whole_gradients(&policy, &gradients, layout)?;
            }
            let norm = optimizer.sum(policy.params(), &mut gradients.values)?;
            if step == 0 {
                outcome.norm = norm;
            }
            optimizer.step(policy.params_mut(), &gradients.values, LEARNING_RATE, 1.0)?;
        }
        outcome.params = policy.whole()?.iter().map(|param| to_vec(&param.value)).collect();
        Ok(outcome)
    }

    /// The gradients of the whole model's parameters, summed over the data-parallel ranks.
    fn whole_gradients(
        policy: &ParallelLm,
        gradients: &Gradients,
        layout: Layout,
    ) -> Result<Vec<(String, Vec<f32>)>> {
        let mut own = ParamSet::default();
        for (param, gradient) in policy.params().iter().zip(&gradients.values) {
            let zeros = || Tensor::zeros([param.elements()], &Device::flex());
            let mut gradient = gradient.clone().unwrap_or_else(zeros);
            // Those of parameters that are shared out are sums already.
            if !layout.cut.share_parameters {
                let comms = policy.pieces().comms();
                let is_expert = param.name.contains(".experts.");
                let ranks = if is_expert { comms.expert_gradients() } else { comms.gradients() };
                gradient = ranks.all_reduce(gradient, Reduce::Sum, aligner_core::Phase::new("test"))?;
            }
            own.insert(param.name.as_str(), &param.shape, gradient)?;
        }
        let whole = policy.with_params(own).whole()?;
        Ok(whole.iter().map(|param| (param.name.clone(), to_vec(&param.value))).collect())
    }

    /// Five micro-batches of several groups: shared prompts, a lone sample, long and short ones.
    fn batches() -> Vec<Batch> {
        let tokens = |seed: u32, len: u32| (0..len).map(move |i| (seed * 11 + i * i * 5 + i * 3) % 37);
        let group = |seed: u32, prompt: u32, answers: &[u32]| Group {
            id: format!("g{seed}"),
            samples: (answers.iter().enumerate())
                .map(|(at, &len)| {
                    let prompt: Vec<u32> = tokens(seed, prompt).collect();
                    let answer: Vec<u32> = tokens(seed + at as u32 + 1, len).collect();
                    Sample::response(&prompt, &answer)
                })
                .collect(),
            ..Group::default()
        };
        [
            vec![group(1, 9, &[5, 3, 8]), group(2, 2, &[4])],
            vec![group(3, 17, &[6, 6])],
            vec![group(4, 1, &[3, 1]), group(5, 6, &[2, 7, 1]), group(6, 3, &[9])],
            vec![group(7, 12, &[11])],
            vec![group(8, 4, &[6, 2])],
        ]
        .iter()
        .map(|groups| Batch::collate(groups).unwrap())
        .collect()
    }
}

/// Larger trained weights than a fresh model's, so that every part of it matters; norms and biases that differ.
fn grown(mut model: CausalLm) -> CausalLm {
    for (at, param) in model.params_mut().iter_mut().enumerate().filter(|(_, param)| param.trainable) {
        let elements = param.elements();
        let values: Vec<f32> = to_vec(&param.value)
            .into_iter()
            .enumerate()
            .map(|(i, value)| {
                let wave = ((i * 37 + at * 11) % 101) as f32 / 101.0 - 0.5;
                value * 2.5 + 0.1 * wave * if param.shape.len() == 1 { 1.0 } else { 0.5 }
            })
            .collect();
        assert_eq!(values.len(), elements);
        param.value = Tensor::from_floats(values.as_slice(), &Device::flex());
    }
    model
}

impl Outcome {
    pub(crate) fn compare(&self, expected: &Self, what: &str) {
        let relative = |a: f64, b: f64| (a - b).abs() / b.abs().max(1e-9);
        assert!(relative(self.loss, expected.loss) < 1e-5, "{what}: loss {} {}", self.loss, expected.loss);
        assert!(relative(self.norm, expected.norm) < 1e-5, "{what}: norm {} {}", self.norm, expected.norm);
        assert!(self.metric > 0.0, "{what}: no metric");
        close(&self.values, &expected.values, 1e-5, &format!("{what}: values"));
        assert_eq!(self.gradients.len(), expected.gradients.len());
        for ((name, own), (expected_name, expected)) in self.gradients.iter().zip(&expected.gradients) {
            assert_eq!(name, expected_name);
            close(own, expected, 1e-5, &format!("{what}: gradient of {name}"));
        }
        for (step, (own, expected)) in self.losses.iter().zip(&expected.losses).enumerate() {
            assert!(relative(*own, *expected) < 1e-4, "{what}: step {step}: {own} {expected}");
        }
        for ((own, expected), (name, _)) in self.params.iter().zip(&expected.params).zip(&self.gradients) {
            let error = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(
                error < 1e-4 && own.len() == expected.len(),
                "{what}: {name} after {STEPS} steps: {error}"
            );
        }
    }
}

/// Within `bound` of the largest magnitude.
fn close(own: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(own.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let error = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(error <= bound * largest, "{what}: off by {error}, largest {largest}");
}
