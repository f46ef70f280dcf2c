//! Learning-rate schedules: the curves of `transformers.get_scheduler`, under the same names.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The shape of the learning rate over a run. All but `constant` begin with a linear warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// The same rate at every step, without warmup.
    Constant,
    /// The same rate after the warmup.
    ConstantWithWarmup,
    /// Falls linearly to 0.
    #[default]
    Linear,
    /// Falls along half a cosine to 0.
    Cosine,
    /// Falls along half a cosine to 0, `num_cycles` times.
    CosineWithRestarts,
    /// Falls along a power to `lr_end`.
    Polynomial,
    /// Falls as one over the square root of the step.
    InverseSqrt,
    /// Falls along half a cosine to a share of the rate, or to `min_lr`.
    CosineWithMinLr,
    /// Stays constant, then falls along half a cosine over the last `num_decay_steps`.
    WarmupStableDecay,
}

/// What some schedules can be told beside the warmup; names and defaults as in `transformers`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleOptions {
    /// Cosine periods: 0.5 for the cosines, 1 for `cosine_with_restarts`.
    pub num_cycles: Option<f64>,
    /// Exponent of `polynomial`; 1 by default.
    pub power: Option<f64>,
    /// Last rate of `polynomial`; 1e-7 by default.
    pub lr_end: Option<f64>,
    /// Last rate of `cosine_with_min_lr`.
    pub min_lr: Option<f64>,
    /// Last rate of `cosine_with_min_lr`, as a share of the learning rate.
    pub min_lr_rate: Option<f64>,
    /// First and last rate of `warmup_stable_decay`, as a share of the learning rate; 0 by default.
    pub min_lr_ratio: Option<f64>,
    /// Length of the fall of `warmup_stable_decay` in steps; a tenth of the run by default.
    pub num_decay_steps: Option<u64>,
    /// Time scale of `inverse_sqrt` in steps; the warmup's length by default, 10,000 without one.
    pub timescale: Option<u64>,
}

/// The learning rate of each step of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    schedule: Schedule,
    options: ScheduleOptions,
    peak: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl LearningRate {
    /// A rate that peaks at `peak` in a run of `total_steps`, of which `warmup_steps` warm up.
    ///
    /// # Errors
    /// A peak or an option that is not finite or negative.
    pub fn new(
        schedule: Schedule,
        options: ScheduleOptions,
        peak: f64,
        warmup_steps: u64,
        total_steps: u64,
    ) -> Result<Self> {
        let given = [
            ("learning_rate", Some(peak)),
            ("num_cycles", options.num_cycles),
            ("power", options.power),
            ("lr_end", options.lr_end),
            ("min_lr", options.min_lr),
            ("min_lr_rate", options.min_lr_rate),
            ("min_lr_ratio", options.min_lr_ratio),
        ];
        for (key, value) in given {
            if let Some(value) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                return Err(Error::setting(key, format!("must be finite and not negative, got {value}")));
            }
        }
        Ok(Self { schedule, options, peak, warmup_steps, total_steps })
    }

    /// The rate of optimizer step `step`, counted from 0.
    ///
    /// As in `transformers`, a warmup's first step has rate 0, and steps past the total go on along
    /// the curve's own formula.
    pub fn at(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        let (now, warmup) = (step as f64, self.warmup_steps as f64);
        let warming = step < self.warmup_steps;
        let rise = now / warmup.max(1.0);
        // 0 at the end of the warmup, 1 at the end of the run.
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = (now - warmup) / length;
        match self.schedule {
            Schedule::Constant => 1.0,
            Schedule::WarmupStableDecay => self.stable_then_decay(now, warmup),
            _ if warming => rise,
            Schedule::ConstantWithWarmup => 1.0,
            Schedule::Linear => ((self.total_steps as f64 - now) / length).max(0.0),
            Schedule::Cosine => self.cosine(progress).max(0.0),
            Schedule::CosineWithRestarts => self.restarts(progress),
            Schedule::Polynomial => self.polynomial(progress, step),
            Schedule::InverseSqrt => self.inverse_sqrt(now, warmup),
            Schedule::CosineWithMinLr => floored(self.cosine(progress), self.min_rate()).max(0.0),
        }
    }

    fn cosine(&self, progress: f64) -> f64 {
        let cycles = self.options.num_cycles.unwrap_or(0.5);
        0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos())
    }

    fn restarts(&self, progress: f64) -> f64 {
        if progress >= 1.0 {
            return 0.0;
        }
        let cycles = self.options.num_cycles.unwrap_or(1.0);
        (0.5 * (1.0 + (PI * (cycles * progress).fract()).cos())).max(0.0)
    }

    fn polynomial(&self, progress: f64, step: u64) -> f64 {
        let end = self.options.lr_end.unwrap_or(1e-7);
        if self.peak == 0.0 {
            return 0.0;
        }
        if step > self.total_steps {
            return end / self.peak;
        }
        let power = self.options.power.unwrap_or(1.0);
        ((self.peak - end) * (1.0 - progress).powf(power) + end) / self.peak
    }

    fn inverse_sqrt(&self, now: f64, warmup: f64) -> f64 {
        let default = if warmup > 0.0 { warmup } else { 10_000.0 };
        let timescale = self.options.timescale.map_or(default, |steps| steps.max(1) as f64);
        1.0 / ((now + timescale - warmup) / timescale).max(f64::MIN_POSITIVE).sqrt()
    }

    fn min_rate(&self) -> f64 {
        let of_peak = self.options.min_lr.filter(|_| self.peak > 0.0).map(|rate| rate / self.peak);
        of_peak.or(self.options.min_lr_rate).unwrap_or(0.0)
    }

    fn stable_then_decay(&self, now: f64, warmup: f64) -> f64 {
        let least = self.options.min_lr_ratio.unwrap_or(0.0);
        let decay_steps = self.options.num_decay_steps.unwrap_or(self.total_steps.div_ceil(10)) as f64;
        let decay_start = (self.total_steps as f64 - decay_steps).max(warmup);
        if now < warmup {
            floored(now / warmup.max(1.0), least)
        } else if now < decay_start {
            1.0
        } else if now < decay_start + decay_steps {
            floored(self.cosine((now - decay_start) / decay_steps.max(1.0)), least).max(0.0)
        } else {
            least
        }
    }
}

/// `factor` in 0..1 moved into `least`..1.
fn floored(factor: f64, least: f64) -> f64 {
    factor * (1.0 - least) + least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_run_warms_up_and_ends_at_zero() {
        let rate = LearningRate::new(Schedule::Linear, ScheduleOptions::default(), 1.0, 2, 6).expect("valid");
        let rates: Vec<f64> = (0..7).map(|step| rate.at(step)).collect();
        assert_eq!(rates, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
    }

    #[test]
    fn a_run_shorter_than_its_warmup_never_divides_by_zero() {
        for schedule in [Schedule::Linear, Schedule::Cosine, Schedule::WarmupStableDecay] {
            let rate = LearningRate::new(schedule, ScheduleOptions::default(), 1.0, 5, 0).expect("valid");
            assert!((0..9).all(|step| rate.at(step).is_finite()), "{schedule:?}");
        }
    }

    #[test]
    fn names_are_those_of_transformers() {
        let schedule: Schedule = serde_json::from_str("\"cosine_with_min_lr\"").expect("a known name");
        assert_eq!(schedule, Schedule::CosineWithMinLr);
        assert!(serde_json::from_str::<Schedule>("\"cosin\"").is_err());
    }

    #[test]
    fn a_negative_rate_is_refused_by_name() {
        let options = ScheduleOptions { min_lr: Some(f64::NAN), ..ScheduleOptions::default() };
        let message = LearningRate::new(Schedule::Cosine, options, 1.0, 0, 1).expect_err("NaN").to_string();
        assert!(message.contains("min_lr"), "{message}");
    }
}
