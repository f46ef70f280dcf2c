//! The JSON lines by which programs and services are asked for scores.
//!
//! A request is one line a sample, `{"id": 7, "prompt": "…", "response": "…", "metadata": {…}}`; the answer to it is
//! one line, with one of `"score": 0.5`, `"score": null` (no score) and `"scores": […]` (one a token), in any order.

use std::fmt::Write as _;

use aligner_core::{Error, Result, Sample, Score};
use serde_json::{Map, Value, json};

use super::{prompt_text, sample_name, sample_names};

/// Characters of a faulty line that an error shows.
const SHOWN_CHARS: usize = 200;

/// The line that asks for a sample's score, its end included. It is ASCII, whatever the texts are: so no program's
/// idea of an encoding matters.
pub(super) fn request(id: u64, sample: &Sample, with_tokens: bool) -> String {
    let mut request = json!({
        "id": id,
        "prompt": prompt_text(sample),
        "response": sample.text,
        "metadata": sample.metadata,
    });
    if with_tokens {
        request["tokens"] = json!(sample.tokens);
        request["mask"] = json!(sample.mask);
    }
    let mut line = ascii(&request.to_string());
    line.push('\n');
    line
}

/// JSON with everything that is not ASCII escaped.
fn ascii(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 1);
    for symbol in text.chars() {
        if symbol.is_ascii() {
            escaped.push(symbol);
            continue;
        }
        for unit in symbol.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    }
    escaped
}

/// The answers to the requests for some of a batch's samples.
pub(super) struct Answers<'s> {
    samples: &'s [Sample],
    /// Places of the samples that were asked for; the request for `places[i]` has the id `first_id + i`.
    places: &'s [usize],
    first_id: u64,
    /// `[places]`; none until the answer comes.
    scores: Vec<Option<Score>>,
    left: usize,
}

impl<'s> Answers<'s> {
    pub(super) fn new(samples: &'s [Sample], places: &'s [usize], first_id: u64) -> Self {
        Self { samples, places, first_id, scores: vec![None; places.len()], left: places.len() }
    }

    /// The requests that have no answer yet, one line each.
    pub(super) fn requests(&self, with_tokens: bool) -> String {
        let unanswered =
            self.places.iter().zip(&self.scores).enumerate().filter(|(_, (_, score))| score.is_none());
        unanswered
            .map(|(at, (&place, _))| request(self.first_id + at as u64, &self.samples[place], with_tokens))
            .collect()
    }

    pub(super) fn are_complete(&self) -> bool {
        self.left == 0
    }

    /// Names of the samples that have no answer yet.
    pub(super) fn missing(&self) -> String {
        let unanswered = self.places.iter().zip(&self.scores).filter(|(_, score)| score.is_none());
        sample_names(&unanswered.map(|(&place, _)| place).collect::<Vec<_>>(), self.samples)
    }

    /// Takes an answer.
    ///
    /// # Errors
    /// What is wrong with the line, and the sample that it is for or that an answer is still awaited for.
    pub(super) fn take(&mut self, line: &str) -> Result<(), String> {
        let waiting = || match self.scores.iter().position(Option::is_none) {
            Some(at) => format!("while {} waits for its score", self.name(at)),
            None => "after all scores had come".into(),
        };
        let answer: Value = serde_json::from_str(line)
            .map_err(|error| format!("is not JSON ({error}) {}: {}", waiting(), shown(line)))?;
        let Value::Object(answer) = answer else {
            return Err(format!("is no JSON object {}: {}", waiting(), shown(line)));
        };
        let id = answer.get("id").and_then(Value::as_u64);
        let Some(id) = id else {
            return Err(format!("has no whole number `id` {}: {}", waiting(), shown(line)));
        };
        let at = id.checked_sub(self.first_id).map(|at| at as usize).filter(|at| *at < self.places.len());
        let Some(at) = at else {
            return Err(format!(
                "answers the id {id}, which was not asked for {}: {}",
                waiting(),
                shown(line)
            ));
        };
        if self.scores[at].is_some() {
            return Err(format!("is a second answer for {}: {}", self.name(at), shown(line)));
        }
        let score = score(&answer, &self.samples[self.places[at]])
            .map_err(|message| format!("for {} {message}: {}", self.name(at), shown(line)))?;
        self.scores[at] = Some(score);
        self.left -= 1;
        Ok(())
    }

    fn name(&self, at: usize) -> String {
        let place = self.places[at];
        sample_name(place, &self.samples[place])
    }

    /// The scores, `[places]`.
    ///
    /// # Errors
    /// Names the samples that have none.
    pub(super) fn into_scores(self) -> Result<Vec<Score>> {
        if self.left > 0 {
            return Err(Error::Invalid(format!("no score came for {}", self.missing())));
        }
        Ok(self.scores.into_iter().flatten().collect())
    }
}

/// The score of an answer.
fn score(answer: &Map<String, Value>, sample: &Sample) -> Result<Score, String> {
    if let Some(key) = answer.keys().find(|key| !["id", "score", "scores"].contains(&key.as_str())) {
        return Err(format!("has an unknown key `{key}`"));
    }
    match (answer.get("score"), answer.get("scores")) {
        (Some(Value::Null), None) => Ok(Score::None),
        (Some(score), None) => match score.as_f64() {
            Some(score) => Ok(Score::Sample(score as f32)),
            None => Err("must have a number or null as its `score`".into()),
        },
        (None, Some(scores)) => {
            let scores = scores.as_array().and_then(|scores| scores.iter().map(Value::as_f64).collect());
            let scores: Vec<f64> = scores.ok_or("must have a list of numbers as its `scores`")?;
            token_scores(&scores, sample)
        }
        (Some(_), Some(_)) => Err("has both `score` and `scores`".into()),
        (None, None) => Err("has neither `score` nor `scores`".into()),
    }
}

/// Scores of all tokens, or of those that the mask marks; the others then have 0.
fn token_scores(scores: &[f64], sample: &Sample) -> Result<Score, String> {
    let marked = sample.mask.iter().filter(|marked| **marked).count();
    if scores.len() == sample.tokens.len() {
        return Ok(Score::Tokens(scores.iter().map(|score| *score as f32).collect()));
    }
    if scores.len() != marked {
        let (got, all) = (scores.len(), sample.tokens.len());
        return Err(format!("has {got} `scores` for {marked} tokens of the response and {all} in all"));
    }
    let mut rest = scores.iter();
    let spread = sample
        .mask
        .iter()
        .map(|marked| if *marked { rest.next().map_or(0.0, |score| *score as f32) } else { 0.0 });
    Ok(Score::Tokens(spread.collect()))
}

/// The beginning of a line, quoted.
fn shown(line: &str) -> String {
    let mut beginning: String = line.chars().take(SHOWN_CHARS).collect();
    if beginning.len() < line.len() {
        beginning.push('…');
    }
    format!("{beginning:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Sample> {
        let text = |text: &str| Sample { text: text.into(), ..Sample::response(&[1, 2], &[3, 4, 5]) };
        let mut samples = ["a", "b", "c"].map(text).to_vec();
        samples[2].metadata = json!({"id": "row 9", "prompt": "Say \u{1F600} or é"});
        samples
    }

    fn refused(lines: &[&str]) -> String {
        let samples = samples();
        let mut answers = Answers::new(&samples, &[0, 2], 10);
        let (last, before) = lines.split_last().expect("a line");
        for line in before {
            answers.take(line).expect("sound");
        }
        answers.take(last).expect_err("faulty")
    }

    #[test]
    fn requests_are_ascii_lines_of_what_is_asked() {
        let samples = samples();
        let line = request(7, &samples[2], false);
        assert!(line.is_ascii() && line.ends_with("}\n") && line.matches('\n').count() == 1, "{line}");
        let value: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["prompt"], "Say \u{1F600} or é");
        assert_eq!(
            (&value["id"], &value["response"], &value["metadata"]["id"]),
            (&json!(7), &json!("c"), &json!("row 9"))
        );
        let value: Value = serde_json::from_str(&request(7, &samples[0], true)).expect("JSON");
        assert_eq!(value["tokens"], json!([1, 2, 3, 4, 5]));
        assert_eq!(value["mask"], json!([false, false, true, true, true]));
    }

    #[test]
    fn answers_come_in_any_order_and_of_any_kind() {
        let samples = samples();
        let mut answers = Answers::new(&samples, &[0, 1, 2], 10);
        assert_eq!(answers.requests(false).lines().count(), 3);
        answers.take(r#"{"id": 12, "score": null}"#).expect("sound");
        answers.take(r#"{"score": -2, "id": 10}"#).expect("sound");
        assert_eq!(answers.missing(), "sample 1");
        assert_eq!(answers.requests(false).lines().count(), 1);
        answers.take(r#"{"id": 11, "scores": [1, 2, 3.5]}"#).expect("sound");
        assert!(answers.are_complete());
        let scores = [Score::Sample(-2.0), Score::Tokens(vec![0.0, 0.0, 1.0, 2.0, 3.5]), Score::None];
        assert_eq!(answers.into_scores().expect("complete"), scores);
    }

    #[test]
    fn token_scores_may_cover_the_prompt() {
        let samples = samples();
        let mut answers = Answers::new(&samples, &[0], 0);
        answers.take(r#"{"id": 0, "scores": [1, 2, 3, 4, 5]}"#).expect("sound");
        assert_eq!(answers.into_scores().expect("complete"), [Score::Tokens(vec![1.0, 2.0, 3.0, 4.0, 5.0])]);
    }

    #[test]
    fn faulty_lines_say_what_and_for_which_sample() {
        let answer = r#"{"id": 10, "score": 1}"#;
        let cases = [
            ("Traceback", "sample 0 waits"),
            (r#"{"id": 10, "score": NaN}"#, "sample 0 waits"),
            ("[1]", "no JSON object"),
            (r#"{"score": 1}"#, "`id`"),
            (r#"{"id": -1, "score": 1}"#, "`id`"),
            (r#"{"id": 12, "score": 1}"#, "12, which was not asked for"),
            (r#"{"id": 9, "score": 1}"#, "9, which was not asked for"),
            (r#"{"id": 11}"#, "sample 2 (row 9) has neither"),
            (r#"{"id": 11, "score": 1, "scores": [1]}"#, "sample 2 (row 9) has both"),
            (r#"{"id": 11, "score": true}"#, "number or null"),
            (r#"{"id": 11, "scores": ["a"]}"#, "list of numbers"),
            (r#"{"id": 11, "scores": [1, 2]}"#, "2 `scores` for 3 tokens"),
            (r#"{"id": 11, "score": 1, "reward": 1}"#, "unknown key `reward`"),
        ];
        for (line, expected) in cases {
            let message = refused(&[line]);
            assert!(message.contains(expected), "{line}: {message}");
        }
        assert!(refused(&[answer, answer]).contains("second answer for sample 0"));
        assert!(refused(&[answer, "x"]).contains("sample 2 (row 9) waits"));
        assert!(refused(&[&"x".repeat(10_000)]).len() < 500);
    }

    #[test]
    fn too_few_answers_name_the_samples() {
        let samples = samples();
        let mut answers = Answers::new(&samples, &[0, 1, 2], 0);
        answers.take(r#"{"id": 1, "score": 1}"#).expect("sound");
        let message = answers.into_scores().expect_err("two are missing").to_string();
        assert_eq!(message, "no score came for sample 0, sample 2 (row 9)");
    }
}
