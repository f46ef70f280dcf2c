//! How many legs several kinds of animals have together.

use aligner_core::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use super::draws::Draws;
use super::{Task, TaskRow, check_range};

const NAME: &str = "leg_counting";

/// Legs of each animal.
const ANIMALS: [(&str, u64); 37] = [
    ("snake", 0),
    ("sea slug", 0),
    ("jellyfish", 0),
    ("flatworm", 0),
    ("leech", 0),
    ("chicken", 2),
    ("bird", 2),
    ("human", 2),
    ("duck", 2),
    ("dog", 4),
    ("cat", 4),
    ("cow", 4),
    ("horse", 4),
    ("lion", 4),
    ("elephant", 4),
    ("giraffe", 4),
    ("tiger", 4),
    ("deer", 4),
    ("sheep", 4),
    ("starfish", 5),
    ("insect", 6),
    ("ant", 6),
    ("butterfly", 6),
    ("beetle", 6),
    ("bee", 6),
    ("wasp", 6),
    ("grasshopper", 6),
    ("cricket", 6),
    ("cockroach", 6),
    ("praying mantis", 6),
    ("firefly", 6),
    ("spider", 8),
    ("scorpion", 8),
    ("crab", 10),
    ("lobster", 10),
    ("shrimp", 10),
    ("woodlouse", 14),
];

/// Settings of [`LegCounting`]; names and defaults as in `reasoning-gym`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LegCountingConfig {
    /// Fewest kinds of animals.
    pub min_animals: usize,
    /// Most kinds of animals, up to 37.
    pub max_animals: usize,
    /// Fewest of each kind.
    pub min_instances: u64,
    /// Most of each kind, up to a million.
    pub max_instances: u64,
}

impl Default for LegCountingConfig {
    fn default() -> Self {
        Self { min_animals: 3, max_animals: 10, min_instances: 1, max_instances: 15 }
    }
}

/// How many legs are there in total if you have 3 dogs, 1 spider?
#[derive(Debug, Clone, Copy)]
pub struct LegCounting {
    config: LegCountingConfig,
}

impl LegCounting {
    /// The task with these settings.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] for ranges that are empty or too wide.
    pub fn new(config: LegCountingConfig) -> Result<Self> {
        check_range(
            ("min_animals", config.min_animals),
            ("max_animals", config.max_animals),
            1..=ANIMALS.len(),
        )?;
        check_range(
            ("min_instances", config.min_instances),
            ("max_instances", config.max_instances),
            1..=1_000_000,
        )?;
        Ok(Self { config })
    }
}

impl Task for LegCounting {
    fn name(&self) -> &'static str {
        NAME
    }

    fn sample(&self, seed: u64, index: u64) -> Result<TaskRow> {
        let config = &self.config;
        let mut draws = Draws::new(NAME, seed, index);
        let kinds = draws.count(config.min_animals, config.max_animals);
        let mut animals = ANIMALS;
        draws.shuffle(&mut animals);
        let (mut listed, mut counts, mut legs) = (Vec::new(), Map::new(), 0);
        for (animal, each) in &animals[..kinds] {
            let count = config.min_instances + draws.below(config.max_instances - config.min_instances + 1);
            listed.push(format!("{count} {animal}{}", if count > 1 { "s" } else { "" }));
            counts.insert((*animal).into(), count.into());
            legs += count * each;
        }
        let prompt = format!(
            "Your task is to count how many legs there are in total when given a list of animals.\n\n\
             Now, how many legs are there in total if you have {}?\n",
            listed.join(", ")
        );
        let metadata = json!({
            "task": NAME,
            "prompt": prompt,
            "answer": legs.to_string(),
            "animals": counts,
        });
        Ok(TaskRow { id: format!("{NAME}/{seed}/{index}"), prompt, metadata })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_counts_the_legs_of_the_list() {
        let config = LegCountingConfig { min_animals: 37, max_animals: 37, ..LegCountingConfig::default() };
        let task = LegCounting::new(config).expect("settings");
        for index in 0..20 {
            let row = task.sample(2, index).expect("questions");
            let counts = row.metadata["animals"].as_object().expect("a table");
            assert_eq!(counts.len(), 37, "each animal once");
            let legs: u64 =
                ANIMALS.iter().map(|(animal, each)| each * counts[*animal].as_u64().expect("a count")).sum();
            assert_eq!(row.metadata["answer"], legs.to_string());
            for (animal, count) in counts {
                let plural = if count.as_u64() > Some(1) { "s" } else { "" };
                assert!(row.prompt.contains(&format!("{count} {animal}{plural}")), "{}", row.prompt);
            }
        }
    }

    #[test]
    fn ranges_that_cannot_work_are_named() {
        let refused = |config| LegCounting::new(config).expect_err("no range").to_string();
        let base = LegCountingConfig::default();
        assert!(refused(LegCountingConfig { max_animals: 38, ..base }).starts_with("max_animals: "));
        assert!(refused(LegCountingConfig { min_instances: 0, ..base }).starts_with("min_instances: "));
    }
}
