//! The samples that a run has learned from, as a table.

use std::fmt::Write as _;

use super::chart::to_thousandths;
use super::escape;
use crate::rundir::Drawn;

/// Rows that the page shows at most, of the first and the last steps.
const SHOWN: usize = 60;

/// Adds the table, where there are samples.
pub(super) fn table(rollouts: &[Drawn], page: &mut String) {
    if rollouts.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Samples that were learned from</h2>\n<table class=\"rollouts\"><tr><th class=\"n\">step</th><th>prompt</th>\
         <th>response</th><th class=\"n\">reward</th><th>parts</th><th class=\"n\">KL</th><th class=\"n\">tokens</th></tr>\n",
    );
    let half = SHOWN / 2;
    let late = rollouts.len().saturating_sub(half).max(half.min(rollouts.len()));
    for one in rollouts.iter().take(half).chain(&rollouts[late..]) {
        let parts: Vec<String> = one
            .parts
            .iter()
            .map(|(name, value)| format!("{} {}", escape(name), to_thousandths(f64::from(*value))))
            .collect();
        let _ = writeln!(
            page,
            "<tr><td class=\"n\">{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"parts\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}{}</td></tr>",
            one.step,
            escape(one.prompt.trim()),
            escape(one.text.trim()),
            one.reward.map_or("-".into(), |reward| to_thousandths(f64::from(reward))),
            parts.join("<br>"),
            one.kl.map_or("-".into(), to_thousandths),
            one.tokens,
            if one.ended { "" } else { " cut" },
        );
    }
    page.push_str("</table>\n");
}
