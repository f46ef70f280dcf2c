//! The panel on which reward hacking shows: the reward beside what it does not see.

use std::fmt::Write as _;

use aligner_algos::Warning;

use super::scatter::{self, Point};
use super::{Report, escape};

/// What the panel shows beside reward and judges, with the warning about it.
const FIGURES: [(&str, Option<&str>); 6] = [
    ("reward", None),
    ("objective/kl", Some("warnings/kl")),
    ("completions/mean_length", Some("warnings/length")),
    ("entropy", Some("warnings/entropy")),
    ("repetition", Some("warnings/repetition")),
    ("objective/ref_nll", None),
];

impl Report<'_> {
    /// Metrics that the panel shows.
    pub(super) fn in_panel(&self, name: &str) -> bool {
        self.is_online()
            && (FIGURES.iter().any(|(figure, _)| *figure == name)
                || self.judges.iter().any(|judge| name == format!("rewards/{judge}/mean")))
    }

    /// Whether the run learns from its own samples.
    pub(super) fn is_online(&self) -> bool {
        self.records.iter().any(|record| record.values.contains_key("completions/mean_length"))
    }

    /// Adds the panel, for a run that learns from its own samples.
    pub(super) fn hacking(&self, page: &mut String) {
        if !self.is_online() {
            return;
        }
        page.push_str("<h2>Signs of reward hacking</h2>\n");
        warnings(self.warnings, page);
        page.push_str("<div class=\"charts\">\n");
        let meaning = "A reward that rises while the policy stays near is learned; one that only distance buys is often hacked.";
        page.push_str(&scatter::figure(("objective/kl", "reward"), meaning, &self.against()));
        for (name, warning) in FIGURES {
            self.chart(page, name, warning);
        }
        for judge in self.judges {
            self.chart(page, &format!("rewards/{judge}/mean"), Some("warnings/judge"));
        }
        page.push_str("</div>\n");
        if self.points("objective/kl").is_empty() {
            page.push_str("<p class=\"note\">This run has no reference, so its distance is not known.</p>\n");
        }
        if self.judges.is_empty() {
            page.push_str("<p class=\"note\">No judge: a reward with <code>weight = 0</code> would be scored and not learned from.</p>\n");
        }
    }

    /// Divergence and reward of each step that has both.
    fn against(&self) -> Vec<Point> {
        let point = |record: &crate::Record| {
            let value = |name: &str| record.values.get(name).copied();
            Some(Point { step: record.step as f64, x: value("objective/kl")?, y: value("reward")? })
        };
        self.records.iter().filter_map(point).collect()
    }
}

fn warnings(warnings: &[Warning], page: &mut String) {
    if warnings.is_empty() {
        page.push_str("<p class=\"note\">No warning.</p>\n");
        return;
    }
    page.push_str("<ul class=\"warnings\">\n");
    for warning in warnings {
        // Names stand between backticks.
        let parts = warning.message.split('`').enumerate().map(|(at, part)| match at % 2 {
            0 => escape(part),
            _ => format!("<code>{}</code>", escape(part)),
        });
        let _ = writeln!(page, "<li><b>step {}</b> {}</li>", warning.step, parts.collect::<String>());
    }
    page.push_str("</ul>\n");
}
