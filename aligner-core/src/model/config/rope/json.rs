//! Rotary settings in a `config.json`, in either spelling.

use serde_json::{Map, Value};

use super::{Llama3Scaling, RopeConfig};
use crate::model::config::Fields;

type Object = Map<String, Value>;

impl Fields<'_> {
    /// Rotary settings from either spelling; where both are present they must agree. Of parameters by kind of
    /// layer, those of the layers that see all.
    pub(in crate::model) fn rope(&mut self, default_theta: f32) -> RopeConfig {
        let parameters = self.object("rope_parameters");
        let of_full = parameters.and_then(|all| all.get("full_attention")).and_then(Value::as_object);
        self.rope_of(["rope_theta", "rope_scaling"], of_full.or(parameters), default_theta)
    }

    /// Rotary settings of the local layers, which some families have apart.
    pub(in crate::model) fn local_rope(&mut self, default_theta: f32) -> RopeConfig {
        let parameters = self.object("rope_parameters").and_then(|all| all.get("sliding_attention"));
        let keys = ["rope_local_base_freq", "rope_local_scaling"];
        self.rope_of(keys, parameters.and_then(Value::as_object), default_theta)
    }

    /// Of the hub's two keys, and of the parameters of transformers 5.
    fn rope_of(
        &mut self,
        [theta_key, scaling_key]: [&str; 2],
        parameters: Option<&Object>,
        default_theta: f32,
    ) -> RopeConfig {
        let theta = self.optional_number(theta_key);
        let hub = self.object(scaling_key).map(|object| self.scaling(object, "rope_scaling."));
        let new = parameters.map(|object| self.scaling(object, "rope_parameters."));
        let new_theta = new.and_then(|(theta, _)| theta);
        if let (Some(one), Some(other)) = (theta, new_theta)
            && one.to_bits() != other.to_bits()
        {
            self.problems.push(format!("{theta_key} is {one}, but rope_parameters.rope_theta is {other}"));
        }
        let (hub, new) = (hub.map(|(_, scaling)| scaling), new.map(|(_, scaling)| scaling));
        if let (Some(one), Some(other)) = (hub, new)
            && one != other
        {
            self.problems.push(format!("{scaling_key} and rope_parameters disagree"));
        }
        RopeConfig { theta: theta.or(new_theta).unwrap_or(default_theta), scaling: new.or(hub).flatten() }
    }

    /// The base, where it is in the object, and the scaling, where there is one.
    fn scaling(&mut self, object: &Object, prefix: &'static str) -> (Option<f32>, Option<Llama3Scaling>) {
        let mut inner = Fields::new(object, prefix);
        let theta = inner.optional_number("rope_theta");
        if inner.optional_number("partial_rotary_factor").is_some_and(|factor| factor < 1.0) {
            inner.problems.push(format!("{prefix}partial_rotary_factor below 1 is not supported"));
        }
        let kind = inner.text("rope_type").or_else(|| inner.text("type")).unwrap_or("default");
        let scaling = match kind {
            "llama3" => Some(Llama3Scaling {
                factor: inner.number("factor").unwrap_or(1.0),
                low_freq_factor: inner.number("low_freq_factor").unwrap_or(1.0),
                high_freq_factor: inner.number("high_freq_factor").unwrap_or(4.0),
                original_max_positions: inner.size("original_max_position_embeddings"),
            }),
            "default" => None,
            other => {
                let message =
                    format!("{prefix}rope_type {other:?} is not supported; known are default and llama3");
                inner.problems.push(message);
                None
            }
        };
        self.problems.append(&mut inner.problems);
        (theta, scaling)
    }
}
