//! `report.html`: one file, no network, with curves, numbers and answers before and after.

mod chart;
mod hacking;
mod rollouts;
mod scatter;
mod timing;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use aligner_algos::Warning;
use aligner_core::metrics::describe;

use crate::rundir::{Answer, Drawn, Record};
use chart::{Series, figure, number};

/// What a report shows.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// The run's name.
    pub title: &'a str,
    /// One line under it.
    pub subtitle: &'a str,
    /// All records of `metrics.jsonl`.
    pub records: &'a [Record],
    /// All answers of `samples.jsonl`.
    pub answers: &'a [Answer],
    /// All samples of `rollouts.jsonl`.
    pub rollouts: &'a [Drawn],
    /// What the run has warned of.
    pub warnings: &'a [Warning],
    /// Names of the rewards that are not learned from.
    pub judges: &'a [String],
    /// The text of `resolved.toml`.
    pub config: &'a str,
}

/// Suffix of a metric's standard error.
pub(crate) const STANDARD_ERROR: &str = "_stderr";

impl Report<'_> {
    /// The whole page.
    pub fn html(&self) -> String {
        let mut page = String::new();
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{title}</title>\n<style>\n{style}</style></head>\n<body><main>\n\
             <h1>{title}</h1><p class=\"lead\">{subtitle}</p>\n",
            title = escape(self.title),
            subtitle = escape(self.subtitle),
            style = include_str!("report/style.css"),
        );
        self.tiles(&mut page);
        self.answers(&mut page);
        self.hacking(&mut page);
        self.charts(&mut page);
        self.timing(&mut page);
        rollouts::table(self.rollouts, &mut page);
        self.numbers(&mut page);
        self.dictionary(&mut page);
        let _ = write!(
            page,
            "<details><summary>The configuration, with every default</summary><pre>{}</pre></details>\n\
             </main><div id=\"tip\"></div>\n<script>\n{}</script></body></html>\n",
            escape(self.config),
            include_str!("report/script.js"),
        );
        page
    }

    /// Every point of one metric.
    fn points(&self, name: &str) -> Vec<(f64, f64)> {
        let point = |record: &Record| Some((record.step as f64, *record.values.get(name)?));
        self.records.iter().filter_map(point).collect()
    }

    /// Names of metrics without the prefix `eval/` and without standard errors.
    fn names(&self) -> BTreeSet<&str> {
        let names = self.records.iter().flat_map(|record| record.values.keys());
        names
            .filter(|name| !name.ends_with(STANDARD_ERROR))
            .map(|name| name.strip_prefix("eval/").unwrap_or(name))
            .collect()
    }

    /// First and last held-out value of every metric, with the last one's standard error.
    fn held_out(&self) -> BTreeMap<&str, Change> {
        let mut changes = BTreeMap::new();
        for name in self.names() {
            let key = format!("eval/{name}");
            let points = self.points(&key);
            let spread = self.points(&format!("{key}{STANDARD_ERROR}"));
            if let (Some(first), Some(last)) = (points.first(), points.last()) {
                let before = (first.1, spread.first().map(|point| point.1));
                changes.insert(name, Change { before, after: (last.1, spread.last().map(|point| point.1)) });
            }
        }
        changes
    }

    fn tiles(&self, page: &mut String) {
        let held_out = self.held_out();
        let wanted =
            ["reward", "rewards/accuracies", "accuracy", "loss", "perplexity", "rewards/margins", "margin"];
        page.push_str("<div class=\"tiles\">");
        for (name, change) in wanted.iter().filter_map(|name| Some((name, held_out.get(name)?))).take(4) {
            let _ = write!(
                page,
                "<div class=\"tile\"><small>held-out {}</small><b>{}</b><small>was {}</small></div>",
                escape(name),
                with_error(change.after),
                with_error(change.before),
            );
        }
        page.push_str("</div>\n");
    }

    fn answers(&self, page: &mut String) {
        let last = self.answers.iter().map(|answer| answer.step).max().unwrap_or(0);
        let side = |answers: Option<&Answer>| match answers.map(|answer| answer.text.trim()) {
            None => "<span class=\"empty\">not asked</span>".to_string(),
            Some("") => "<span class=\"empty\">nothing</span>".to_string(),
            Some(text) => escape(text),
        };
        let before: Vec<&Answer> = self.answers.iter().filter(|answer| answer.step == 0).collect();
        if before.is_empty() {
            return;
        }
        page.push_str("<h2>Answers before and after</h2>\n");
        for answer in before {
            let after =
                self.answers.iter().find(|other| other.step == last && last > 0 && other.id == answer.id);
            let _ = writeln!(
                page,
                "<div class=\"sample\"><div class=\"prompt\">{}</div><div class=\"sides\"><div><small>before</small>{}</div>\
                 <div><small>after {last} steps</small>{}</div></div></div>",
                escape(answer.prompt.trim()),
                side(Some(answer)),
                side(after),
            );
        }
    }

    fn charts(&self, page: &mut String) {
        page.push_str("<h2>Curves</h2>\n<div class=\"charts\">\n");
        let names = self.names();
        // The loss first, then held-out quality, then the rest by name.
        let rank = |name: &&str| match *name {
            "loss" | "reward" => 0,
            "rewards/accuracies" | "accuracy" | "objective/kl" => 1,
            "rewards/margins" | "margin" | "perplexity" => 2,
            _ => 3,
        };
        let elsewhere = |name: &&str| {
            name.starts_with("timing_s/") || name.starts_with("warnings/") || self.in_panel(name)
        };
        let (level, mut moving): (Vec<&str>, Vec<&str>) =
            names.into_iter().filter(|name| !elsewhere(name)).partition(|name| self.level(name).is_some());
        moving.sort_by_key(|name| (rank(name), *name));
        for name in moving {
            self.chart(page, name, None);
        }
        page.push_str("</div>\n");
        if level.is_empty() {
            return;
        }
        page.push_str("<h3>The same at every step</h3>\n<p class=\"level\">");
        for (name, value) in level.into_iter().filter_map(|name| Some((name, self.level(name)?))) {
            let _ = write!(page, "<span><code>{}</code> {}</span> ", escape(name), number(value));
        }
        page.push_str("</p>\n");
    }

    /// A metric's value, where it has but one.
    fn level(&self, name: &str) -> Option<f64> {
        let mut points = self.points(name).into_iter().chain(self.points(&format!("eval/{name}")));
        let (_, first) = points.next()?;
        points.all(|(_, value)| value.to_bits() == first.to_bits()).then_some(first)
    }

    /// One metric in training and held out; the steps are shaded at which the metric `marks` is there.
    fn chart(&self, page: &mut String, name: &str, marks: Option<&str>) {
        let held = format!("eval/{name}");
        let spread =
            self.points(&format!("{held}{STANDARD_ERROR}")).into_iter().map(|point| point.1).collect();
        let series = [
            Series { label: "training", points: self.points(name), spread: Vec::new() },
            Series { label: "held out", points: self.points(&held), spread },
        ];
        let marked: Vec<f64> =
            marks.map_or_else(Vec::new, |marks| self.points(marks)).iter().map(|point| point.0).collect();
        page.push_str(&figure(name, &meaning(name), &series, &marked));
    }

    fn numbers(&self, page: &mut String) {
        let held_out = self.held_out();
        if held_out.is_empty() {
            return;
        }
        page.push_str(
            "<h2>Held-out numbers</h2>\n<table><tr><th>metric</th><th class=\"n\">before</th>\
             <th class=\"n\">after</th><th class=\"n\">change</th></tr>\n",
        );
        for (name, change) in held_out {
            let _ = writeln!(
                page,
                "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escape(name),
                with_error(change.before),
                with_error(change.after),
                number(change.after.0 - change.before.0),
            );
        }
        page.push_str("</table>\n");
    }

    fn dictionary(&self, page: &mut String) {
        page.push_str(
            "<h2>What the metrics mean</h2>\n<table><tr><th>metric</th><th>meaning</th><th>healthy</th></tr>\n",
        );
        for entry in self.names().into_iter().filter_map(describe) {
            let _ = writeln!(
                page,
                "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
                escape(entry.name),
                escape(entry.meaning),
                escape(entry.healthy)
            );
        }
        page.push_str("</table>\n");
    }
}

/// What a metric is: as the dictionary says, or of a reward by its name.
fn meaning(name: &str) -> String {
    let of_reward = || name.strip_prefix("rewards/")?.rsplit_once('/');
    match (describe(name), of_reward()) {
        (Some(entry), _) => entry.meaning.into(),
        (None, Some((reward, "mean"))) => format!("mean score of reward {reward}, before its weight"),
        (None, Some((reward, "std"))) => {
            format!("standard deviation of reward {reward} among a prompt's responses, before its weight")
        }
        (None, Some((reward, "none"))) => {
            format!("share of the samples that reward {reward} has no score for")
        }
        _ => String::new(),
    }
}

/// A value with its standard error, before and after.
struct Change {
    before: (f64, Option<f64>),
    after: (f64, Option<f64>),
}

fn with_error((value, error): (f64, Option<f64>)) -> String {
    match error {
        Some(error) => format!("{} ± {}", number(value), number((error * 1e4).round() / 1e4)),
        None => number(value),
    }
}

/// Text made safe for HTML, also inside an attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stands_alone_and_escapes_what_a_model_says() {
        let record = |step, loss: f64| Record {
            step,
            values: BTreeMap::from([("loss".into(), loss), ("eval/loss".into(), loss)]),
        };
        let answer =
            |step, text: &str| Answer { step, id: "a".into(), prompt: "hi".into(), text: text.into() };
        let report = Report {
            title: "run",
            subtitle: "",
            records: &[record(0, 2.0), record(1, 1.0)],
            rollouts: &[],
            warnings: &[],
            judges: &[],
            answers: &[answer(0, "<script>alert(1)</script>"), answer(1, "better")],
            config: "a = 1",
        };
        let html = report.html();
        assert!(html.contains("&lt;script&gt;alert(1)") && html.contains("better"));
        assert!(!html.contains("http"), "nothing is fetched");
        assert!(html.contains("loss per token"), "the dictionary is there");
    }
}
