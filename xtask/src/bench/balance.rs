//! `cargo xtask bench balance`: how long ranks wait for each other while they draw, as a table and a picture.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;

use super::{figure, succeed};
use crate::picture::{Bar, BarPanel, stacked_bars};
use crate::workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// The picture to write.
    #[arg(long, default_value = "docs/pictures/balance.svg")]
    out: PathBuf,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    succeed(Command::new("cargo").args(["build", "--release", "--workspace", "--example", "bench_balance"]))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let program = target.join("release/examples/bench_balance");
    let output =
        Command::new(&program).output().with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let (table, line) = text.trim_end().rsplit_once('\n').context("no table")?;
    println!("{table}");
    let line: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
    let path = root.join(&options.out);
    std::fs::write(&path, picture(&line)?).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", options.out.display());
    Ok(())
}

/// A bar for each rank: how long it drew, and how long it waited.
fn picture(line: &Value) -> Result<String> {
    let panels = line["panels"].as_array().context("no list `panels`")?;
    let parts = ["draws", "waits for the last rank"].map(String::from);
    let (mut drawn, mut said) = (Vec::new(), Vec::new());
    for panel in panels {
        let text = |name: &str| panel[name].as_str().with_context(|| format!("no text `{name}` in {panel}"));
        let (seconds, idle) = (figure(panel, "seconds")?, figure(panel, "idle")?);
        let heading = format!("{}, {}: {:.1} % idle", text("ranks")?, text("prompts")?, 100.0 * idle);
        let ends = panel["ends"].as_array().with_context(|| format!("no list `ends` in {panel}"))?;
        let bar = |(rank, end): (usize, &Value)| {
            let end = end.as_f64().with_context(|| format!("not a number: {end}"))?;
            Ok(Bar { label: format!("rank {rank}"), parts: vec![end, seconds - end], note: String::new() })
        };
        let bars = ends.iter().enumerate().map(bar).collect::<Result<Vec<_>>>()?;
        drawn.push(BarPanel { heading: heading.clone(), bars, unit: "s" });
        said.push(heading);
    }
    Ok(stacked_bars("Ranks that draw responses of long-tailed lengths", &said.join("; "), &parts, &drawn))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_picture_has_a_bar_for_each_rank_and_says_what_is_idle() {
        let panel = json!({ "ranks": "2 threads", "prompts": "static", "seconds": 4.0, "idle": 0.25, "ends": [4.0, 2.0] });
        let svg = picture(&json!({ "panels": [panel] })).unwrap();
        assert!(svg.contains("2 threads, static: 25.0 % idle"), "{svg}");
        // The card, two of the legend, and three parts: the last rank waits for nobody.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 3);
        assert!(picture(&json!({ "panels": [{ "ranks": "2" }] })).is_err());
    }
}
