//! Typed reads from a JSON object that gather every problem instead of stopping at the first.

use serde_json::{Map, Value};

use super::ModelConfig;

/// The name that a key has in a spelling: pairs of the common name and the own one.
pub(super) fn spelled<'k>(spelling: &[(&'static str, &'k str)], key: &'k str) -> &'k str {
    spelling.iter().find(|(common, _)| *common == key).map_or(key, |(_, own)| own)
}

/// A JSON object under inspection.
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Put before a key in messages: `rope_scaling.`.
    prefix: &'static str,
    /// Keys that stand under another name: (the common one, the object's own).
    spelling: &'static [(&'static str, &'static str)],
    pub(in crate::model) problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { object, prefix, spelling: &[], problems: Vec::new() }
    }

    /// The same object, with keys under names of its own.
    pub(super) fn spelled(self, spelling: &'static [(&'static str, &'static str)]) -> Self {
        Self { spelling, ..self }
    }

    /// The value of `key`; JSON's null counts as absent.
    pub(in crate::model) fn get(&self, key: &str) -> Option<&'a Value> {
        self.stated(key).filter(|value| !value.is_null())
    }

    /// The value of `key`, null where the object says so.
    fn stated(&self, key: &str) -> Option<&'a Value> {
        self.object.get(spelled(self.spelling, key))
    }

    fn problem(&mut self, key: &str, expected: &str, got: &Value) {
        let key = spelled(self.spelling, key);
        let mut got = got.to_string();
        if got.len() > 60 {
            got = format!("{}…", got.chars().take(60).collect::<String>());
        }
        self.problems.push(format!("{}{key}: expected {expected}, got {got}", self.prefix));
    }

    pub(super) fn missing(&mut self, key: &str) {
        let key = spelled(self.spelling, key);
        self.problems.push(format!("{}{key} is missing", self.prefix));
    }

    pub(in crate::model) fn optional_size(&mut self, key: &str) -> Option<usize> {
        let value = self.get(key)?;
        // Some writers print whole numbers as floats.
        let whole = value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x));
        let size = value.as_u64().or(whole.map(|x| x as u64)).and_then(|size| usize::try_from(size).ok());
        if size.is_none() {
            self.problem(key, "a whole number", value);
        }
        size
    }

    /// A required size; after a problem, a stand-in that validation accepts.
    pub(in crate::model) fn size(&mut self, key: &str) -> usize {
        if self.get(key).is_none() {
            self.missing(key);
        }
        self.optional_size(key).unwrap_or(1)
    }

    pub(in crate::model) fn optional_number(&mut self, key: &str) -> Option<f32> {
        let value = self.get(key)?;
        if value.as_f64().is_none() {
            self.problem(key, "a number", value);
        }
        value.as_f64().map(|number| number as f32)
    }

    pub(in crate::model) fn number(&mut self, key: &str) -> Option<f32> {
        if self.get(key).is_none() {
            self.missing(key);
        }
        self.optional_number(key)
    }

    pub(in crate::model) fn flag(&mut self, key: &str) -> bool {
        let Some(value) = self.get(key) else { return false };
        if !value.is_boolean() {
            self.problem(key, "true or false", value);
        }
        value.as_bool().unwrap_or(false)
    }

    pub(in crate::model) fn text(&mut self, key: &str) -> Option<&'a str> {
        let value = self.get(key)?;
        if !value.is_string() {
            self.problem(key, "a string", value);
        }
        value.as_str()
    }

    /// One token id.
    pub(in crate::model) fn token(&mut self, key: &str) -> Option<u32> {
        let value = self.get(key)?;
        // An id of -1 says "none" in some files.
        if value.as_i64() == Some(-1) {
            return None;
        }
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        if id.is_none() {
            self.problem(key, "a token id", value);
        }
        id
    }

    /// One token id, or a list of them.
    pub(in crate::model) fn tokens(&mut self, key: &str) -> Vec<u32> {
        let Some(Value::Array(list)) = self.get(key) else { return self.token(key).into_iter().collect() };
        let ids: Option<Vec<u32>> =
            list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        if ids.is_none() {
            self.problem(key, "token ids", &Value::Array(list.clone()));
        }
        ids.unwrap_or_default()
    }

    pub(in crate::model) fn object(&mut self, key: &str) -> Option<&'a Map<String, Value>> {
        let value = self.get(key)?;
        if !value.is_object() {
            self.problem(key, "an object", value);
        }
        value.as_object()
    }

    /// A number; `default` where the object does not speak of it, none where it says null.
    pub(in crate::model) fn stated_number(&mut self, key: &str, default: Option<f32>) -> Option<f32> {
        match self.stated(key) {
            None => default,
            Some(_) => self.optional_number(key),
        }
    }

    /// A list of sizes; empty where it is absent.
    pub(in crate::model) fn sizes(&mut self, key: &str) -> Vec<usize> {
        let Some(value) = self.get(key) else { return Vec::new() };
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let sizes = value.as_array().and_then(|list| list.iter().map(size).collect());
        if sizes.is_none() {
            self.problem(key, "a list of whole numbers", value);
        }
        sizes.unwrap_or_default()
    }

    /// What the loss on an uneven use of experts is multiplied by, where `output_router_logits` asks for it, as
    /// in transformers.
    pub(in crate::model) fn balance_loss(&mut self) -> Option<f32> {
        let weight = self.optional_number("router_aux_loss_coef").unwrap_or(0.001);
        self.flag("output_router_logits").then_some(weight)
    }

    /// A list of strings.
    pub(in crate::model) fn texts(&mut self, key: &str) -> Option<Vec<&'a str>> {
        let value = self.get(key)?;
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        if texts.is_none() {
            self.problem(key, "a list of strings", value);
        }
        texts
    }

    /// The window, and the layers that have it: those of `layer_types`, or where `is_local` says so in a file
    /// without. `default` is the window of a file that does not speak of one; null says that there is none.
    pub(in crate::model) fn read_window(
        &mut self,
        config: &mut ModelConfig,
        default: Option<usize>,
        is_local: impl Fn(usize) -> bool,
    ) {
        config.window = match self.stated("sliding_window") {
            None => default,
            Some(_) => self.optional_size("sliding_window"),
        };
        if config.window.is_none() {
            return;
        }
        config.local_layers = match self.texts("layer_types") {
            Some(types) => types.into_iter().map(|kind| self.is_sliding(kind)).collect(),
            None => config.by_layer(is_local),
        };
        let (listed, layers) = (config.local_layers.len(), config.num_layers);
        if listed != layers && layers <= super::MAX_LAYERS {
            self.problems.push(format!("layer_types has {listed} entries for {layers} layers"));
        }
    }

    fn is_sliding(&mut self, kind: &str) -> bool {
        if !["sliding_attention", "full_attention"].contains(&kind) {
            let known = "known are sliding_attention and full_attention";
            self.problems.push(format!("layer_types: {kind:?} is not supported; {known}"));
        }
        kind == "sliding_attention"
    }
}
