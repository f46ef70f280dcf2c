//! Whether a model can be cut as a mesh asks.

use aligner_core::model::ModelConfig;
use aligner_core::{Error, Result};

use super::{Axis, Mesh};

impl Mesh {
    /// Checks that every axis divides what it cuts: `tp` the heads, key and value heads and the MLP,
    /// `pp` the layers, `ep` the experts of a layer. The vocabulary need not divide.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists all violations, each with its axis and the key in `config.json`.
    pub fn check(&self, model: &ModelConfig) -> Result<()> {
        let experts = model.experts.as_ref().map_or(0, |experts| experts.count);
        let cuts = [
            (Axis::Tensor, "num_attention_heads", model.num_heads),
            (Axis::Tensor, "num_key_value_heads", model.num_kv_heads),
            (Axis::Tensor, "intermediate_size", model.intermediate_size),
            (Axis::Pipeline, "num_hidden_layers", model.num_layers),
            (Axis::Expert, "num_experts", experts),
        ];
        let problem = |(axis, key, value): (Axis, &str, usize)| {
            let size = self.axis_size(axis);
            match (value.is_multiple_of(size), value) {
                (true, 1..) => None,
                // One rank along an axis cuts nothing.
                (true, 0) if size == 1 => None,
                (_, 0) => Some(format!("{} {size}, but {key} is 0", axis.name())),
                (false, _) => Some(format!("{} {size} does not divide {key} {value}", axis.name())),
            }
        };
        let problems: Vec<String> = cuts.into_iter().filter_map(problem).collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Invalid(format!("the mesh {self} does not fit the model: {}", problems.join("; "))))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(kind: &serde_json::Value) -> ModelConfig {
        let mut json = serde_json::json!({
            "vocab_size": 1001, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6,
            "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 64,
        });
        json.as_object_mut().unwrap().extend(kind.as_object().unwrap().clone());
        ModelConfig::from_json(Path::new("config.json"), &json).unwrap()
    }

    fn model() -> ModelConfig {
        config(&serde_json::json!({"model_type": "llama"}))
    }

    fn mixture() -> ModelConfig {
        config(
            &serde_json::json!({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}),
        )
    }

    #[test]
    fn all_violations_are_listed_at_once() {
        let mesh = Mesh::new([5, 1, 3, 2, 4]).unwrap();
        assert_eq!(
            mesh.check(&mixture()).unwrap_err().to_string(),
            "the mesh tp=5 cp=1 ep=3 dp=2 pp=4 does not fit the model: tp 5 does not divide num_attention_heads 12; \
             tp 5 does not divide num_key_value_heads 4; tp 5 does not divide intermediate_size 96; \
             pp 4 does not divide num_hidden_layers 6; ep 3 does not divide num_experts 8"
        );
    }

    #[test]
    fn dense_model_has_no_experts_to_split() {
        let mesh = Mesh::new([4, 2, 1, 2, 3]).unwrap();
        mesh.check(&model()).unwrap();
        let message = Mesh::new([1, 1, 2, 1, 1]).unwrap().check(&model()).unwrap_err().to_string();
        assert!(message.contains("ep 2, but num_experts is 0"), "{message}");
        // Fewer heads of keys than ranks along the axis: a head cannot be cut.
        let message = Mesh::new([12, 1, 1, 1, 1]).unwrap().check(&model()).unwrap_err().to_string();
        assert!(message.ends_with("tp 12 does not divide num_key_value_heads 4"), "{message}");
    }
}
