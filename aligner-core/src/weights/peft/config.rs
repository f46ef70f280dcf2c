//! `adapter_config.json`: what of it is read, and which values ask for what is not supported.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::{LoraConfig, Targets};
use crate::weights::read_whole;
use crate::{Error, Result};

/// Largest `adapter_config.json` that is read.
const MAX_BYTES: u64 = 1 << 26;

/// The settings of an adapter's file.
#[derive(Debug, Clone)]
pub(super) struct PeftConfig {
    pub(super) lora: LoraConfig,
    /// The base model's path or name.
    pub(super) base: Option<String>,
    /// Whether the base's files have weights as `[in, out]`; the adapter's own are the same for both.
    pub(super) transposed: bool,
    /// Whether a head that is its embedding is trained as one with it; a copy of its own else.
    pub(super) tied: bool,
    /// Whether the targets of `lora` are all that the file should have; else the file alone says.
    pub(super) names_all: bool,
}

/// Keys that change nothing about an adapter whose tensors are there, or that are read below.
const READ_OR_IDLE: [&str; 25] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
];

impl PeftConfig {
    /// Whether a tensor of the base, by its parameter's name, may be in the file: a module's that is trained in full,
    /// or what is tied to it.
    pub(super) fn saves(&self, name: &str) -> bool {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        let fits = |own: &String| module.ends_with(own.as_str());
        name == "score.weight"
            || (self.tied && name == "lm_head.weight")
            || self.lora.modules_to_save.iter().any(fits)
    }

    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = read_whole(path, MAX_BYTES)?;
        let value: Value = serde_json::from_slice(&text)
            .map_err(|error| Error::format(path, format!("not valid JSON: {error}")))?;
        let Some(object) = value.as_object() else {
            return Err(Error::format(path, "expected a JSON object"));
        };
        let mut fields = Fields { object, problems: Vec::new() };
        fields.refuse_other_methods();
        let config = fields.config();
        match (fields.problems.as_slice(), config) {
            ([], Some(config)) => Ok(config),
            (problems, _) => Err(Error::format(path, problems.join("; "))),
        }
    }
}

struct Fields<'a> {
    object: &'a Map<String, Value>,
    problems: Vec<String>,
}

impl<'a> Fields<'a> {
    /// The value of `key`; JSON's null counts as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn problem(&mut self, key: &str, expected: &str) {
        let value = self.object.get(key).map_or("nothing".into(), ToString::to_string);
        let value: String = value.chars().take(80).collect();
        self.problems.push(format!("{key}: expected {expected}, got {value}"));
    }

    /// Records every key whose value makes an adapter something else than low-rank additions to linears.
    fn refuse_other_methods(&mut self) {
        if self.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            self.problem("peft_type", "\"LORA\"");
        }
        let object = self.object;
        for (key, value) in object {
            match key.as_str() {
                "bias" if value != "none" => self.problem(key, "\"none\": trained biases are not supported"),
                "init_lora_weights" if !leaves_the_base(value) => {
                    self.problem(key, "an initialisation that leaves the base's weights as they are");
                }
                "bias"
                | "modules_to_save"
                | "ensure_weight_tying"
                | "init_lora_weights"
                | "fan_in_fan_out" => {}
                known if READ_OR_IDLE.contains(&known) => {}
                // Methods that are there in some versions of PEFT, and those of later ones.
                _ if !is_off(value) => self.problem(key, "it to be off: this is not supported"),
                _ => {}
            }
        }
    }

    fn config(&mut self) -> Option<PeftConfig> {
        let base = LoraConfig::default();
        let size = |value: &Value| {
            value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|&size| size > 0)
        };
        // What it scales is in single precision.
        let finite = |value: &Value| value.as_f64().filter(|number| (*number as f32).is_finite());
        let r = self.value("r", "a whole number, 1 or more", base.r, size);
        let alpha = self.value("lora_alpha", "a number", base.alpha, finite);
        let share = |value: &Value| value.as_f64().filter(|share| (0.0..1.0).contains(share));
        let dropout = self.value("lora_dropout", "a number from 0 to below 1", 0.0, share);
        let rslora = self.value("use_rslora", "true or false", false, Value::as_bool);
        let dora = self.value("use_dora", "true or false", false, Value::as_bool);
        let transposed = self.value("fan_in_fan_out", "true or false", false, Value::as_bool);
        let tied = self.value("ensure_weight_tying", "true or false", false, Value::as_bool);
        let modules = |value: &Value| {
            value.as_array()?.iter().map(|name| name.as_str().map(str::to_string)).collect::<Option<Vec<_>>>()
        };
        let modules_to_save = self.value("modules_to_save", "a list of names", Vec::new(), modules);
        let rank_pattern = self.pattern("rank_pattern", "a whole number, 1 or more", size);
        let alpha_pattern = self.pattern("alpha_pattern", "a number", finite);
        let narrowed =
            ["layers_to_transform", "exclude_modules"].iter().any(|key| !is_off_at(self.object, key));
        let (targets, is_list) = match self.get("target_modules") {
            Some(Value::String(text)) if text == "all-linear" => (Targets::AllLinear, true),
            Some(Value::Array(list)) if !list.is_empty() && list.iter().all(Value::is_string) => {
                let names = list.iter().filter_map(Value::as_str).map(str::to_string);
                (Targets::Names(names.collect()), true)
            }
            // A regular expression, or PEFT's own choice: the tensors say what it meant.
            Some(Value::String(_)) | None => (Targets::AllLinear, false),
            Some(_) => {
                self.problem("target_modules", "a list of names or a text");
                return None;
            }
        };
        let name = self.get("base_model_name_or_path").and_then(Value::as_str);
        Some(PeftConfig {
            lora: LoraConfig {
                r,
                alpha,
                targets,
                rslora,
                dropout,
                dora,
                rank_pattern,
                alpha_pattern,
                modules_to_save,
            },
            base: name.filter(|name| !name.is_empty()).map(str::to_string),
            transposed,
            tied,
            names_all: is_list && !narrowed,
        })
    }

    fn value<T>(&mut self, key: &str, expected: &str, default: T, read: impl Fn(&Value) -> Option<T>) -> T {
        let Some(value) = self.get(key) else { return default };
        read(value).unwrap_or_else(|| {
            self.problem(key, expected);
            default
        })
    }

    /// An object of values by the names of linears, in its order. PEFT takes the names for regular
    /// expressions; those that are plain names are read.
    fn pattern<T>(
        &mut self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Vec<(String, T)> {
        let mut pattern = Vec::new();
        let Some(value) = self.get(key) else { return pattern };
        let Some(object) = value.as_object() else {
            self.problem(key, "an object");
            return pattern;
        };
        for (name, value) in object {
            let plain = name.trim_start_matches('^').trim_end_matches('$').replace("\\.", ".");
            let is_plain = plain.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
            match read(value) {
                Some(value) if is_plain => pattern.push((plain, value)),
                Some(_) => {
                    self.problems.push(format!("{key}: `{name}`: only names are read, no other patterns"));
                }
                None => self.problems.push(format!("{key}: `{name}`: expected {expected}, got {value}")),
            }
        }
        pattern
    }
}

fn is_off_at(object: &Map<String, Value>, key: &str) -> bool {
    object.get(key).is_none_or(is_off)
}

/// Whether a value says that something is not used.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
    }
}

/// Whether an initialisation has changed nothing but the adapter: the others take a part out of the base's
/// weights, so that the adapter belongs to what is left of them.
fn leaves_the_base(value: &Value) -> bool {
    value.is_null()
        || value.is_boolean()
        || value.as_str().is_some_and(|name| ["gaussian", "orthogonal", "eva"].contains(&name))
}
