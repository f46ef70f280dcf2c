//! From numbers to places, and the round numbers that an axis names.

/// Maps `low..=high` to `from..=to`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Scale {
    /// One on which all `values` have a place, with `share` of their span free at each end; without values, of 0 to 1.
    pub(super) fn around(values: impl Iterator<Item = f64>, share: f64, (from, to): (f64, f64)) -> Self {
        let widen = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), widen);
        if low > high {
            return Self { low: 0.0, high: 1.0, from, to };
        }
        // A constant still gets an axis of some length.
        let span = if high > low { high - low } else { low.abs().max(1.0) * 0.1 };
        let free = if high > low { span * share } else { span };
        Self { low: low - free, high: high + free, from, to }
    }

    pub(super) fn at(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// About `count` round numbers on the scale.
    pub(super) fn ticks(&self, count: usize) -> Vec<f64> {
        let rough = (self.high - self.low) / count as f64;
        let power = 10f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let (first, last) = ((self.low / step).ceil() as i64, (self.high / step).floor() as i64);
        (first..=last).map(|at| at as f64 * step).collect()
    }
}

/// A number in few characters.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        return "0".into();
    }
    if !(1e-3..1e6).contains(&size) {
        return format!("{value:.1e}");
    }
    let decimals = (2 - size.log10().floor() as i32).clamp(0, 5) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_on_the_scale() {
        let ticks = |low, high, count| Scale { low, high, from: 0.0, to: 1.0 }.ticks(count);
        assert_eq!(ticks(0.03, 1.02, 4), [0.5, 1.0]);
        assert_eq!(ticks(0.0, 470.0, 5), [0.0, 100.0, 200.0, 300.0, 400.0]);
    }

    #[test]
    fn a_constant_has_a_place() {
        let scale = Scale::around([3.0, 3.0].into_iter(), 0.1, (0.0, 10.0));
        assert!((scale.at(3.0) - 5.0).abs() < 1e-9);
        assert!(Scale::around(std::iter::empty(), 0.1, (0.0, 1.0)).at(0.5).is_finite());
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.712_345, 12.54, 1500.0, 1e-6, -0.02].map(short);
        assert_eq!(shown, ["0", "0.712", "12.5", "1500", "1.0e-6", "-0.02"]);
    }
}
