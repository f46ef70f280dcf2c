//! Each fused operation against the composition of Burn operations, forward and backward, at the
//! sizes of a 27 M model's step: 2048 tokens, hidden 512, 8 heads over 4, MLP 1376, vocabulary 4096.
//! Then the products alone, whose `Gelem/s` are GFLOP/s: those of a step, and those of generation.

use std::hint::black_box;
use std::sync::Arc;

use aligner_core::ops::rows::{F32, Product, Weight, products};
use aligner_core::ops::{self, AttentionShape, RotaryTable, reference};
use aligner_core::{Device, Segment, Tensor};
use burn::tensor::TensorData;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const TOKENS: usize = 2048;
const HIDDEN: usize = 512;
const MLP: usize = 1376;
const VOCAB: usize = 4096;
const SHAPE: AttentionShape = AttentionShape::new(8, 4, 64, 0.125);

/// A seeded autodiff leaf with values in (-0.5, 0.5).
fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    let rng = aligner_core::rng::Rng::new(&[seed]);
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len as u64).map(|i| rng.uniform(i) as f32 - 0.5).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).require_grad()
}

/// Times `fused` and `plain`, each followed by the backward pass of the output's sum.
fn pair<const D: usize>(
    criterion: &mut Criterion,
    name: &str,
    fused: impl Fn() -> Tensor<D>,
    plain: impl Fn() -> Tensor<D>,
) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10);
    group.bench_function("fused", |b| b.iter(|| black_box(fused().sum().backward())));
    group.bench_function("burn", |b| b.iter(|| black_box(plain().sum().backward())));
    group.finish();
}

fn all(criterion: &mut Criterion) {
    let x = leaf([TOKENS, HIDDEN], 1);
    let norm = leaf([HIDDEN], 2);
    pair(
        criterion,
        "rms_norm",
        || ops::rms_norm(x.clone(), norm.clone(), 1e-5).expect("shapes fit"),
        || reference::rms_norm(x.clone(), norm.clone(), 1e-5),
    );
    let (gate, up) = (leaf([TOKENS, MLP], 3), leaf([TOKENS, MLP], 4));
    pair(
        criterion,
        "swiglu",
        || ops::gated(gate.clone(), up.clone(), ops::Activation::Silu).expect("shapes fit"),
        || reference::gated(gate.clone(), Some(up.clone()), ops::Activation::Silu),
    );
    let positions: Vec<u32> = (0..TOKENS as u32).map(|i| i % 256).collect();
    let frequencies: Vec<f32> = (0..32).map(|i| 10_000f32.powf(-(i as f32) / 32.0)).collect();
    let table = RotaryTable::new(&positions, &frequencies, 1.0);
    pair(
        criterion,
        "rotary",
        || ops::rotary(x.clone(), &table).expect("shapes fit"),
        || reference::rotary(x.clone(), &table),
    );
    let weight = leaf([MLP, HIDDEN], 5);
    pair(
        criterion,
        "linear",
        || ops::linear(x.clone(), weight.clone(), None, None).expect("shapes fit"),
        || reference::linear(x.clone(), weight.clone(), None, None),
    );
    let (k, v) = (leaf([TOKENS, HIDDEN / 2], 6), leaf([TOKENS, HIDDEN / 2], 7));
    let segment = |at: usize| Segment { start: at * 256, len: 256, position: 0, parent: None };
    let segments: Arc<[Segment]> = (0..TOKENS / 256).map(segment).collect();
    pair(
        criterion,
        "attention",
        || ops::attention(x.clone(), k.clone(), v.clone(), &segments, SHAPE).expect("shapes fit"),
        || reference::attention(x.clone(), k.clone(), v.clone(), &segments, SHAPE),
    );
    let head = leaf([VOCAB, HIDDEN], 8);
    let rows: Vec<u32> = (0..TOKENS as u32).collect();
    let targets: Vec<u32> = rows.iter().map(|row| row * 7 % VOCAB as u32).collect();
    pair(
        criterion,
        "linear_cross_entropy",
        || ops::linear_cross_entropy(x.clone(), head.clone(), &rows, &targets).expect("shapes fit").logps,
        || reference::linear_cross_entropy(x.clone(), head.clone(), &rows, &targets, None).logps,
    );
    pair(
        criterion,
        "embedding",
        || ops::embedding(head.clone(), &targets).expect("ids fit"),
        || reference::embedding(head.clone(), &targets),
    );
}

/// The forward pass of a linear on a step's rows: the product in register tiles.
fn dense(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("dense");
    group.sample_size(20);
    for (inputs, outputs) in [(HIDDEN, MLP), (MLP, HIDDEN), (HIDDEN, HIDDEN)] {
        let (x, weight) = (leaf([TOKENS, inputs], 1).detach(), leaf([outputs, inputs], 2).detach());
        group.throughput(Throughput::Elements((2 * TOKENS * inputs * outputs) as u64));
        group.bench_function(format!("{TOKENS}x{inputs}x{outputs}"), |b| {
            b.iter(|| black_box(ops::linear(x.clone(), weight.clone(), None, None).expect("shapes fit")));
        });
    }
    group.finish();
}

/// Products of few rows with as many weights as a pass of the model reads, 99 MiB of them.
fn few_rows(criterion: &mut Criterion) {
    const WEIGHTS: usize = 37;
    let mut group = criterion.benchmark_group("few_rows");
    group.sample_size(20);
    let values = |len: usize| (0..len).map(|i| (i * 7919 % 1000) as f32 / 1000.0 - 0.5).collect::<Vec<f32>>();
    let weights: Vec<Vec<f32>> = (0..WEIGHTS).map(|_| values(MLP * HIDDEN)).collect();
    for rows in [1, 8, 32] {
        let (x, mut out) = (values(rows * HIDDEN), vec![0.0; rows * MLP]);
        group.throughput(Throughput::Elements((2 * WEIGHTS * rows * HIDDEN * MLP) as u64));
        group.bench_function(format!("{rows}x{HIDDEN}x{MLP}"), |b| {
            b.iter(|| {
                for weight in &weights {
                    let weight = Weight::F32(F32::new(weight, MLP, HIDDEN));
                    products(&x, rows, [Product { weight, bias: None, out: &mut out, add: false }]);
                }
                black_box(&mut out);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, all, dense, few_rows);
criterion_main!(benches);
