//! Which linears an adapter adds to, by their names.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::kind;
use crate::{Error, Result};

/// The name that stands for all linears of the layers, as in PEFT.
const ALL_LINEAR: &str = "all-linear";

/// Which linears get an addition: `"all-linear"`, or a list of names such as `"q_proj"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// All linears of the layers; the head has none.
    AllLinear,
    /// Those of these names, whole or their ends: `q_proj`, `mlp.down_proj`, `model.layers.3.self_attn.o_proj`.
    Names(Vec<String>),
}

impl Targets {
    /// Whether a linear is among them.
    pub fn hold(&self, linear: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Names(names) => names.iter().any(|name| fits(name, linear)),
        }
    }

    /// Whether each name is that of a linear.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first that is not, with the nearest or all.
    pub(super) fn check(&self, linears: &[&str]) -> Result<()> {
        let Self::Names(names) = self else { return Ok(()) };
        for name in names {
            if linears.iter().any(|linear| fits(name, linear)) {
                continue;
            }
            if ["lm_head", "embed_tokens", "score"].contains(&kind(name)) {
                let message = format!("`{name}`: the layers' linears alone take an adapter");
                return Err(Error::setting("targets", message));
            }
            let mut kinds: Vec<&str> = Vec::new();
            for linear in linears {
                if !kinds.contains(&kind(linear)) {
                    kinds.push(kind(linear));
                }
            }
            let message = format!("`{name}` is the name of no linear of the model; {}", advice(name, &kinds));
            return Err(Error::setting("targets", message));
        }
        Ok(())
    }
}

/// The nearest name, or all where none is near.
fn advice(name: &str, kinds: &[&str]) -> String {
    let distance = |kind: &&str| strsim::damerau_levenshtein(kind, name);
    match kinds.iter().copied().chain([ALL_LINEAR]).min_by_key(distance) {
        Some(near) if distance(&near) <= 3 => format!("did you mean `{near}`?"),
        _ => format!("there are {} and {ALL_LINEAR}", kinds.join(", ")),
    }
}

/// Whether a name, or the end of one, is that of a linear.
pub(super) fn fits(name: &str, linear: &str) -> bool {
    linear.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The value of the first name that fits.
pub(super) fn first<T: Copy>(pattern: &[(String, T)], linear: &str) -> Option<T> {
    pattern.iter().find(|(name, _)| fits(name, linear)).map(|(_, value)| *value)
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => serializer.serialize_str(ALL_LINEAR),
            Self::Names(names) => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TargetsVisitor)
    }
}

struct TargetsVisitor;

impl<'de> Visitor<'de> for TargetsVisitor {
    type Value = Targets;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a list of names, or \"{ALL_LINEAR}\"")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Targets, E> {
        Ok(if text == ALL_LINEAR { Targets::AllLinear } else { Targets::Names(vec![text.to_string()]) })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Targets, A::Error> {
        let mut names = Vec::new();
        while let Some(name) = access.next_element::<String>()? {
            names.push(name);
        }
        Ok(if names == [ALL_LINEAR] { Targets::AllLinear } else { Targets::Names(names) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_whole_parts() {
        let linear = "model.layers.11.self_attn.q_proj";
        for (name, expected) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            ("layers.11.self_attn.q_proj", true),
            (linear, true),
            ("proj", false),
            ("layers.1.self_attn.q_proj", false),
            ("1.self_attn.q_proj", false),
            ("model", false),
        ] {
            assert_eq!(fits(name, linear), expected, "{name}");
        }
    }

    #[test]
    fn both_spellings_are_read_and_written() {
        for (text, targets) in [
            ("\"all-linear\"", Targets::AllLinear),
            ("[\"q_proj\",\"k_proj\"]", Targets::Names(vec!["q_proj".into(), "k_proj".into()])),
        ] {
            assert_eq!(serde_json::from_str::<Targets>(text).unwrap(), targets);
            assert_eq!(serde_json::to_string(&targets).unwrap(), text);
        }
        assert_eq!(
            serde_json::from_str::<Targets>("\"o_proj\"").unwrap(),
            Targets::Names(vec!["o_proj".into()])
        );
        assert!(serde_json::from_str::<Targets>("3").unwrap_err().to_string().contains("a list of names"));
    }
}
