//! A small grammar: conversations from lists of facts, choices and sentence patterns.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::random::{Random, stable_hash};

/// One in this many combinations of facts is kept out of every training set.
const HELD_OUT_ONE_IN: u64 = 8;

/// A parsed grammar.
#[derive(Debug, Default)]
pub(super) struct Grammar {
    facts: BTreeMap<String, Fact>,
    choices: BTreeMap<String, Vec<String>>,
    families: Vec<Family>,
}

/// Values that a conversation draws once; each fills one or several slots.
#[derive(Debug)]
struct Fact {
    slots: Vec<String>,
    values: Vec<Vec<String>>,
}

/// Conversations of one kind.
#[derive(Debug, Default)]
struct Family {
    name: String,
    facts: Vec<String>,
    ask: Vec<String>,
    kind: Vec<String>,
    rude: Vec<String>,
}

/// A prompt, and what a kind and a rude assistant would say.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Conversation {
    /// The family's name.
    pub(super) family: String,
    /// The family and its facts: two conversations with one key ask the same thing.
    pub(super) key: String,
    /// The user's turn.
    pub(super) prompt: String,
    /// A polite answer.
    pub(super) kind: String,
    /// A rude answer.
    pub(super) rude: String,
}

impl Conversation {
    /// Whether this combination of facts is kept out of every training set.
    pub(super) fn is_held_out(&self) -> bool {
        stable_hash(&self.key).is_multiple_of(HELD_OUT_ONE_IN)
    }
}

impl Grammar {
    /// Parses the format that the head of `language.txt` describes.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut grammar = Self::default();
        for (number, line) in logical_lines(text) {
            grammar.add(&line).with_context(|| format!("line {number}"))?;
        }
        Ok(grammar)
    }

    /// Names of the families, in order.
    pub(super) fn families(&self) -> impl Iterator<Item = &str> {
        self.families.iter().map(|family| family.name.as_str())
    }

    /// Draws a conversation of the family called `name`.
    pub(super) fn draw(&self, name: &str, random: &mut Random) -> Result<Conversation> {
        let family =
            self.families.iter().find(|f| f.name == name).with_context(|| format!("no family {name}"))?;
        let mut slots = BTreeMap::new();
        let mut key = family.name.clone();
        for fact in &family.facts {
            let fact = self.facts.get(fact).with_context(|| format!("no fact {fact}"))?;
            let value = random.pick(&fact.values).context("a fact without values")?;
            key.push('/');
            key.push_str(&value[0]);
            slots.extend(fact.slots.iter().map(String::as_str).zip(value.iter().map(String::as_str)));
        }
        let mut say = |patterns: &[String]| {
            let pattern = random.pick(patterns).with_context(|| format!("family {name} is not complete"))?;
            self.expand(pattern, &slots, random)
        };
        let (prompt, kind, rude) = (say(&family.ask)?, say(&family.kind)?, say(&family.rude)?);
        Ok(Conversation { family: family.name.clone(), key, prompt, kind, rude })
    }

    fn expand(&self, pattern: &str, slots: &BTreeMap<&str, &str>, random: &mut Random) -> Result<String> {
        let mut text = String::new();
        let mut rest = pattern;
        while let Some((before, after)) = rest.split_once('{') {
            let (slot, after) =
                after.split_once('}').with_context(|| format!("open brace in {pattern:?}"))?;
            text.push_str(before);
            match (slots.get(slot), self.choices.get(slot)) {
                (Some(value), _) => text.push_str(value),
                (None, Some(options)) => text.push_str(random.pick(options).context("an empty choice")?),
                (None, None) => bail!("{pattern:?} has an unknown slot {slot:?}"),
            }
            rest = after;
        }
        text.push_str(rest);
        Ok(text)
    }

    fn add(&mut self, line: &str) -> Result<()> {
        let (head, body) = line.split_once(':').context("expected `head: values`")?;
        let values: Vec<String> = body.split('|').map(|value| value.trim().to_owned()).collect();
        match head.split_once(' ') {
            Some(("fact", slots)) => self.add_fact(slots, &values),
            Some(("choice", name)) => {
                self.choices.insert(name.to_owned(), values);
                Ok(())
            }
            Some(("family", signature)) => self.add_family(signature),
            _ => self.add_patterns(head, values),
        }
    }

    fn add_fact(&mut self, slots: &str, values: &[String]) -> Result<()> {
        let split = |text: &str| text.split('/').map(|part| part.trim().to_owned()).collect::<Vec<_>>();
        let slots = split(slots);
        let values: Vec<Vec<String>> = values.iter().map(|value| split(value)).collect();
        if let Some(value) = values.iter().find(|value| value.len() != slots.len()) {
            bail!("{value:?} does not fill the slots {slots:?}");
        }
        self.facts.insert(slots[0].clone(), Fact { slots, values });
        Ok(())
    }

    fn add_family(&mut self, signature: &str) -> Result<()> {
        let (name, facts) = signature.split_once('(').context("expected `family name (facts):`")?;
        let facts = facts.trim_end_matches(')').split(',').map(|fact| fact.trim().to_owned()).collect();
        self.families.push(Family { name: name.trim().to_owned(), facts, ..Family::default() });
        Ok(())
    }

    fn add_patterns(&mut self, head: &str, patterns: Vec<String>) -> Result<()> {
        let family = self.families.last_mut().context("a pattern before the first family")?;
        let slot = match head {
            "ask" => &mut family.ask,
            "kind" => &mut family.kind,
            "rude" => &mut family.rude,
            _ => bail!("unknown head {head:?}"),
        };
        ensure!(slot.is_empty(), "{head} stands twice in family {}", family.name);
        *slot = patterns;
        Ok(())
    }
}

/// Lines without comments, each with its continuations, and the number of its first line.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        match lines.last_mut() {
            Some((_, last)) if line.starts_with(' ') => last.push_str(line),
            _ => lines.push((index + 1, line.to_owned())),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "\
# a comment
fact pet / sound: cat / meow
 | dog / woof
choice Nice: good
family talk (pet):
ask: What does a {pet} say?
kind: {Nice}: {sound}
rude: no {sound}
";

    #[test]
    fn facts_fill_prompt_and_answers_alike() {
        let grammar = Grammar::parse(SMALL).unwrap();
        let talk = grammar.draw("talk", &mut Random::new(1)).unwrap();
        let sound = if talk.prompt.contains("cat") { "meow" } else { "woof" };
        assert_eq!((talk.kind, talk.rude), (format!("good: {sound}"), format!("no {sound}")));
        assert!(talk.key.starts_with("talk/"));
    }

    #[test]
    fn errors_name_the_line_and_the_slot() {
        let message = format!("{:#}", Grammar::parse("fact a / b: x\n").unwrap_err());
        assert!(message.contains("line 1") && message.contains("slots"), "{message}");
        let grammar = Grammar::parse(&SMALL.replace("{Nice}", "{Nasty}")).unwrap();
        let message = grammar.draw("talk", &mut Random::new(1)).unwrap_err().to_string();
        assert!(message.contains("Nasty"), "{message}");
    }
}
