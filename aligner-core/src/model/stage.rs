//! A part of a model along its depth: what a rank of a pipeline holds.

use std::ops::Range;

use super::{CausalLm, ModelConfig, ParamSpec, Role};
use crate::shard::Split;

/// Consecutive layers, with the embedding before a model's first and norm and head after its last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The layers, counted over the whole model.
    pub layers: Range<usize>,
    /// Whether it begins the model.
    pub first: bool,
    /// Whether it ends the model.
    pub last: bool,
    /// The experts of each of its mixtures; none where it has all.
    pub experts: Option<Range<usize>>,
}

impl Stage {
    /// The whole model.
    pub fn whole(config: &ModelConfig) -> Self {
        Self::new(config, 0, 1)
    }

    /// Stage `index` of `stages`, each of as many layers as the others, or one more.
    pub fn new(config: &ModelConfig, index: usize, stages: usize) -> Self {
        let start = |index: usize| index * config.num_layers / stages;
        Self {
            layers: start(index)..start(index + 1),
            first: index == 0,
            last: index + 1 == stages,
            experts: None,
        }
    }

    /// The same with these experts of each mixture alone.
    #[must_use]
    pub fn with_experts(self, experts: Range<usize>) -> Self {
        Self { experts: Some(experts), ..self }
    }

    /// The stage's parameters, in the order of [`CausalLm::parameters`]. A head that is
    /// tied to the embedding brings it to the last stage, too.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<ParamSpec> {
        let mut layers_begun = false;
        let mut all = CausalLm::parameters(config);
        let is_tied = config.tie_embeddings && config.num_labels.is_none();
        // Learned positions are no head.
        let is_table = |spec: &ParamSpec| spec.split == Split::Outputs;
        let is_elsewhere = |spec: &ParamSpec| match (spec.role, &self.experts) {
            (Role::Expert(expert), Some(own)) => !own.contains(&expert),
            _ => false,
        };
        all.retain(|spec| match spec.layer {
            Some(_) if is_elsewhere(spec) => {
                layers_begun = true;
                false
            }
            Some(layer) => {
                layers_begun = true;
                self.layers.contains(&layer)
            }
            None if layers_begun => self.last,
            None => self.first || (self.last && is_tied && is_table(spec)),
        });
        all
    }
}

/// The layer that a parameter belongs to: the first number in its name.
pub fn layer_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::tests::tiny;

    #[test]
    fn stages_share_out_all_parameters() {
        for (layers, stages, is_tied) in [(4, 2, false), (5, 3, true), (3, 1, true)] {
            let config = ModelConfig { num_layers: layers, tie_embeddings: is_tied, ..tiny() };
            let all = CausalLm::parameters(&config);
            let parts = (0..stages).map(|index| Stage::new(&config, index, stages));
            let mut names: Vec<String> =
                parts.flat_map(|stage| stage.parameters(&config)).map(|spec| spec.name).collect();
            if is_tied && stages > 1 {
                let again = names.iter().rposition(|name| name.contains("embed_tokens")).unwrap();
                assert!(again > 0, "the last stage has the embedding for its head");
                names.remove(again);
            }
            let whole: Vec<String> = all.into_iter().map(|spec| spec.name).collect();
            assert_eq!(names, whole);
        }
    }

    #[test]
    fn a_parameter_belongs_to_the_first_number_of_its_name() {
        assert_eq!(layer_of("model.layers.12.mlp.experts.3.w1.weight"), Some(12));
        assert_eq!(layer_of("model.embed_tokens.weight"), None);
    }
}
