//! Parameters come over whole, by the fewest bytes, and no more memory than planned.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aligner_core::model::{CausalLm, LoraConfig, ModelConfig, Splits};
use aligner_core::ops::host::to_vec;
use aligner_core::{Communicator, Device, ParamSet, Phase, Policy, Reduce, Result, Tensor};
use serde_json::json;

use super::{Layout, Reshard, Traffic};
use crate::cut::cut;
use crate::{Cut, Mesh, MeshComms, ParallelLm, PipelineSchedule, ThreadComm};

type Whole = Vec<(String, Vec<usize>)>;

/// A communicator that counts what goes to other ranks, and the most in one exchange.
struct Counting {
    inner: Arc<ThreadComm>,
    sent: AtomicUsize,
    largest: AtomicUsize,
}

impl Counting {
    fn new(inner: Arc<ThreadComm>) -> Self {
        Self { inner, sent: AtomicUsize::new(0), largest: AtomicUsize::new(0) }
    }
}

impl Communicator for Counting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        let size = |parts: &[Tensor<1>]| {
            let others = parts.iter().enumerate().filter(|(rank, _)| *rank != self.rank());
            others.map(|(_, part)| 4 * part.dims()[0]).sum::<usize>()
        };
        let sent = size(&parts);
        let came = self.inner.all_to_all(parts, phase)?;
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.largest.fetch_max(sent + size(&came), Ordering::Relaxed);
        Ok(came)
    }
    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>> {
        self.inner.all_reduce(values, op, phase)
    }
    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()> {
        self.inner.all_reduce_host(values, op, phase)
    }
    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        self.inner.all_gather(values, phase)
    }
    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        self.inner.reduce_scatter(values, phase)
    }
    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>> {
        self.inner.broadcast(values, root, phase)
    }
    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()> {
        self.inner.send(values, to, phase)
    }
    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>> {
        self.inner.recv(elements, from, phase)
    }
    fn split(&self, color: usize, key: usize, phase: Phase) -> Result<Arc<dyn Communicator>> {
        self.inner.split(color, key, phase)
    }
}

fn model(model_type: &str) -> CausalLm {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": model_type == "llama", "pad_token_id": 0,
    });
    if model_type == "mixtral" {
        config["num_local_experts"] = 4.into();
        config["num_experts_per_tok"] = 2.into();
        config.as_object_mut().unwrap().remove("head_dim");
    }
    if model_type == "phi3" {
        config.as_object_mut().unwrap().remove("head_dim");
    }
    let config = ModelConfig::from_json("tiny".as_ref(), &config).unwrap();
    CausalLm::init(config, 5, &Device::flex()).unwrap()
}

fn whole(model: &CausalLm) -> Whole {
    model.params().iter().map(|param| (param.name.clone(), param.shape.clone())).collect()
}

fn how(chunks: usize, share_parameters: bool) -> Cut {
    let schedule = match chunks {
        1 => PipelineSchedule::OneForwardOneBackward,
        _ => PipelineSchedule::Interleaved,
    };
    Cut { sequence: false, schedule, chunks, share_parameters }
}

/// Trains on `mesh`, generates over `tensor` ranks each; what travelled in buckets of `bucket` bytes.
fn carried(model: &CausalLm, mesh: [usize; 5], how: Cut, tensor: usize, bucket: usize) -> Traffic {
    let mesh = Mesh::new(mesh).unwrap();
    let (params, config, ranks) = (whole(model), model.config().clone(), mesh.size());
    let splits = Splits::new(&config);
    let results = ThreadComm::run(ranks, |comm| {
        let comm = Arc::new(comm);
        let comms = MeshComms::new(mesh, comm.clone())?;
        let own = ParallelLm::new(model, &comms, how)?.params().clone();
        let from = Layout::training(&params, &config, mesh, how)?;
        let to = Layout::replicas(&params, &config, ranks, tensor)?;
        let plan = Reshard::new(from, to, bucket)?;
        let counting = Counting::new(comm);
        let new = plan.carry(&counting, &own)?;
        let names: Vec<&str> = params.iter().map(|(name, _)| name.as_str()).collect();
        let expected = cut(model.params(), &names, &splits, counting.rank() % tensor, tensor)?;
        same(&new, &expected);
        let traffic = plan.traffic();
        let extra = counting.largest.load(Ordering::Relaxed);
        assert!(extra <= traffic.extra, "{extra} bytes in a bucket, planned {}", traffic.extra);
        Ok((counting.sent.load(Ordering::Relaxed), traffic))
    });
    let results: Vec<(usize, Traffic)> = results.into_iter().map(Result::unwrap).collect();
    let traffic = results[0].1;
    assert_eq!(results.iter().map(|(sent, _)| sent).sum::<usize>(), traffic.bytes, "{mesh}");
    assert_eq!(results.iter().map(|(sent, _)| *sent).max(), Some(traffic.most_sent), "{mesh}");
    assert!(traffic.bytes <= traffic.least + traffic.least / 10, "{mesh}: {traffic:?}");
    traffic
}

fn same(new: &ParamSet, expected: &ParamSet) {
    assert_eq!(new.len(), expected.len());
    for (new, expected) in new.iter().zip(expected.iter()) {
        assert_eq!((&new.name, &new.shape), (&expected.name, &expected.shape));
        assert_eq!(to_vec(&new.value), to_vec(&expected.value), "{}", new.name);
    }
}

#[test]
fn every_layout_becomes_replicas_by_the_fewest_bytes() {
    let mut llama = model("llama");
    llama = llama.with_adapter(LoraConfig::default(), 3).unwrap();
    let phi3 = model("phi3");
    for model in [&llama, &phi3] {
        for (mesh, how) in [
            ([1, 1, 1, 2, 1], how(1, false)),
            ([2, 1, 1, 1, 1], how(1, false)),
            ([4, 1, 1, 1, 1], how(1, false)),
            ([1, 1, 1, 1, 4], how(1, false)),
            ([1, 1, 1, 1, 2], how(2, false)),
            ([2, 1, 1, 1, 2], how(1, false)),
            ([2, 1, 1, 2, 2], how(1, false)),
            ([1, 2, 1, 2, 1], how(1, true)),
            ([2, 1, 1, 3, 1], how(1, true)),
        ] {
            let ranks: usize = mesh.iter().product();
            for tensor in [1, 2, 4].into_iter().filter(|tensor| ranks.is_multiple_of(*tensor)) {
                for bucket in [64, 5000, 1 << 20] {
                    carried(model, mesh, how, tensor, bucket);
                }
            }
        }
    }
}

#[test]
fn experts_come_back_from_their_ranks() {
    let mixture = model("mixtral");
    for (mesh, tensor) in
        [([1, 1, 2, 1, 1], 1), ([1, 1, 4, 1, 1], 2), ([2, 1, 2, 1, 1], 1), ([1, 1, 2, 2, 1], 2)]
    {
        let traffic = carried(&mixture, mesh, how(1, false), tensor, 4096);
        assert!(traffic.bytes > 0);
    }
}

#[test]
fn buckets_bound_the_memory_and_replicas_send_alike() {
    let model = model("llama");
    let traffic = carried(&model, [2, 1, 1, 2, 2], how(1, false), 1, 4096);
    // A bucket that goes and one that comes.
    assert!(traffic.extra <= 2 * 4096, "{traffic:?}");
    assert!(traffic.buckets > 10);
    // Every rank sends about as much as any other.
    assert!(traffic.most_sent * 8 <= traffic.bytes * 3 / 2, "{traffic:?}");
    // Nothing moves where every rank has what it needs.
    let alike = carried(&model, [1, 1, 1, 4, 1], how(1, false), 1, 4096);
    assert_eq!((alike.bytes, alike.least, alike.buckets), (0, 0, 0));
}

#[test]
fn what_does_not_fit_is_named() {
    let model = model("llama");
    let (params, config) = (whole(&model), model.config());
    let training = |mesh| Layout::training(&params, config, Mesh::new(mesh).unwrap(), how(1, false)).unwrap();
    let replicas = |ranks, tensor| Layout::replicas(&params, config, ranks, tensor);
    assert!(replicas(4, 3).unwrap_err().to_string().contains("do not divide 4"));
    let other = Reshard::new(training([2, 1, 1, 1, 1]), replicas(4, 1).unwrap(), 64).unwrap_err();
    assert!(other.to_string().contains("on other ranks"), "{other}");
    let plan = Reshard::new(training([2, 1, 1, 1, 1]), replicas(2, 1).unwrap(), 64).unwrap();
    let alone = plan.carry(&crate::Solo, model.params()).unwrap_err().to_string();
    assert_eq!(alone, "a plan for 2 ranks on 1");
    let results = ThreadComm::run(2, |comm| plan.carry(&comm, model.params()).map(|_| ()));
    let message = results[0].as_ref().unwrap_err().to_string();
    assert!(message.contains("holds another part of"), "{message}");
}
