//! Lines over steps: several runs in a panel, several panels side by side.

use super::scale::{Scale, short};
use super::{MARGIN, Svg, run_color};

/// A run's values; points and spread are of one length.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Line {
    /// Step and value.
    pub(crate) points: Vec<(f64, f64)>,
    /// One standard error at each point; empty where none is known.
    pub(crate) spread: Vec<f64>,
}

/// One measure of all runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Panel {
    /// What is measured.
    pub(crate) heading: String,
    /// A line for each run, in the order of the legend.
    pub(crate) lines: Vec<Line>,
}

const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 240.0;
const PANELS_IN_A_ROW: usize = 3;
/// So few points are measurements worth a mark each; more would hide the line.
const MARKED: usize = 24;

/// The picture of `panels` over the step, with one legend of `runs`.
pub(crate) fn curves(title: &str, description: &str, runs: &[String], panels: &[Panel]) -> String {
    // As few rows as there have to be, and those of one length.
    let rows = panels.len().div_ceil(PANELS_IN_A_ROW).max(1);
    let columns = panels.len().div_ceil(rows).max(1);
    let mut svg = Svg::new(2.0 * MARGIN + columns as f64 * WIDTH);
    svg.text((MARGIN, MARGIN + 12.0), "title", title);
    let top = svg.legend(runs, run_color, MARGIN + 28.0);
    for (index, panel) in panels.iter().enumerate() {
        let (column, row) = (index % columns, index / columns);
        draw(&mut svg, panel, (MARGIN + column as f64 * WIDTH, top + row as f64 * HEIGHT));
    }
    let height = top + rows as f64 * HEIGHT;
    svg.finish(height, title, description)
}

/// Draws a panel with its corner at `corner`.
fn draw(svg: &mut Svg, panel: &Panel, (left, top): (f64, f64)) {
    let (right, base) = (left + WIDTH - 12.0, top + HEIGHT - 44.0);
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let edges = panel.lines.iter().flat_map(|line| {
        let spread = |at: usize| line.spread.get(at).copied().unwrap_or(0.0);
        line.points
            .iter()
            .enumerate()
            .flat_map(move |(at, point)| [point.1 - spread(at), point.1 + spread(at)])
    });
    let x = Scale::around(points().map(|point| point.0), 0.02, (left + 52.0, right));
    let y = Scale::around(edges, 0.06, (base, top + 28.0));
    svg.text((left, top + 14.0), "head", &panel.heading);
    for tick in y.ticks(6) {
        svg.line([x.from, y.at(tick), x.to, y.at(tick)], "grid");
        svg.text((x.from - 6.0, y.at(tick) + 4.0), "dim end", &short(tick));
    }
    svg.line([x.from, base, x.to, base], "axis");
    for tick in x.ticks(6).into_iter().filter(|tick| tick.fract() == 0.0) {
        svg.text((x.at(tick), base + 16.0), "dim middle", &short(tick));
    }
    svg.text((right, base + 30.0), "dim end", "step");
    for (index, line) in panel.lines.iter().enumerate() {
        draw_line(svg, line, run_color(index), (x, y));
    }
}

fn draw_line(svg: &mut Svg, line: &Line, color: &str, (x, y): (Scale, Scale)) {
    if !line.spread.is_empty() {
        let edge = |sign: f64| {
            let of =
                move |(point, spread): (&(f64, f64), &f64)| (x.at(point.0), y.at(point.1 + sign * spread));
            line.points.iter().zip(&line.spread).map(of).collect::<Vec<_>>()
        };
        let mut outline = edge(1.0);
        outline.extend(edge(-1.0).into_iter().rev());
        svg.shape("polygon", &outline, &format!(r#"fill="{color}" fill-opacity="0.18""#));
    }
    let points: Vec<(f64, f64)> = line.points.iter().map(|point| (x.at(point.0), y.at(point.1))).collect();
    svg.shape("polyline", &points, &format!(r#"fill="none" stroke="{color}" stroke-width="1.8""#));
    for (x, y) in points.iter().filter(|_| points.len() <= MARKED) {
        svg.rect([x - 2.5, y - 2.5, 5.0, 5.0], &format!(r#"rx="2.5" fill="{color}""#));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_has_a_line_in_each_panel_and_a_band_where_the_spread_is_known() {
        let plain = Line { points: vec![(0.0, 1.0), (10.0, 2.0)], spread: Vec::new() };
        let known = Line { spread: vec![0.1, 0.2], ..plain.clone() };
        let panel =
            |heading: &str| Panel { heading: heading.into(), lines: vec![plain.clone(), known.clone()] };
        let runs = ["ppo".to_string(), "grpo".to_string()];
        let svg = curves("learning", "two runs", &runs, &[panel("reward"), panel("kl")]);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<polygon").count()), (4, 2));
    }

    #[test]
    fn a_constant_a_single_point_and_no_point_still_draw() {
        let lines = vec![Line { points: vec![(3.0, 0.5)], spread: vec![] }, Line::default()];
        let svg = curves("t", "d", &["a".into(), "b".into()], &[Panel { heading: "x".into(), lines }]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
