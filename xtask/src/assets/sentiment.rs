//! Run files' rows from the labelled reviews: openings to go on from, and pairs of a good and a bad one.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Words of a review that are given to go on from.
const OPENING: usize = 4;

/// What every text starts with.
const PROMPT: &str = "Review:";

/// A review and whether it is good.
struct Review {
    text: String,
    good: bool,
}

/// Writes `imdb_openings.jsonl`, and `imdb_pairs.jsonl`, `yelp_pairs.jsonl`, `amazon_pairs.jsonl` beside the reviews.
pub(super) fn prepare(folder: &Path) -> Result<()> {
    let imdb = read(&folder.join("imdb.json"))?;
    let openings: Vec<Value> = imdb.iter().filter_map(opening).collect();
    write(&folder.join("imdb_openings.jsonl"), &openings)?;
    for name in ["imdb", "yelp", "amazon"] {
        let reviews = read(&folder.join(format!("{name}.json")))?;
        write(&folder.join(format!("{name}_pairs.jsonl")), &pairs(&reviews))?;
    }
    println!("sentiment: {} openings, and pairs, in {}", openings.len(), folder.display());
    Ok(())
}

fn read(path: &Path) -> Result<Vec<Review>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let rows: Vec<Value> = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let mut reviews: Vec<Review> = Vec::new();
    for row in rows {
        // The last row of each file is empty.
        let (Some(text), Some(class)) = (row["text"].as_str(), row["class"].as_u64()) else { continue };
        let text = text.trim();
        if !text.is_empty() && reviews.iter().all(|other| other.text != text) {
            reviews.push(Review { text: text.to_owned(), good: class == 1 });
        }
    }
    ensure!(!reviews.is_empty(), "{} holds no labelled review", path.display());
    Ok(reviews)
}

/// The first words of a review, where it is longer.
fn opening(review: &Review) -> Option<Value> {
    let words: Vec<&str> = review.text.split_whitespace().collect();
    (words.len() >= 2 * OPENING)
        .then(|| json!({"prompt": format!("{PROMPT} {}", words[..OPENING].join(" "))}))
}

/// The n-th good review with the n-th bad one, whatever they are of.
fn pairs(reviews: &[Review]) -> Vec<Value> {
    let of = |good: bool| reviews.iter().filter(move |review| review.good == good);
    let text = |review: &Review| format!(" {}", review.text);
    let pair = |(good, bad)| json!({"prompt": PROMPT, "chosen": text(good), "rejected": text(bad)});
    of(true).zip(of(false)).map(pair).collect()
}

fn write(path: &Path, rows: &[Value]) -> Result<()> {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    fs::write(path, lines.join("\n") + "\n").with_context(|| format!("cannot write {}", path.display()))
}
