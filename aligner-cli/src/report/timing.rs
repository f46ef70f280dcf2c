//! What each step's time went into, as bars.

use std::fmt::Write as _;

use super::Report;
use super::chart::{ticks, to_thousandths};

/// The phases, from the ground up.
const PHASES: [(&str, &str); 5] = [
    ("timing_s/generate", "generate"),
    ("timing_s/score", "score"),
    ("timing_s/logprobs", "log-probabilities"),
    ("timing_s/learn", "learn"),
    ("timing_s/refit", "refit"),
];
const STEP: &str = "timing_s/step";

/// More steps than this are drawn as means of neighbours.
const MOST_BARS: usize = 80;
const WIDTH: f64 = 980.0;
const HEIGHT: f64 = 246.0;
const LEFT: f64 = 58.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 36.0;

/// Some neighbouring steps.
struct Bar {
    /// The first and the last step.
    steps: (u64, u64),
    /// Mean seconds of each phase.
    phases: [f64; PHASES.len()],
    /// Mean seconds of the step.
    whole: f64,
}

impl Report<'_> {
    /// Adds the bars, for a run that has logged phases.
    pub(super) fn timing(&self, page: &mut String) {
        let bars = self.bars();
        if bars.is_empty() {
            return;
        }
        let mean = |pick: &dyn Fn(&Bar) -> f64| bars.iter().map(pick).sum::<f64>() / bars.len() as f64;
        let whole = mean(&|bar| bar.whole);
        let mut legend = String::new();
        for (at, (_, name)) in PHASES.iter().enumerate() {
            let seconds = mean(&|bar| bar.phases[at]);
            let _ =
                write!(legend, "<span class=\"key phase{at}\">{name} {} s</span>", to_thousandths(seconds));
        }
        let beside = bars.iter().any(|bar| bar.phases.iter().sum::<f64>() > 1.02 * bar.whole);
        let note = match bars.first().map(|bar| bar.steps.1 - bar.steps.0 + 1) {
            Some(each) if each > 1 => format!(" Each bar is the mean of {each} steps."),
            _ => String::new(),
        };
        let beside = if beside {
            " Drawing goes on beside learning, so the bars are higher than the lines."
        } else {
            ""
        };
        let _ = write!(
            page,
            "<h2>Time of a step</h2>\n<figure class=\"chart\"><figcaption><b>seconds</b>{legend}<small>A line is the \
             whole of a step, {} s in the mean.{beside}{note}</small></figcaption>\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"seconds of each phase, by step\">{}</svg></figure>\n",
            to_thousandths(whole),
            drawing(&bars),
        );
    }

    fn bars(&self) -> Vec<Bar> {
        let steps: Vec<_> = self.records.iter().filter(|record| record.values.contains_key(STEP)).collect();
        let each = steps.len().div_ceil(MOST_BARS).max(1);
        let bar = |steps: &[&crate::Record]| {
            let mean = |name: &str| {
                let seconds = steps.iter().filter_map(|record| record.values.get(name));
                seconds.sum::<f64>() / steps.len() as f64
            };
            let number = |record: Option<&&crate::Record>| record.map_or(0, |record| record.step);
            Bar {
                steps: (number(steps.first()), number(steps.last())),
                phases: PHASES.map(|(name, _)| mean(name)),
                whole: mean(STEP),
            }
        };
        steps.chunks(each).map(bar).collect()
    }
}

fn drawing(bars: &[Bar]) -> String {
    let mut svg = String::new();
    let highest = bars.iter().map(|bar| bar.whole.max(bar.phases.iter().sum())).fold(0.0, f64::max);
    let highest = if highest > 0.0 { highest * 1.05 } else { 1.0 };
    let base = HEIGHT - BOTTOM;
    let up = |seconds: f64| base - seconds / highest * (base - TOP);
    for (tick, label) in ticks((0.0, highest), 4) {
        let y = up(tick);
        let _ =
            write!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let (x, below) = (LEFT - 6.0, y + 3.5);
        let _ = write!(svg, "<text class=\"y\" x=\"{x}\" y=\"{below:.1}\">{label}</text>");
    }
    let slot = (WIDTH - LEFT) / bars.len() as f64;
    // A run of few steps gets bars, not blocks.
    let width = (slot * 0.8).min(40.0);
    for (at, bar) in bars.iter().enumerate() {
        let middle = LEFT + slot * (at as f64 + 0.5);
        let (first, last) = bar.steps;
        let steps = if first == last { format!("step {last}") } else { format!("steps {first} to {last}") };
        let mut below = 0.0;
        for (phase, seconds) in bar.phases.iter().enumerate() {
            let (top, bottom) = (up(below + seconds), up(below));
            let _ = write!(
                svg,
                "<rect class=\"phase{phase}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\">\
                 <title>{steps}: {} {} s</title></rect>",
                middle - width / 2.0,
                bottom - top,
                PHASES[phase].1,
                to_thousandths(*seconds),
            );
            below += seconds;
        }
        let (left, right, whole) = (middle - width / 2.0, middle + width / 2.0, up(bar.whole));
        let _ = write!(
            svg,
            "<line class=\"whole\" x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{whole:.1}\" y2=\"{whole:.1}\"/>"
        );
        if at % bars.len().div_ceil(20) == 0 {
            let _ = write!(svg, "<text class=\"x\" x=\"{middle:.1}\" y=\"{}\">{last}</text>", base + 16.0);
        }
    }
    let _ = write!(svg, "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{base}\" y2=\"{base}\"/>");
    let _ = write!(svg, "<text class=\"x unit\" x=\"{WIDTH}\" y=\"{}\">step</text>", HEIGHT - 5.0);
    svg
}
