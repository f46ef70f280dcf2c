//! Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): which linears have one, of which rank and scale.

pub(super) mod rows;
mod saved;
mod targets;

use std::collections::BTreeSet;

pub use saved::SavedParameter;
pub use targets::Targets;

use super::ModelConfig;
use crate::{Error, ParamId, Result};

/// An adapter's settings. Names and defaults are those of PEFT's `LoraConfig`, and the targets those that
/// it takes for the Llama family.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// Rank of the addition.
    pub r: usize,
    /// The addition is scaled by `alpha / r`.
    pub alpha: f64,
    /// The linears that get an addition.
    pub targets: Targets,
    /// Whether the addition is scaled by `alpha / sqrt(r)` instead (Kalajdzievski 2023, arXiv:2312.03732).
    pub rslora: bool,
    /// Share of the elements that A sees as 0 in training.
    pub dropout: f64,
    /// Whether each row's length is trained apart from its direction (Liu et al. 2024, arXiv:2402.09353).
    pub dora: bool,
    /// Ranks of linears other than `r`, by name or the end of a name; the first that fits counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// The same for `alpha`.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules that are trained in full beside it, by the ends of their names: `embed_tokens`, `lm_head`, `norm`. A score
    /// head is always.
    pub modules_to_save: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            alpha: 8.0,
            targets: Targets::Names(vec!["q_proj".into(), "v_proj".into()]),
            rslora: false,
            dropout: 0.0,
            dora: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            modules_to_save: Vec::new(),
        }
    }
}

impl LoraConfig {
    /// Everything that is wrong with the settings, whatever the model; keys are the fields' names.
    pub fn errors(&self) -> Vec<Error> {
        let mut errors = Vec::new();
        if self.r == 0 {
            errors.push(Error::setting("r", "must be at least 1"));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            errors.push(Error::setting("alpha", format!("must be finite and above 0, got {}", self.alpha)));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let message = format!("must be at least 0 and below 1, got {}", self.dropout);
            errors.push(Error::setting("dropout", message));
        }
        if self.targets == Targets::Names(Vec::new()) {
            errors.push(Error::setting("targets", "names no linear"));
        }
        for (name, _) in self.rank_pattern.iter().filter(|(_, rank)| *rank == 0) {
            errors.push(Error::setting("rank_pattern", format!("{name}: must be at least 1")));
        }
        for (name, alpha) in
            self.alpha_pattern.iter().filter(|(_, alpha)| !(alpha.is_finite() && *alpha > 0.0))
        {
            let message = format!("{name}: must be finite and above 0, got {alpha}");
            errors.push(Error::setting("alpha_pattern", message));
        }
        errors
    }

    /// The rank of a linear.
    pub fn rank(&self, linear: &str) -> usize {
        targets::first(&self.rank_pattern, linear).unwrap_or(self.r)
    }

    /// What the addition to a linear is multiplied by, where its rank is `rank`.
    pub fn scale(&self, linear: &str, rank: usize) -> f32 {
        let alpha = targets::first(&self.alpha_pattern, linear).unwrap_or(self.alpha);
        let rank = rank as f64;
        (alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// An adapter of one model: its settings, and the linears that it adds to.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The settings.
    pub config: LoraConfig,
    /// The linears, in the model's order.
    pub modules: Vec<AdapterModule>,
    /// The base's parameters that are trained in full, in the model's order.
    pub saved: Vec<SavedParameter>,
}

/// The addition to one linear.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterModule {
    /// The linear's name, `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rank of the addition.
    pub rank: usize,
    /// What it is multiplied by.
    pub scale: f32,
    /// `[out, in]` of the linear's weight.
    pub shape: [usize; 2],
}

/// The ends of the names of an adapter's parameters, after the linear's.
pub(crate) const A: &str = ".lora_A.weight";
pub(crate) const B: &str = ".lora_B.weight";
pub(crate) const MAGNITUDE: &str = ".lora_magnitude_vector";

impl Adapter {
    /// The adapter that the settings describe on a model of this shape.
    ///
    /// # Errors
    /// [`Error::Setting`] for a setting out of range, and for a name that no linear has, with the nearest.
    pub fn new(config: LoraConfig, model: &ModelConfig) -> Result<Self> {
        if let Some(error) = config.errors().into_iter().next() {
            return Err(error);
        }
        let linears = model.linears();
        let names: Vec<&str> = linears.iter().map(|(name, _)| name.as_str()).collect();
        config.targets.check(&names)?;
        let chosen = linears.into_iter().filter(|(name, _)| config.targets.hold(name));
        let module = |(name, shape): (String, [usize; 2])| {
            let rank = config.rank(&name);
            AdapterModule { scale: config.scale(&name, rank), name, rank, shape }
        };
        let modules = chosen.map(module).collect();
        Self::of_modules(config, modules, model)
    }

    /// The adapter of these linears, with the modules that are trained in full.
    ///
    /// # Errors
    /// [`Error::Setting`] for a module that is not there or cannot be trained so.
    pub(crate) fn of_modules(
        config: LoraConfig,
        modules: Vec<AdapterModule>,
        model: &ModelConfig,
    ) -> Result<Self> {
        let saved = saved::saved(&config.modules_to_save, model, &modules)?;
        Ok(Self { config, modules, saved })
    }

    /// Whether a parameter of the base is trained in full.
    pub fn saves(&self, name: &str) -> bool {
        self.saved.iter().any(|(own, _)| own == name)
    }

    /// Names and shapes of the adapter's parameters.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let dora = self.config.dora;
        let of_module = |AdapterModule { name, rank, shape: [outputs, inputs], .. }: &AdapterModule| {
            let both =
                [(format!("{name}{A}"), vec![*rank, *inputs]), (format!("{name}{B}"), vec![*outputs, *rank])];
            both.into_iter().chain(dora.then(|| (format!("{name}{MAGNITUDE}"), vec![*outputs])))
        };
        self.modules.iter().flat_map(of_module).collect()
    }

    /// Whether a parameter is an adapter's, by the end of its name.
    pub fn owns(name: &str) -> bool {
        [A, B, MAGNITUDE].iter().any(|end| name.ends_with(end))
    }

    /// How many parameters of the base are trained in full.
    pub fn num_saved(&self) -> usize {
        self.saved.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// How many parameters the adapter has.
    pub fn num_params(&self) -> usize {
        self.parameters().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// What the settings say, in one line.
    pub fn describe(&self) -> String {
        let LoraConfig { r, alpha, rslora, dora, .. } = &self.config;
        let kinds: BTreeSet<&str> = self.modules.iter().map(|module| kind(&module.name)).collect();
        let kinds: Vec<&str> = kinds.into_iter().collect();
        let flags = [(*rslora, ", rsLoRA"), (*dora, ", DoRA")];
        let flags: String = flags.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let count = self.modules.len();
        let saved = match self.config.modules_to_save.as_slice() {
            [] => String::new(),
            names => format!("; in full: {}", names.join(", ")),
        };
        format!("rank {r}, alpha {alpha}{flags}, on {count} linears: {}{saved}", kinds.join(", "))
    }
}

/// The last part of a linear's name.
fn kind(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Where the parameters of a linear's addition stand in a set.
#[derive(Debug, Clone, Copy)]
pub struct Lora {
    /// `[rank, in]`.
    pub a: ParamId,
    /// `[out, rank]`.
    pub b: ParamId,
    /// The length of each row, `[out]`, where it is trained apart.
    pub magnitude: Option<ParamId>,
    /// What the addition is multiplied by.
    pub scale: f32,
    /// The module's place in the adapter.
    pub module: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model() -> ModelConfig {
        let json = json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        });
        ModelConfig::from_json("tiny".as_ref(), &json).unwrap()
    }

    fn names(list: &[&str]) -> Targets {
        Targets::Names(list.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_defaults_are_those_of_peft() {
        let adapter = Adapter::new(LoraConfig::default(), &model()).unwrap();
        let found: Vec<&str> = adapter.modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(found[..2], ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]);
        assert_eq!((found.len(), adapter.modules[1].shape, adapter.modules[1].rank), (4, [8, 16], 8));
        assert!((adapter.modules[0].scale - 1.0).abs() < 1e-9);
        let (name, shape) = &adapter.parameters()[3];
        assert_eq!(
            (name.as_str(), shape.as_slice()),
            ("model.layers.0.self_attn.v_proj.lora_B.weight", &[8, 8][..])
        );
        assert_eq!(adapter.num_params(), 2 * (8 * 16 + 16 * 8 + 8 * 16 + 8 * 8));
        assert_eq!(adapter.describe(), "rank 8, alpha 8, on 4 linears: q_proj, v_proj");
    }

    #[test]
    fn patterns_and_rs_lora_decide_rank_and_scale() {
        let config = LoraConfig {
            targets: Targets::AllLinear,
            alpha: 6.0,
            rslora: true,
            rank_pattern: vec![("layers.1.mlp.up_proj".into(), 2), ("up_proj".into(), 4)],
            alpha_pattern: vec![("gate_proj".into(), 12.0)],
            ..LoraConfig::default()
        };
        let adapter = Adapter::new(config, &model()).unwrap();
        assert_eq!(adapter.modules.len(), 14);
        let of = |name: &str| adapter.modules.iter().find(|module| module.name.ends_with(name)).unwrap();
        assert_eq!(
            [of("0.mlp.up_proj").rank, of("1.mlp.up_proj").rank, of("1.mlp.down_proj").rank],
            [4, 2, 8]
        );
        assert!((of("0.mlp.up_proj").scale - 3.0).abs() < 1e-6);
        assert!((of("0.mlp.gate_proj").scale - 12.0 / 8f32.sqrt()).abs() < 1e-6);
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let base = LoraConfig::default;
        for (config, part) in [
            (LoraConfig { r: 0, ..base() }, "r: must be at least 1"),
            (LoraConfig { alpha: 0.0, ..base() }, "alpha: must be finite and above 0"),
            (LoraConfig { dropout: 1.0, ..base() }, "dropout: must be at least 0 and below 1"),
            (LoraConfig { targets: names(&[]), ..base() }, "targets: names no linear"),
            (
                LoraConfig { rank_pattern: vec![("up".into(), 0)], ..base() },
                "rank_pattern: up: must be at least 1",
            ),
            (LoraConfig { targets: names(&["q_proj", "q_prj"]), ..base() }, "did you mean `q_proj`?"),
            (LoraConfig { targets: names(&["attention.wq"]), ..base() }, "q_proj, k_proj"),
            (LoraConfig { targets: names(&["lm_head"]), ..base() }, "the layers' linears alone"),
            (LoraConfig { modules_to_save: vec!["lm_haed".into()], ..base() }, "it has embed_tokens"),
            (LoraConfig { modules_to_save: vec!["q_proj".into()], ..base() }, "not both"),
        ] {
            let message = Adapter::new(config, &model()).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
