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

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 30.0;

/// Maps data to the drawing.
struct Frame {
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
        let pad = |(low, high): (f64, f64), share: f64| {
            // A constant still gets an axis of some height.
            let span = if high > low { high - low } else { low.abs().max(1.0) * 0.1 };
            (low - span * share, high + span * share)
        };
        Self { x: if x.1 > x.0 { x } else { (x.0 - 1.0, x.0 + 1.0) }, y: pad(y, 0.06) }
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let across = (x - self.x.0) / (self.x.1 - self.x.0);
        let up = (y - self.y.0) / (self.y.1 - self.y.0);
        (LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))
    }
}

/// The chart of one metric, with its title and description; empty where no series has a point.
pub(super) fn figure(name: &str, meaning: &str, series: &[Series]) -> String {
    let series: Vec<Series> = series.iter().filter(|line| !line.points.is_empty()).cloned().collect();
    if series.is_empty() {
        return String::new();
    }
    let frame = Frame::around(&series);
    let mut svg = String::new();
    axes(&mut svg, &frame);
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

fn axes(svg: &mut String, frame: &Frame) {
    for tick in ticks(frame.y, 4) {
        let (_, y) = frame.at(frame.x.0, tick);
        let right = WIDTH - RIGHT;
        let _ =
            write!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let _ = write!(
            svg,
            "<text class=\"y\" x=\"{}\" y=\"{:.1}\">{}</text>",
            LEFT - 6.0,
            y + 3.5,
            number(tick)
        );
    }
    let base = HEIGHT - BOTTOM;
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{base}\" y2=\"{base}\"/>",
        WIDTH - RIGHT
    );
    for tick in ticks(frame.x, 6).into_iter().filter(|tick| tick.fract() == 0.0) {
        let (x, _) = frame.at(tick, frame.y.0);
        let _ = write!(svg, "<text class=\"x\" x=\"{x:.1}\" y=\"{}\">{}</text>", base + 16.0, number(tick));
    }
    let _ = write!(svg, "<text class=\"x unit\" x=\"{}\" y=\"{}\">step</text>", WIDTH - RIGHT, HEIGHT - 2.0);
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

fn path(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}

/// The series for the tooltip's script: `[{"label": …, "points": [[step, value], …]}]`.
fn data(series: &[Series]) -> String {
    let lines = series.iter().map(|line| serde_json::json!({ "label": line.label, "points": line.points }));
    escape(&lines.collect::<serde_json::Value>().to_string())
}

/// About `count` round numbers inside `range`.
fn ticks((low, high): (f64, f64), count: usize) -> Vec<f64> {
    let rough = (high - low) / count as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|at| at as f64 * step).collect()
}

/// A number in few characters.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        return "0".into();
    }
    if !(1e-3..1e7).contains(&size) {
        return format!("{value:.2e}");
    }
    let decimals = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks((0.03, 1.02), 4), [0.5, 1.0]);
        assert_eq!(ticks((0.0, 60.0), 6), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.712_345, 12.5, 1500.0, 1e-6, -0.02].map(number);
        assert_eq!(shown, ["0", "0.7123", "12.5", "1500", "1.00e-6", "-0.02"]);
    }

    #[test]
    fn a_constant_and_a_single_point_still_draw() {
        let line = Series { label: "training", points: vec![(3.0, 0.5)], spread: vec![] };
        let html = figure("loss", "", &[line]);
        assert!(html.contains("<polyline") && !html.contains("NaN") && !html.contains("inf"), "{html}");
    }
}
