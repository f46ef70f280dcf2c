//! Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

mod config;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::atomic_write;
use super::safetensors_file::SafetensorsFile;
use super::save::{Elements, NamedTensor, SaveDtype, check_values, write_json, write_tensors};
use crate::model::{Adapter, AdapterModule, CausalLm, LoraConfig, ModelConfig, ParamSpec, Role, Targets};
use crate::model::{LORA_A, LORA_B, LORA_MAGNITUDE};
use crate::shard::Split;
use crate::{Error, ParamSet, Result};
use config::PeftConfig;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// What PEFT puts before the base's own names.
const PREFIX: &str = "base_model.model.";
const SCORE: &str = "score.weight";
const HEAD: &str = "lm_head.weight";
/// The key of the tensors' metadata that says how the base was held in training.
const BASE_WEIGHTS: &str = "base_weights";

/// An adapter on disk: its settings, names and shapes; tensors are read on demand.
#[derive(Debug)]
pub struct AdapterCheckpoint {
    path: PathBuf,
    config: PeftConfig,
    file: SafetensorsFile,
    /// Names in the file, by the names of the parameters.
    stored: BTreeMap<String, String>,
}

impl AdapterCheckpoint {
    /// Whether a directory holds an adapter.
    pub fn is_adapter(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Opens a directory that PEFT, or [`save_adapter`], has written. Settings and headers are checked;
    /// tensors are not read yet.
    ///
    /// # Errors
    /// A missing or damaged file; [`Error::Format`] names every key whose value asks for what is not
    /// supported, and every tensor that is no part of a low-rank adapter.
    pub fn open(path: &Path) -> Result<Self> {
        let config = PeftConfig::read(&path.join(CONFIG))?;
        let file = SafetensorsFile::open(&path.join(TENSORS))?;
        let (mut stored, mut strange) = (BTreeMap::new(), Vec::new());
        for name in file.names() {
            let own = name.strip_prefix(PREFIX).map(|own| match own.strip_suffix(".weight") {
                // Older versions write it as a module.
                Some(magnitude) if magnitude.ends_with(LORA_MAGNITUDE) => magnitude,
                _ => own,
            });
            match own.filter(|own| module_of(own).is_some() || config.saves(own)) {
                Some(own) => _ = stored.insert(own.to_string(), name.to_string()),
                None => strange.push(name),
            }
        }
        if let Some(first) = strange.first() {
            let message = format!(
                "{} tensors are no part of an adapter on linears, the first is {first}; expected names such as \
                 {PREFIX}model.layers.0.self_attn.q_proj{LORA_A}",
                strange.len()
            );
            return Err(Error::format(path.join(TENSORS), message));
        }
        Ok(Self { path: path.to_path_buf(), config, file, stored })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The base model as the adapter's file names it.
    pub fn base(&self) -> Option<&str> {
        self.config.base.as_deref()
    }

    /// How the base's weights were held while the adapter was trained, as its writer says it: `nf4` and the like; none
    /// where it does not, or whole.
    pub fn trained_on(&self) -> Option<&str> {
        self.file.metadata().get(BASE_WEIGHTS).map(String::as_str)
    }

    /// Shape of the score head that comes with the adapter.
    pub fn score(&self) -> Option<Vec<usize>> {
        self.file.shape(self.stored.get(SCORE)?).map(<[_]>::to_vec)
    }

    /// The adapter, on a model of this shape.
    ///
    /// # Errors
    /// [`Error::Format`] or [`Error::Shape`] names a linear that the model does not have or has in another
    /// shape, a rank other than the settings say, and a linear that they name and the file lacks.
    pub fn adapter(&self, model: &ModelConfig) -> Result<Adapter> {
        let linears = model.linears();
        if self.config.transposed && !model.has_transposed_weights() {
            let message = "fan_in_fan_out: expected it to be off: the base's weights are not transposed";
            return Err(Error::format(self.path.join(CONFIG), message));
        }
        let config = &self.config.lora;
        let wrong = |message: String| Err(Error::format(self.path.join(TENSORS), message));
        let names: BTreeSet<&str> = self.stored.keys().filter_map(|name| module_of(name)).collect();
        if names.is_empty() {
            return wrong("no linear has an adapter".into());
        }
        if let Some(name) = names.iter().find(|name| !linears.iter().any(|(linear, _)| linear == *name)) {
            let layers = model.num_layers;
            return wrong(format!(
                "{name} is no linear of the base model, which has {layers} layers; is this the adapter of another base?"
            ));
        }
        let mut modules = Vec::new();
        for (name, shape) in linears {
            if names.contains(name.as_str()) {
                modules.push(self.module(name, shape)?);
            } else if self.config.names_all && config.targets.hold(&name) {
                return wrong(format!("no tensors for {name}, which target_modules in {CONFIG} names"));
            }
        }
        self.check_tie(model)?;
        let modules_to_save = self.modules_to_save(model);
        let own = |module: &AdapterModule| module.name.clone();
        let targets = match &config.targets {
            targets if self.config.names_all => targets.clone(),
            _ => Targets::Names(modules.iter().map(own).collect()),
        };
        let config = LoraConfig { targets, modules_to_save, ..config.clone() };
        let adapter = Adapter::of_modules(config, modules, model)?;
        for (name, expected) in &adapter.saved {
            let stored = self.stored.get(name).and_then(|stored| self.file.shape(stored));
            match stored {
                Some(got) if got == expected => {}
                Some(got) => {
                    let what = format!("{}: tensor {PREFIX}{name}", self.path.display());
                    return Err(Error::shape(what, format!("{expected:?}"), got));
                }
                // The base's own head.
                None if name == SCORE => {}
                None => {
                    return wrong(format!("tensor {PREFIX}{name} is missing, which modules_to_save names"));
                }
            }
        }
        let is_saved = |name: &str| module_of(name).is_some() || adapter.saves(name);
        let is_tied = |name: &str| name == HEAD && model.tie_embeddings && self.config.tied;
        let strange = self.stored.keys().find(|name| !is_saved(name) && !is_tied(name) && *name != SCORE);
        if let Some(name) = strange {
            return wrong(format!("{name} is no parameter of the base model"));
        }
        Ok(adapter)
    }

    /// The modules that are trained in full and that the model has: PEFT adds names of heads that other models have.
    fn modules_to_save(&self, model: &ModelConfig) -> Vec<String> {
        let names = self.config.lora.modules_to_save.iter();
        let is_there = |name: &&String| {
            let head = model.tie_embeddings && *name == "lm_head";
            !head && CausalLm::parameters(model).iter().any(|spec| spec.is_of_module(name))
        };
        names.filter(is_there).cloned().collect()
    }

    /// Refuses a head of its own for a model in which it is the embedding.
    fn check_tie(&self, model: &ModelConfig) -> Result<()> {
        let is_tied = model.tie_embeddings && model.num_labels.is_none() && !self.config.tied;
        let is_table = |spec: &ParamSpec| spec.role == Role::Embedding && spec.split == Split::Outputs;
        let embedding = CausalLm::parameters(model).into_iter().find(is_table);
        let trained = embedding.filter(|spec| self.stored.contains_key(&spec.name)).map(|spec| spec.name);
        let trained = trained.or_else(|| self.stored.contains_key(HEAD).then(|| HEAD.to_string()));
        let Some(name) = trained.filter(|_| is_tied) else { return Ok(()) };
        let message = format!(
            "{name} is trained apart from what it is tied to (ensure_weight_tying is off), but the base has one matrix for both"
        );
        Err(Error::format(self.path.join(CONFIG), message))
    }

    fn module(&self, name: String, shape: [usize; 2]) -> Result<AdapterModule> {
        let (config, [outputs, inputs]) = (&self.config.lora, shape);
        let rank = config.rank(&name);
        let mut parts = vec![(LORA_A, vec![rank, inputs]), (LORA_B, vec![outputs, rank])];
        if config.dora {
            parts.push((LORA_MAGNITUDE, vec![outputs]));
        }
        for (end, expected) in parts {
            let own = format!("{name}{end}");
            let stored = self.stored.get(&own).and_then(|stored| self.file.shape(stored));
            let Some(got) = stored else {
                return Err(Error::format(
                    self.path.join(TENSORS),
                    format!("tensor {PREFIX}{own} is missing"),
                ));
            };
            if got != expected {
                let what = format!(
                    "{}: tensor {PREFIX}{own}, for rank {rank} on a linear of [{outputs}, {inputs}]",
                    self.path.display()
                );
                return Err(Error::shape(what, format!("{expected:?}"), got));
            }
        }
        let scale = config.scale(&name, rank);
        Ok(AdapterModule { name, rank, scale, shape })
    }

    /// The elements of a parameter of the base that the file has; none where it has none.
    ///
    /// # Errors
    /// A dtype that is not supported, a failed read.
    pub(crate) fn saved(&self, name: &str) -> Result<Option<Vec<f32>>> {
        self.stored.contains_key(name).then(|| self.read(name)).transpose()
    }

    /// The elements of a parameter, by its own name.
    ///
    /// # Errors
    /// A name that is not there, a dtype that is not supported, a failed read.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let absent = || Error::format(self.path.join(TENSORS), format!("no tensor for {name}"));
        Ok(self.file.read(self.stored.get(name).ok_or_else(absent)?)?.1)
    }
}

/// The linear that a parameter of an adapter belongs to.
fn module_of(name: &str) -> Option<&str> {
    [LORA_A, LORA_B, LORA_MAGNITUDE].into_iter().find_map(|end| name.strip_suffix(end))
}

/// Writes the adapter of a model, and the modules that are trained in full beside it, as files that PEFT loads. `base` is
/// what they say of the base model: its path or its name on the hub.
///
/// # Errors
/// A model without an adapter; [`Error::Io`] names the file; [`Error::Invalid`] names a parameter that is not
/// finite, or too large for `dtype`; then nothing has been written.
pub fn save_adapter(
    dir: &Path,
    config: &ModelConfig,
    params: &ParamSet,
    base: &str,
    dtype: SaveDtype,
) -> Result<()> {
    let Some(adapter) = &config.adapter else {
        return Err(Error::Invalid(format!("{}: not saved: the model has no adapter", dir.display())));
    };
    let own = |name: &str| module_of(name).is_some() || adapter.saves(name);
    let tied = saved_tie(adapter, config);
    let names: Vec<(String, usize)> = (params.iter().enumerate())
        .filter(|(_, param)| own(&param.name))
        .flat_map(|(at, param)| {
            // PEFT looks for what is tied under both names.
            let head = (Some(&param.name) == tied.as_ref()).then_some(HEAD);
            [Some(param.name.as_str()), head]
                .into_iter()
                .flatten()
                .map(move |name| (format!("{PREFIX}{name}"), at))
        })
        .collect();
    let all: Vec<_> = params.iter().collect();
    let tensors: Vec<NamedTensor<'_>> = (names.iter())
        .map(|(name, at)| NamedTensor {
            name,
            shape: &all[*at].shape,
            value: Elements::Held(&all[*at].value),
        })
        .collect();
    check_values(dir, &tensors, dtype)?;
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    if let Some(packed) = params.first_packed().and_then(|param| param.packed.as_ref()) {
        metadata.insert(BASE_WEIGHTS.into(), format!("{:?}", packed.kind()).to_lowercase());
    }
    atomic_write(&dir.join(TENSORS), |file| write_tensors(file, &tensors, dtype, &metadata))?;
    write_json(&dir.join(CONFIG), &peft_json(adapter, config, base))
}

/// The settings with the keys that every version of PEFT knows.
fn peft_json(adapter: &Adapter, model: &ModelConfig, base: &str) -> Value {
    let LoraConfig { r, alpha, rslora, dropout, dora, rank_pattern, alpha_pattern, .. } = &adapter.config;
    let scores = model.num_labels.is_some();
    let alphas = alpha_pattern.iter().map(|(name, alpha)| (name.clone(), number(*alpha)));
    let mut modules_to_save = adapter.config.modules_to_save.clone();
    if scores && !modules_to_save.iter().any(|name| name == "score") {
        modules_to_save.push("score".into());
    }
    let mut json = json!({
        "alpha_pattern": alphas.collect::<serde_json::Map<_, _>>(),
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": model.has_transposed_weights(),
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(*alpha),
        "lora_dropout": dropout,
        "modules_to_save": Some(modules_to_save).filter(|names| !names.is_empty()),
        "peft_type": "LORA",
        "r": r,
        "rank_pattern": rank_pattern.iter().cloned().collect::<BTreeMap<_, _>>(),
        "revision": null,
        "target_modules": target_modules(adapter, model),
        "task_type": if scores { "SEQ_CLS" } else { "CAUSAL_LM" },
        "use_dora": dora,
        "use_rslora": rslora,
    });
    // A key that older versions do not know: only where they would get another model without it.
    if saved_tie(adapter, model).is_some() {
        json["ensure_weight_tying"] = true.into();
    }
    json
}

/// The embedding's parameter, where it is the head too and trained in full.
fn saved_tie(adapter: &Adapter, model: &ModelConfig) -> Option<String> {
    let is_tied = model.tie_embeddings && model.num_labels.is_none();
    let is_table = |spec: &ParamSpec| spec.role == Role::Embedding && spec.split == Split::Outputs;
    let table = CausalLm::parameters(model).into_iter().find(is_table).map(|spec| spec.name);
    table.filter(|name| is_tied && adapter.saves(name))
}

/// A whole number where it is one: PEFT's own type for `lora_alpha`.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { json!(value as i64) } else { json!(value) }
}

/// Names that lead to exactly the adapter's linears: the last parts of their names where these do, else whole
/// ones.
fn target_modules(adapter: &Adapter, model: &ModelConfig) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    for module in &adapter.modules {
        let kind = module.name.rsplit('.').next().unwrap_or(&module.name);
        if !kinds.iter().any(|known| known == kind) {
            kinds.push(kind.to_string());
        }
    }
    let short = Targets::Names(kinds.clone());
    let reached = model.linears().iter().filter(|(name, _)| short.hold(name)).count();
    if reached == adapter.modules.len() {
        kinds
    } else {
        adapter.modules.iter().map(|module| module.name.clone()).collect()
    }
}

#[cfg(test)]
#[path = "peft_tests.rs"]
mod tests;
