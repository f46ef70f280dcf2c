//! One line chart as inline SVG.

use std::fmt::Write as _;

use super::escape;

/// A named line; `spread` is one standard error at each point, or empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Series {
    pub(super) label: &'static str,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) spread: Vec<f64>,
}

pub(super) const WIDTH: f64 = 480.0;
pub(super) const HEIGHT: f64 = 236.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 36.0;

/// Maps data to the drawing.
pub(super) struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn around(series: &[Series]) -> Self {
        let points = || series.iter().flat_map(|line| &line.points);
        let spread = |line: &Series, at: usize| line.spread.get(at).copied().unwrap_or(0.0);
        let low = |line: &Series| {
            line.points.iter().enumerate().map(|(at, p)| p.1 - spread(line, at)).fold(f64::INFINITY, f64::min)
        };
        let high = |line: &Series| {
            line.points
                .iter()
                .enumerate()
                .map(|(at, p)| p.1 + spread(line, at))
                .fold(f64::NEG_INFINITY, f64::max)
        };
        let y = (
            series.iter().map(low).fold(f64::INFINITY, f64::min),
            series.iter().map(high).fold(f64::NEG_INFINITY, f64::max),
        );
        let x = (
            points().map(|p| p.0).fold(f64::INFINITY, f64::min),
            points().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max),
        );
        Self { x: if x.1 > x.0 { x } else { (x.0 - 1.0, x.0 + 1.0) }, y: padded(y) }
    }

    /// Around points of any two figures.
    pub(super) fn of_points(points: &[(f64, f64)]) -> Self {
        let range = |pick: fn(&(f64, f64)) -> f64| {
            let values = || points.iter().map(pick);
            padded((values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)))
        };
        Self { x: range(|point| point.0), y: range(|point| point.1) }
    }

    pub(super) fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let across = (x - self.x.0) / (self.x.1 - self.x.0);
        let up = (y - self.y.0) / (self.y.1 - self.y.0);
        (LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))
    }
}

/// A range with some room on both sides. What moves by less than a thousandth of itself is drawn as what it is: level.
fn padded((low, high): (f64, f64)) -> (f64, f64) {
    let least = if high > low { low.abs().max(high.abs()) * 1e-3 } else { low.abs().max(1.0) * 0.1 };
    let (middle, half) = (f64::midpoint(low, high), (high - low).max(least) / 2.0);
    (middle - 1.12 * half, middle + 1.12 * half)
}

/// The chart of one metric, with its title and description, and a shade behind the steps `marked`; empty where no series has a
/// point.
pub(super) fn figure(name: &str, meaning: &str, series: &[Series], marked: &[f64]) -> String {
    let series: Vec<Series> = series.iter().filter(|line| !line.points.is_empty()).cloned().collect();
    if series.is_empty() {
        return String::new();
    }
    let frame = Frame::around(&series);
    let mut svg = String::new();
    for step in marked {
        shade(&mut svg, &frame, *step);
    }
    axes(&mut svg, &frame, "step");
    for line in &series {
        draw(&mut svg, &frame, line, class(line));
    }
    let mut legend = String::new();
    for line in &series {
        let _ = write!(legend, "<span class=\"key {}\">{}</span>", class(line), line.label);
    }
    format!(
        "<figure class=\"chart\" data-series='{data}'><figcaption><b>{name}</b>{legend}<small>{meaning}</small></figcaption>\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{name} over steps\" data-x=\"{x0},{x1}\">{svg}\
         <line class=\"cursor\" y1=\"{TOP}\" y2=\"{bottom}\"/></svg></figure>\n",
        data = data(&series),
        name = escape(name),
        meaning = escape(meaning),
        x0 = frame.x.0,
        x1 = frame.x.1,
        bottom = HEIGHT - BOTTOM,
    )
}

fn class(line: &Series) -> &'static str {
    if line.label == "held out" { "held" } else { "train" }
}

/// A shade behind one step.
fn shade(svg: &mut String, frame: &Frame, step: f64) {
    let (from, _) = frame.at((step - 0.5).max(frame.x.0), frame.y.0);
    let (to, _) = frame.at((step + 0.5).min(frame.x.1), frame.y.0);
    let (width, height) = (to - from, HEIGHT - BOTTOM - TOP);
    let _ = write!(
        svg,
        "<rect class=\"marked\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\"/>"
    );
}

/// Grid, axis and numbers; `unit` says what runs to the right.
pub(super) fn axes(svg: &mut String, frame: &Frame, unit: &str) {
    for (tick, label) in ticks(frame.y, 4) {
        let (_, y) = frame.at(frame.x.0, tick);
        let right = WIDTH - RIGHT;
        let _ =
            write!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let _ = write!(svg, "<text class=\"y\" x=\"{}\" y=\"{:.1}\">{label}</text>", LEFT - 6.0, y + 3.5);
    }
    let base = HEIGHT - BOTTOM;
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{base}\" y2=\"{base}\"/>",
        WIDTH - RIGHT
    );
    // There is no half of a step.
    for (tick, label) in
        ticks(frame.x, 6).into_iter().filter(|(tick, _)| unit != "step" || tick.fract() == 0.0)
    {
        let (x, _) = frame.at(tick, frame.y.0);
        let _ = write!(svg, "<text class=\"x\" x=\"{x:.1}\" y=\"{}\">{label}</text>", base + 16.0);
    }
    let _ =
        write!(svg, "<text class=\"x unit\" x=\"{}\" y=\"{}\">{unit}</text>", WIDTH - RIGHT, HEIGHT - 5.0);
}

fn draw(svg: &mut String, frame: &Frame, line: &Series, class: &str) {
    if !line.spread.is_empty() {
        let edge = |sign: f64| {
            let value =
                move |at: usize| line.points[at].1 + sign * line.spread.get(at).copied().unwrap_or(0.0);
            (0..line.points.len()).map(move |at| frame.at(line.points[at].0, value(at)))
        };
        let outline: Vec<(f64, f64)> =
            edge(1.0).chain(edge(-1.0).collect::<Vec<_>>().into_iter().rev()).collect();
        let _ = write!(svg, "<polygon class=\"band {class}\" points=\"{}\"/>", path(&outline));
    }
    let points: Vec<(f64, f64)> = line.points.iter().map(|&(x, y)| frame.at(x, y)).collect();
    let _ = write!(svg, "<polyline class=\"line {class}\" points=\"{}\"/>", path(&points));
    // Few points are measurements worth a mark each; many would hide the line.
    for (x, y) in points.iter().filter(|_| points.len() <= 24) {
        let _ = write!(svg, "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>");
    }
}

pub(super) fn path(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}

/// The series for the tooltip's script: `[{"label": …, "points": [[step, value], …]}]`.
fn data(series: &[Series]) -> String {
    let lines = series.iter().map(|line| serde_json::json!({ "label": line.label, "points": line.points }));
    escape(&lines.collect::<serde_json::Value>().to_string())
}

/// About `count` round numbers inside `range`, each with its text.
pub(super) fn ticks((low, high): (f64, f64), count: usize) -> Vec<(f64, String)> {
    let rough = (high - low) / count as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    let decimals = (-step.log10().floor()).clamp(0.0, 12.0) as usize;
    let label = |value: f64| match value.abs() {
        // Neighbours must not look the same.
        size if size < 1e7 && decimals <= 6 => trimmed(&format!("{value:.decimals$}")),
        _ => number(value),
    };
    (first..=last).map(|at| at as f64 * step).map(|value| (value, label(value))).collect()
}

/// Without zeros behind the point, and without a sign of nothing.
fn trimmed(text: &str) -> String {
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text };
    if text == "-0" { "0".into() } else { text.into() }
}

/// A number in few characters.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        return "0".into();
    }
    if !(1e-3..1e7).contains(&size) {
        let text = format!("{value:.2e}");
        let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{power}", trimmed(digits));
    }
    let decimals = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
    trimmed(&format!("{value:.decimals$}"))
}

/// A number to three decimals: of figures that stand below each other.
pub(super) fn to_thousandths(value: f64) -> String {
    trimmed(&format!("{value:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let labels = |range, count| {
            let labels = ticks(range, count).into_iter().map(|(_, label)| label);
            labels.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(labels((0.03, 1.02), 4), "0.5 1");
        assert_eq!(labels((0.0, 60.0), 6), "0 10 20 30 40 50 60");
        assert_eq!(labels((0.9994, 1.0006), 4), "0.9995 1 1.0005", "neighbours differ");
        assert_eq!(labels((-0.2, 0.2), 2), "-0.2 0 0.2");
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.712_345, 12.5, 1500.0, 1e-6, -0.02].map(number);
        assert_eq!(shown, ["0", "0.7123", "12.5", "1500", "1e-6", "-0.02"]);
    }

    #[test]
    fn noise_on_a_level_is_drawn_as_a_level() {
        let (low, high) = padded((1.0 - 1e-7, 1.0 + 1e-7));
        assert!((low - 0.99944).abs() < 1e-5 && (high - 1.00056).abs() < 1e-5, "{low} {high}");
    }

    #[test]
    fn a_constant_and_a_single_point_still_draw() {
        let line = Series { label: "training", points: vec![(3.0, 0.5)], spread: vec![] };
        let html = figure("loss", "", &[line], &[3.0]);
        assert!(html.contains("class=\"marked\""), "{html}");
        assert!(html.contains("<polyline") && !html.contains("NaN") && !html.contains("inf"), "{html}");
    }
}
