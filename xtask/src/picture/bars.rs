//! Stacked horizontal bars.

use super::scale::{Scale, short};
use super::{MARGIN, Svg, part_color, width_of};

/// A bar of parts, as many as there are names in the legend.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    /// Stands before it.
    pub(crate) label: String,
    /// Lengths of the parts; what is not above 0 is not drawn.
    pub(crate) parts: Vec<f64>,
    /// Stands behind it.
    pub(crate) note: String,
}

/// Bars on one axis.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BarPanel {
    /// Stands above them.
    pub(crate) heading: String,
    /// From top to bottom.
    pub(crate) bars: Vec<Bar>,
    /// What the axis counts.
    pub(crate) unit: &'static str,
}

const WIDTH: f64 = 880.0;
const BAR: f64 = 20.0;
const STEP: f64 = 27.0;
/// Below this width a part has no number in it.
const NUMBERED: f64 = 30.0;

/// The picture of `panels`, one below the other, each with an axis of its own that begins at 0.
pub(crate) fn stacked_bars(title: &str, description: &str, parts: &[String], panels: &[BarPanel]) -> String {
    let mut svg = Svg::new(WIDTH);
    svg.text((MARGIN, MARGIN + 12.0), "title", title);
    let mut y = svg.legend(parts, part_color, MARGIN + 28.0) + 8.0;
    let labels = panels.iter().flat_map(|panel| &panel.bars).map(|bar| width_of(&bar.label));
    let notes = panels.iter().flat_map(|panel| &panel.bars).map(|bar| width_of(&bar.note));
    let left = MARGIN + labels.fold(0.0, f64::max) + 8.0;
    let right = WIDTH - MARGIN - notes.fold(0.0, f64::max) - 8.0;
    for panel in panels {
        y = draw(&mut svg, panel, y, (left, right));
    }
    svg.finish(y, title, description)
}

/// Draws a panel from `top` on, its bars within `span`; returns where it ends.
fn draw(svg: &mut Svg, panel: &BarPanel, top: f64, span: (f64, f64)) -> f64 {
    let total = |bar: &Bar| bar.parts.iter().sum::<f64>();
    let longest = panel.bars.iter().map(total).fold(f64::MIN_POSITIVE, f64::max);
    let scale = Scale { low: 0.0, high: longest, from: span.0, to: span.1 };
    svg.text((MARGIN, top + 14.0), "head", &panel.heading);
    let first = top + 26.0;
    let base = first + STEP * panel.bars.len() as f64;
    for tick in scale.ticks(6) {
        let x = scale.at(tick);
        svg.line([x, first - 4.0, x, base], "grid");
        svg.text((x, base + 14.0), "dim middle", &short(tick));
    }
    svg.line([span.0, first - 4.0, span.0, base], "axis");
    svg.text((span.1 + 8.0, base + 14.0), "dim", panel.unit);
    for (index, bar) in panel.bars.iter().enumerate() {
        let y = first + STEP * index as f64;
        svg.text((span.0 - 8.0, y + 14.0), "end", &bar.label);
        let mut done = 0.0;
        for (index, &part) in bar.parts.iter().enumerate().filter(|(_, part)| **part > 0.0) {
            let (x, end) = (scale.at(done), scale.at(done + part));
            done += part;
            svg.rect([x, y, end - x, BAR], &format!(r#"fill="{}""#, part_color(index)));
            if end - x > 3.0 {
                svg.line([end, y, end, y + BAR], "gap");
            }
            if end - x >= NUMBERED {
                let class = if is_dark(part_color(index)) { "on-dark middle" } else { "on-light middle" };
                svg.text((f64::midpoint(x, end), y + 14.0), class, &short(part));
            }
        }
        svg.text((scale.at(done) + 8.0, y + 14.0), "note", &bar.note);
    }
    base + 36.0
}

/// Whether white is read better than black on a colour `#rrggbb`.
fn is_dark(color: &str) -> bool {
    let part = |at: usize| {
        color.get(at..at + 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()).map_or(0.0, f64::from)
    };
    0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5) < 125.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(label: &str, parts: &[f64]) -> Bar {
        Bar { label: label.into(), parts: parts.to_vec(), note: format!("{} s", parts.iter().sum::<f64>()) }
    }

    #[test]
    fn a_bar_has_a_part_for_each_phase_that_took_time() {
        let panel = BarPanel {
            heading: "all".into(),
            bars: vec![bar("slow", &[30.0, 10.0]), bar("fast", &[1.0, 0.0])],
            unit: "s",
        };
        let phases = ["draw".to_string(), "learn".to_string()];
        let svg = stacked_bars("a step", "what it takes", &phases, &[panel]);
        // The card, two of the legend, and three parts.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 3);
        assert!(svg.contains("<title id=\"title\">a step</title>") && svg.contains(">40 s<"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn numbers_are_white_on_dark_colours_alone() {
        assert!(is_dark("#0072b2") && !is_dark("#bbbbbb"));
    }
}
