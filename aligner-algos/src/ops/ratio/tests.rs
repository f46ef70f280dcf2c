#![expect(clippy::float_cmp, reason = "clipped slopes are exactly 0")]

use super::*;
use aligner_core::{Device, Group, Sample};

fn flat(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

/// The loss of one unit and its derivative with respect to the ratio.
fn loss_and_slope(ratio: f32, advantage: f32, clip: &Clip) -> (f32, f32) {
    let at = Tensor::<1>::from_floats([ratio], &Device::flex().autodiff()).require_grad();
    let loss = clipped_loss(&at, &flat(&[advantage]), clip);
    let slope = at.grad(&loss.clone().sum().backward()).expect("tracked");
    (to_vec(&loss)[0], to_vec(&slope)[0])
}

#[test]
fn clipped_ratio_stops_gradient() {
    let clip = Clip::new(0.2, 0.3);
    for (ratio, advantage, loss, slope) in [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.0),
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 2.0),
    ] {
        let (value, derivative) = loss_and_slope(ratio, advantage, &clip);
        assert!((value - loss).abs() < 1e-6, "r {ratio}, A {advantage}: {value} for {loss}");
        assert_eq!(derivative, slope, "r {ratio}, A {advantage}");
    }
}

#[test]
fn dual_clip_bounds_the_loss_of_bad_tokens_only() {
    let clip = Clip { dual: Some(3.0), ..Clip::new(0.2, 0.2) };
    assert_eq!(loss_and_slope(10.0, -2.0, &clip), (6.0, 0.0));
    assert_eq!(loss_and_slope(2.0, -2.0, &clip), (4.0, 2.0));
    assert_eq!(loss_and_slope(0.25, 2.0, &clip), (-0.5, -2.0));
}

#[test]
fn delta_bounds_the_free_ratio() {
    let clip = Clip { delta: Some(4.0), ..Clip::new(0.2, 0.2) };
    assert_eq!(loss_and_slope(10.0, -2.0, &clip), (8.0, 0.0));
    assert_eq!(loss_and_slope(3.0, -2.0, &clip), (6.0, 2.0));
}

#[test]
fn cispo_keeps_the_gradient_of_clipped_tokens() {
    let logps = Tensor::<1>::from_floats([-0.5, -2.0], &Device::flex().autodiff()).require_grad();
    let ratio = (logps.clone() + 1.5).exp();
    let loss = cispo_loss(&ratio, &flat(&[2.0, -1.0]), &logps, 1.25);
    let slopes = to_vec(&logps.grad(&loss.sum().backward()).expect("tracked"));
    // The first ratio is e, over the cap; the second is e to the −½.
    assert!((slopes[0] + 2.5).abs() < 1e-6 && (slopes[1] - (-0.5_f32).exp()).abs() < 1e-6, "{slopes:?}");
}

fn two_sequences() -> Batch {
    let groups = [
        Group::single("a", Sample::response(&[1], &[2])),
        Group::single("silent", Sample::new(vec![1, 2], vec![false; 2])),
        Group::single("b", Sample::response(&[1], &[2, 3])),
    ];
    Batch::collate(&groups).expect("valid")
}

#[test]
fn a_sequence_ratio_is_the_mean_over_its_targets() {
    let batch = two_sequences();
    let ratios = sequence_log_ratio(flat(&[0.5, 1.0, -2.0]), &batch);
    assert_eq!(to_vec(&ratios), [0.5, 0.0, -0.5]);
    assert_eq!(to_vec(&on_targets(ratios, &batch)), [0.5, -0.5, -0.5]);
}

#[test]
fn without_old_logps_the_ratio_is_one_and_has_a_gradient() {
    let logps = Tensor::<1>::from_floats([-1.0, -2.0, -3.0], &Device::flex().autodiff()).require_grad();
    let ratio = log_ratio(&logps, &two_sequences()).expect("fresh samples").exp();
    assert_eq!(to_vec(&ratio), [1.0; 3]);
    assert_eq!(to_vec(&logps.grad(&ratio.sum().backward()).expect("tracked")), [1.0; 3]);
}

#[test]
fn clip_ratios_count_what_has_no_gradient() {
    let mut metrics = Metrics::default();
    let ratio = flat(&[0.5, 0.5, 1.5, 1.5, 1.0]);
    log_clip_ratios(&mut metrics, &ratio, &[1.0, -1.0, 1.0, -1.0, 1.0], &Clip::new(0.2, 0.2));
    let shares =
        ["low_mean", "high_mean", "region_mean"].map(|name| metrics.get(&format!("clip_ratio/{name}")));
    assert_eq!(shares, [Some(0.2), Some(0.2), Some(0.4)]);
}

#[test]
fn ratio_stats_describe_the_move() {
    let mut metrics = Metrics::default();
    log_ratio_stats(&mut metrics, &flat(&[0.0, 2.0_f32.ln()]));
    let close = |name: &str, value: f64| (metrics.get(name).expect("logged") - value).abs() < 1e-6;
    assert!(close("val/ratio", 1.5) && close("val/ratio_min", 1.0) && close("val/ratio_max", 2.0));
    assert!(close("policy/approxkl_avg", 0.25 * 2.0_f64.ln().powi(2)));
}

#[test]
fn bounds_out_of_range_are_refused_by_name() {
    let clip = Clip::new(0.2, 0.2);
    for (clip, key) in [
        (Clip { low: 1.5, ..clip }, "clip_low"),
        (Clip { high: -0.1, ..clip }, "clip_high"),
        (Clip { dual: Some(1.0), ..clip }, "dual_clip"),
        (Clip { delta: Some(1.1), ..clip }, "delta"),
        (Clip { low: f64::NAN, ..clip }, "clip_low"),
    ] {
        let message = clip.check().expect_err("out of range").to_string();
        assert!(message.starts_with(key), "{message}");
    }
    clip.check().expect("in range");
}
