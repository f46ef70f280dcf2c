//! Draws against a plain sampler that sorts.

use super::{device, values};
use crate::ops::cube::{Draw, DrawSettings, draw_rows};

const PLAIN: DrawSettings = DrawSettings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.5 };

/// The same by sorting.
fn plain_draw(logits: &[f32], settings: &DrawSettings) -> Draw {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let raw_total: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let raw = |token: usize| (f64::from(logits[token] - largest) - raw_total.ln()) as f32;
    if settings.temperature == 0.0 {
        let token = logits.iter().position(|&logit| logit == largest).unwrap();
        return Draw { token: token as u32, logp: raw(token), raw_logp: raw(token) };
    }
    let weight = |token: usize| (f64::from(logits[token] - largest) / f64::from(settings.temperature)).exp();
    let mut kept: Vec<usize> = (0..logits.len()).filter(|&t| logits[t] > f32::NEG_INFINITY).collect();
    // Adding 0 makes a negative zero equal to zero.
    let rank = |token: usize| logits[token] + 0.0;
    kept.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)).then(a.cmp(&b)));
    if settings.top_k > 0 {
        kept.truncate(settings.top_k);
    }
    let mass = |kept: &[usize]| kept.iter().map(|&token| weight(token)).sum::<f64>();
    if settings.top_p < 1.0 {
        let target = f64::from(settings.top_p) * mass(&kept);
        let reached = (1..=kept.len()).find(|&count| mass(&kept[..count]) >= target);
        kept.truncate(reached.unwrap_or(kept.len()));
    }
    kept.retain(|&token| weight(token) >= f64::from(settings.min_p));
    kept.sort_unstable();
    let total = mass(&kept);
    let mut left = settings.uniform * total;
    let mut token = kept[kept.len() - 1];
    for &candidate in &kept {
        if left < weight(candidate) {
            token = candidate;
            break;
        }
        left -= weight(candidate);
    }
    Draw { token: token as u32, logp: (weight(token).ln() - total.ln()) as f32, raw_logp: raw(token) }
}

fn all_settings() -> Vec<DrawSettings> {
    let mut all = Vec::new();
    for (index, top_k) in [0, 1, 7, 40, 1000].into_iter().enumerate() {
        for (at, (top_p, min_p)) in [(1.0, 0.0), (0.6, 0.0), (1.0, 0.1), (0.9, 0.02)].into_iter().enumerate()
        {
            let uniform = (index as f64 * 0.618 + at as f64 * 0.271).fract();
            let temperature = [0.7, 1.0, 1.6][(index + at) % 3];
            all.push(DrawSettings { temperature, top_k, top_p, min_p, uniform });
        }
    }
    all.push(DrawSettings { temperature: 0.0, ..PLAIN });
    all.push(DrawSettings { uniform: 0.999_999_999, ..PLAIN });
    all.push(DrawSettings { uniform: 0.0, top_p: 1e-6, ..PLAIN });
    all
}

fn check(vocab: usize, row: impl Fn(u64) -> Vec<f32>) {
    let device = device();
    let settings = all_settings();
    let logits: Vec<f32> = (0..settings.len() as u64).flat_map(&row).collect();
    let got = draw_rows(&device, &device.upload(&logits), &settings).unwrap();
    for ((got, settings), logits) in got.iter().zip(&settings).zip(logits.chunks(vocab)) {
        let (got, expected) = (got.unwrap(), plain_draw(logits, settings));
        assert_eq!(got.token, expected.token, "{settings:?}");
        assert!((got.logp - expected.logp).abs() < 2e-5, "{settings:?}: {got:?} {expected:?}");
        assert!((got.raw_logp - expected.raw_logp).abs() < 2e-5, "{settings:?}: {got:?} {expected:?}");
    }
}

#[test]
fn draws_are_those_of_a_sampler_that_sorts() {
    check(301, |seed| values(301, 100 + seed).iter().map(|value| value * 8.0).collect());
}

#[test]
fn equal_logits_are_kept_from_the_lowest_id_up() {
    // Five distinct values, zeros of both signs among them.
    let level = |value: f32| if value < -0.9 { -0.0 } else { (value * 2.0).round() };
    check(97, |seed| values(97, 200 + seed).into_iter().map(level).collect());
}

#[test]
fn tokens_of_negative_infinity_are_never_drawn() {
    let masked = |(at, value): (usize, f32)| if at % 3 == 0 { f32::NEG_INFINITY } else { value * 3.0 };
    check(60, |seed| values(60, 300 + seed).into_iter().enumerate().map(masked).collect());
}

#[test]
fn a_row_that_is_not_finite_has_no_draw_and_spoils_no_other() {
    let device = device();
    let mut logits = values(4 * 10, 1);
    logits[3] = f32::NAN;
    logits[17] = f32::INFINITY;
    logits[20..30].fill(f32::NEG_INFINITY);
    let got = draw_rows(&device, &device.upload(&logits), &[PLAIN; 4]).unwrap();
    assert_eq!([0, 1, 2].map(|row: usize| got[row]), [None; 3]);
    assert_eq!(got[3].unwrap().token, plain_draw(&logits[30..], &PLAIN).token);
    let negative = f32::from_bits(f32::NAN.to_bits() | 0x8000_0000);
    let got = draw_rows(&device, &device.upload(&[1.0, negative]), &[PLAIN]).unwrap();
    assert_eq!(got, [None]);
}
