//! One figure against another, as points that are numbered by their steps.

use std::fmt::Write as _;

use super::chart::{Frame, HEIGHT, WIDTH, axes, number, path};

/// A step's two figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) step: f64,
    pub(super) x: f64,
    pub(super) y: f64,
}

/// More points than this are drawn as means of neighbours.
const MOST_POINTS: usize = 20;
/// More than this are not all numbered.
const MOST_NUMBERS: usize = 8;

/// The chart of `y` against `x`, from pale to dark; empty where there are no points.
pub(super) fn figure((x, y): (&str, &str), meaning: &str, points: &[Point]) -> String {
    if points.is_empty() {
        return String::new();
    }
    let each = points.len().div_ceil(MOST_POINTS);
    let shown: Vec<Point> = points.chunks(each).map(middle).collect();
    let frame = Frame::of_points(&shown.iter().map(|point| (point.x, point.y)).collect::<Vec<_>>());
    let mut svg = String::new();
    axes(&mut svg, &frame, x);
    let places: Vec<(f64, f64)> = shown.iter().map(|point| frame.at(point.x, point.y)).collect();
    let _ = write!(svg, "<polyline class=\"trail\" points=\"{}\"/>", path(&places));
    let numbered = shown.len().div_ceil(MOST_NUMBERS);
    for (at, (point, (left, top))) in shown.iter().zip(&places).enumerate() {
        let Point { step, x: across, y: up } = point;
        let opacity = 0.25 + 0.75 * (at + 1) as f64 / shown.len() as f64;
        let _ = write!(
            svg,
            "<circle class=\"dot held\" cx=\"{left:.1}\" cy=\"{top:.1}\" r=\"4\" fill-opacity=\"{opacity:.2}\">\
             <title>step {step:.0}: {x} {}, {y} {}</title></circle>",
            number(*across),
            number(*up)
        );
        if at % numbered == 0 || at + 1 == shown.len() {
            let _ = write!(
                svg,
                "<text class=\"step\" x=\"{:.1}\" y=\"{:.1}\">{step:.0}</text>",
                left + 6.0,
                top - 5.0
            );
        }
    }
    let means = if each > 1 { format!(" Each point is the mean of {each} steps.") } else { String::new() };
    format!(
        "<figure class=\"chart\"><figcaption><b>{y}</b> against <b>{x}</b><small>{meaning}{means}</small></figcaption>\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{y} against {x}, step by step\">{svg}</svg></figure>\n"
    )
}

/// The mean of some neighbours, at the last one's step.
fn middle(points: &[Point]) -> Point {
    let mean = |pick: fn(&Point) -> f64| points.iter().map(pick).sum::<f64>() / points.len() as f64;
    let step = points.last().map_or(f64::NAN, |point| point.step);
    Point { step, x: mean(|point| point.x), y: mean(|point| point.y) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(count: usize) -> Vec<Point> {
        (1..=count).map(|step| Point { step: step as f64, x: 0.1 * step as f64, y: 1.0 }).collect()
    }

    #[test]
    fn many_points_are_drawn_as_means() {
        let html = figure(("objective/kl", "reward"), "", &points(100));
        assert_eq!(html.matches("<circle").count(), 20, "each of five steps");
        assert!(
            html.contains("step 5: objective/kl 0.3, reward 1") && html.contains("the mean of 5 steps"),
            "{html}"
        );
        assert!(html.contains(">100</text>"), "the last is numbered");
    }

    #[test]
    fn one_point_draws_and_none_does_not() {
        assert_eq!(figure(("x", "y"), "", &[]), "");
        let html = figure(("x", "y"), "", &points(1));
        assert!(html.contains("<circle") && !html.contains("NaN") && !html.contains("inf"), "{html}");
    }
}
