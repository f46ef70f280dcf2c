//! Scores against those of the Python packages; `tests/golden/rewards/README.md` says how they were recorded.

use std::path::PathBuf;

use aligner_algos::rewards::{Check, polarity};
use serde_json::Value;

fn recorded(name: &str) -> Value {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let root = std::env::var_os("ALIGNER_GOLDEN").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = root.join("rewards").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn vader_scores_are_those_of_the_original() {
    let rows = recorded("vader.json");
    let rows = rows.as_array().unwrap();
    assert!(rows.len() > 400, "{} sentences", rows.len());
    for row in rows {
        let text = row["text"].as_str().unwrap();
        let ours = polarity(text);
        let pairs = [
            ("compound", ours.compound),
            ("pos", ours.positive),
            ("neu", ours.neutral),
            ("neg", ours.negative),
        ];
        for (key, value) in pairs {
            let expected = row[key].as_f64().unwrap();
            assert!((value - expected).abs() < 1e-9, "{text:?}: {key} is {value} for {expected}");
        }
    }
}

#[test]
fn checks_of_format_are_those_of_ifeval() {
    let recorded = recorded("format.json");
    let texts: Vec<&str> =
        recorded["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    let rows = recorded["checks"].as_array().unwrap();
    assert!(texts.len() > 300 && rows.len() > 70);
    let mut wrong = Vec::new();
    for row in rows {
        let (id, kwargs) = (row["id"].as_str().unwrap(), &row["kwargs"]);
        let check = Check::of_ifeval(id, kwargs).unwrap().unwrap_or_else(|| panic!("{id}: no check"));
        for (text, followed) in texts.iter().zip(row["followed"].as_str().unwrap().chars()) {
            if check.is_followed(text, "") != (followed == '1') {
                wrong.push(format!("{id} {kwargs}: {followed} for {text:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), texts.len() * rows.len(), wrong.join("\n"));
}
