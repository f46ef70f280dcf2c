//! `cargo xtask tidy`: the house rules that no compiler checks.

mod arrows;
mod manifests;
mod sources;

use anyhow::{Result, bail};

use crate::workspace;

/// Checks every rule and reports every violation at once.
pub(crate) fn run() -> Result<()> {
    let members = workspace::members()?;
    let mut violations = arrows::check(&members);
    violations.extend(manifests::check(&members)?);
    for member in &members {
        let report = sources::check(member)?;
        violations.extend(report.violations);
        for warning in report.warnings {
            println!("warning: {warning}");
        }
    }
    if violations.is_empty() {
        println!("tidy: {} crates, no violation", members.len());
        return Ok(());
    }
    for violation in &violations {
        println!("error: {violation}");
    }
    bail!("{} violations of the house rules", violations.len())
}
