//! Each kernel at the sizes of real models, against the host's.

use std::time::Instant;

use aligner_core::Result;
use aligner_core::Sampling;
use aligner_core::ops::cube::{
    self, Accelerator, Buffer, DrawSettings, KvPages, Matrix, Qkv, RowNorm, Tiles, draw_rows, gate_rows,
    norm_rows, paged_attention, rotate_and_write,
};
use aligner_core::ops::rows::{self, F32, PAGE, PagedKv, Product, Span, Weight, page_elements, write_kv};
use aligner_core::ops::{Activation, AttentionShape};
use aligner_core::rng::Rng;
use aligner_infer::{Distribution, Row, Sampler, Seen};
use serde_json::json;

/// Seeded values in (-1, 1).
fn values(len: usize, seed: u64) -> Vec<f32> {
    let rng = Rng::new(&[seed]);
    (0..len as u64).map(|at| (2.0 * rng.uniform(at) - 1.0) as f32).collect()
}

/// Largest difference relative to the largest magnitude.
fn error(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    let gaps = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let gap = gaps.map(|gap| if gap.is_finite() { gap } else { f32::INFINITY }).fold(0.0, f32::max);
    if got.len() == expected.len() { gap / largest } else { f32::INFINITY }
}

/// Whether the device is a processor, for which a real model's sizes are large.
fn is_slow(device: &Accelerator) -> bool {
    device.runtime() == "cpu"
}

/// Compares what `run` leaves with `expected`, and times it once it is compiled.
fn compare(
    device: &Accelerator,
    name: &str,
    expected: &[f32],
    run: impl Fn() -> Result<Buffer<f32>>,
) -> Result<bool> {
    let error = error(&device.read(&run()?)?, expected);
    let start = Instant::now();
    let repeats = if is_slow(device) { 1 } else { 20 };
    let mut last = run()?;
    for _ in 1..repeats {
        last = run()?;
    }
    device.read(&last)?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3 / f64::from(repeats);
    let ok = error < 1e-5;
    println!("{}", json!({"check": name, "relative_error": error, "ms": milliseconds, "ok": ok}));
    Ok(ok)
}

/// All kernels. Says whether each was within its bound.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(device: &Accelerator) -> Result<bool> {
    let mut ok = true;
    for (rows, inputs, outputs) in [(1, 2048, 2048), (7, 2048, 512), (32, 512, 2048)] {
        ok &= products(device, rows, inputs, outputs)?;
    }
    ok &= norm_and_gate(device, 9, 2048)?;
    for shape in [AttentionShape::new(32, 8, 64, 0.125), AttentionShape::new(8, 1, 128, 0.09)] {
        ok &= attention(device, shape)?;
    }
    Ok(ok & draws(device)?)
}

fn products(device: &Accelerator, rows: usize, inputs: usize, outputs: usize) -> Result<bool> {
    let (x, w) = (values(rows * inputs, 1), values(outputs * inputs, 2));
    let mut expected = vec![0.0; rows * outputs];
    let weight = Weight::F32(F32::new(&w, outputs, inputs));
    rows::products(&x, rows, [Product { weight, bias: None, out: &mut expected, add: false }]);
    let matrix = Matrix::F32(device.upload(&w), [outputs, inputs]);
    let x = device.upload(&x);
    compare(device, &format!("product {rows}x{inputs}x{outputs}"), &expected, || {
        let product = cube::Product { weight: &matrix, bias: None, add_to: None };
        Ok(cube::products(device, &x, &[product])?.swap_remove(0))
    })
}

fn norm_and_gate(device: &Accelerator, rows: usize, hidden: usize) -> Result<bool> {
    let (x, weight) = (values(rows * hidden, 1), values(hidden, 2));
    let mut normed = vec![0.0; x.len()];
    rows::norm_rows(&x, rows::RowNorm::Rms(&weight, 0.0), 1e-5, &mut normed);
    let mut gated = x.clone();
    rows::gate_rows(&mut gated, &normed, Activation::Silu);
    let (x, weight, up) = (device.upload(&x), device.upload(&weight), device.upload(&normed));
    let norm = compare(device, "norm", &normed, || norm_rows(device, &x, RowNorm::Rms(&weight, 0.0), 1e-5))?;
    Ok(norm & compare(device, "gate", &gated, || gate_rows(device, &x, &up, Activation::Silu))?)
}

/// Rotation, the writing of keys and values, and attention to many positions.
fn attention(device: &Accelerator, shape: AttentionShape) -> Result<bool> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
    let (columns, width) = (heads * head_dim, kv_heads * head_dim);
    let len = if is_slow(device) { 150 } else { 1000 };
    let [q, k, v] = [(columns, 1), (width, 2), (width, 3)].map(|(n, seed)| values(len * n, seed));
    let angles = values(len * head_dim / 2, 4);
    let cos: Vec<f32> = angles.iter().map(|angle| (angle * 3.0).cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|angle| (angle * 3.0).sin()).collect();
    let count = len.div_ceil(PAGE);
    let table: Vec<u32> = (0..count as u32).map(|page| (page * 5 + 3) % count as u32).collect();
    let slot = |at: usize| table[at / PAGE] * PAGE as u32 + (at % PAGE) as u32;
    let slots: Vec<u32> = (0..len).map(slot).collect();

    let (mut q_here, mut k_here) = (q.clone(), k.clone());
    rows::rotate_rows(&mut q_here, columns, &cos, &sin);
    rows::rotate_rows(&mut k_here, width, &cos, &sin);
    let mut keys = vec![0.0; count * page_elements(shape)];
    let mut stored = keys.clone();
    for (at, (k, v)) in k_here.chunks_exact(width).zip(v.chunks_exact(width)).enumerate() {
        write_kv(&mut keys, &mut stored, (table[at / PAGE], at % PAGE), k, v, shape);
    }
    let spans = [Span { rows: 0..len, position: 0, pages: 0..count }];
    let mut expected = vec![0.0; q.len()];
    let kv = PagedKv { keys: &keys, values: &stored };
    rows::paged_attention(&q_here, kv, (&spans, &table), shape, &mut expected);

    let pages = KvPages::new(device, count, shape);
    let [q, k, v] = [q, k, v].map(|rows| device.upload(&rows));
    let angles = device.upload(&[cos, sin].concat());
    let slots = device.upload(&slots);
    let qkv = Qkv { q: &q, k: &k, v: &v };
    let rotated = rotate_and_write(device, qkv, &angles, &slots, &pages, shape)?;
    let name = |what: &str| format!("{what} of {heads}/{kv_heads} heads of {head_dim}");
    let mut ok = compare(device, &name("rotation"), &q_here, || {
        rotate_and_write(device, qkv, &angles, &slots, &pages, shape)
    })?;
    let tiles = Tiles::new(device, (&spans, &table), shape)?;
    ok &= compare(device, &name("prefill attention"), &expected, || {
        paged_attention(device, &rotated, &pages, &tiles, shape)
    })?;
    let last = Span { rows: 0..1, position: len - 1, pages: 0..count };
    let tiles = Tiles::new(device, (&[last], &table), shape)?;
    let row = device.upload(&device.read(&rotated)?[(len - 1) * columns..]);
    let expected = &expected[(len - 1) * columns..];
    ok &= compare(device, &name("decode attention"), expected, || {
        paged_attention(device, &row, &pages, &tiles, shape)
    })?;
    Ok(ok)
}

/// Draws from a real vocabulary's number of logits against the host's sampler, for the same random numbers.
fn draws(device: &Accelerator) -> Result<bool> {
    let (vocab, count) = (128_256, if is_slow(device) { 4 } else { 16 });
    let logits: Vec<f32> = values(vocab * count, 7).into_iter().map(|value| value * 12.0).collect();
    let sampling = |row: usize| Sampling {
        temperature: if row == 0 { 0.0 } else { 0.5 + row as f32 * 0.05 },
        top_k: [0, 50, 0, 2000][row % 4],
        top_p: [1.0, 0.9, 0.95][row % 3],
        min_p: [0.0, 0.05][row % 2],
        ..Sampling::default()
    };
    let uniform = |row: usize| (row as f64 * 0.618_034).fract();
    let settings = |row: usize| {
        let Sampling { temperature, top_k, top_p, min_p, .. } = sampling(row);
        DrawSettings { temperature, top_k, top_p, min_p, uniform: uniform(row) }
    };
    let settings: Vec<DrawSettings> = (0..count).map(settings).collect();
    let there = device.upload(&logits);
    draw_rows(device, &there, &settings)?;
    let start = Instant::now();
    let got = draw_rows(device, &there, &settings)?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let (mut sampler, mut from) = (Sampler::new(), Distribution::default());
    let (mut same, mut largest) = (0, 0.0f32);
    for (row, (got, logits)) in got.iter().zip(logits.chunks_exact(vocab)).enumerate() {
        let sampling = sampling(row);
        let seen = Seen::new(&[], &sampling);
        sampler.distribution(&Row { logits, sampling: &sampling, seen: &seen, id: "draw" }, &mut from)?;
        let token = from.draw(uniform(row));
        let expected = sampler.describe(logits, &from, token, 0);
        if let Some(got) = got.filter(|got| got.token == token) {
            same += 1;
            largest =
                largest.max((got.logp - expected.logp).abs()).max((got.raw_logp - expected.raw_logp).abs());
        }
    }
    // A draw that falls on the border of two tokens, to within rounding, may go to either.
    let ok = same + 1 >= count && largest < 1e-4;
    println!(
        "{}",
        json!({"check": "draws", "same": same, "of": count, "largest_logp_gap": largest, "ms": milliseconds, "ok": ok})
    );
    Ok(ok)
}
