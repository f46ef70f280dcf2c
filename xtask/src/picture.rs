//! Pictures as SVG text that stands alone: bars and curves, on a card of their own, light or dark as the reader has it.

mod bars;
mod curves;
mod scale;

use std::fmt::Write as _;

pub(crate) use bars::{Bar, BarPanel, stacked_bars};
pub(crate) use curves::{Line, Panel, curves};

/// Colours that colour-blind people tell apart (after Okabe and Ito), on white and on black.
const COLORS: [&str; 9] =
    ["#0072b2", "#56b4e9", "#cc79a7", "#009e73", "#8c8c8c", "#e69f00", "#d55e00", "#7b5ea7", "#bbbbbb"];

const STYLE: &str = "\
text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}\
.title{font-size:15px;font-weight:600}.head{font-weight:600}.dim{fill:#59636e}\
.card{fill:#fff;stroke:#d1d9e0}.grid{stroke:#d1d9e0}.axis{stroke:#818b98}.gap{stroke:#fff}\
.note{paint-order:stroke;stroke:#fff;stroke-width:3px}\
.middle{text-anchor:middle}.end{text-anchor:end}.on-dark{fill:#fff;font-size:11px}.on-light{fill:#000;font-size:11px}\
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.dim{fill:#9198a1}.card{fill:#0d1117;stroke:#3d444d}\
.grid{stroke:#3d444d}.axis{stroke:#9198a1}.gap,.note{stroke:#0d1117}.on-dark{fill:#fff}.on-light{fill:#000}}";

/// Distance of the drawing from the card's edge.
const MARGIN: f64 = 16.0;

/// The colour of the `index`-th part of a bar.
fn part_color(index: usize) -> &'static str {
    COLORS[index % COLORS.len()]
}

/// The colour of the `index`-th run: the first ones are far apart.
fn run_color(index: usize) -> &'static str {
    const ORDER: [usize; COLORS.len()] = [0, 6, 3, 5, 7, 1, 2, 4, 8];
    COLORS[ORDER[index % ORDER.len()]]
}

/// About how many pixels a text of 12 px is wide.
fn width_of(text: &str) -> f64 {
    6.6 * text.chars().count() as f64
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A drawing on its way.
struct Svg {
    width: f64,
    body: String,
}

impl Svg {
    fn new(width: f64) -> Self {
        Self { width, body: String::new() }
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], attributes: &str) {
        let _ = write!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {attributes}/>"#
        );
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        let _ = write!(
            self.body,
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        );
    }

    fn text(&mut self, (x, y): (f64, f64), class: &str, text: &str) {
        let text = escape(text);
        let _ = write!(self.body, r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{text}</text>"#);
    }

    /// A shape of these points: `polyline` or `polygon`.
    fn shape(&mut self, kind: &str, points: &[(f64, f64)], attributes: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(self.body, r#"<{kind} points="{}" {attributes}/>"#, points.join(" "));
    }

    /// Names with the colours that `color` gives them from `top` on, in as many lines as they need; returns where
    /// they end.
    fn legend(&mut self, names: &[String], color: fn(usize) -> &'static str, top: f64) -> f64 {
        let (mut x, mut y) = (MARGIN, top);
        for (index, name) in names.iter().enumerate() {
            let wide = 18.0 + width_of(name) + 14.0;
            if x > MARGIN && x + wide > self.width - MARGIN {
                (x, y) = (MARGIN, y + 20.0);
            }
            self.rect([x, y, 12.0, 12.0], &format!(r#"rx="2" fill="{}""#, color(index)));
            self.text((x + 18.0, y + 10.0), "", name);
            x += wide;
        }
        y + 20.0
    }

    /// The file of a drawing that is `height` high, with what a screen reader says of it.
    fn finish(self, height: f64, title: &str, description: &str) -> String {
        let (width, body, title, description) = (self.width, self.body, escape(title), escape(description));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\" aria-labelledby=\"title description\">\n\
             <title id=\"title\">{title}</title>\n<desc id=\"description\">{description}</desc>\n\
             <style>{STYLE}</style>\n\
             <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n{body}\n</svg>\n",
            width - 1.0,
            height - 1.0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_a_long_legend_is_broken() {
        let mut svg = Svg::new(200.0);
        let names = ["a < b & c", "a name that fills a line alone"].map(String::from);
        let end = svg.legend(&names, run_color, 10.0);
        assert!(svg.body.contains("a &lt; b &amp; c"), "{}", svg.body);
        assert!((end - 50.0).abs() < 1e-9, "two lines of 20 after 10: {end}");
    }
}
