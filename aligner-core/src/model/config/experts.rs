//! Mixtures of experts in a configuration.

/// Most accepted experts of a layer.
const MAX_EXPERTS: usize = 1 << 14;

/// The layers' experts, and how a token chooses among them.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token has.
    pub per_token: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are made to sum to 1.
    pub normalized: bool,
    /// Width of the expert that every token has; none where there is no such.
    pub shared_intermediate_size: Option<usize>,
    /// Whether each layer has an MLP in place of experts; empty where none has.
    pub dense_layers: Vec<bool>,
    /// What the loss on an uneven use of the experts is multiplied by in training; none where it is left out.
    pub balance_loss: Option<f32>,
}

impl ExpertsConfig {
    /// Whether a layer has an MLP in place of experts.
    pub fn is_dense(&self, layer: usize) -> bool {
        self.dense_layers.get(layer).copied().unwrap_or(false)
    }

    /// Adds every violation, in words.
    pub(super) fn problems(&self, problems: &mut Vec<String>) {
        let (count, each) = (self.count, self.per_token);
        if !(1..=MAX_EXPERTS).contains(&count) {
            problems.push(format!("num_experts must be between 1 and {MAX_EXPERTS}, got {count}"));
        }
        if !(1..=count.max(1)).contains(&each) {
            problems
                .push(format!("num_experts_per_tok must be between 1 and num_experts {count}, got {each}"));
        }
        for (key, size) in [
            ("moe_intermediate_size", Some(self.intermediate_size)),
            ("shared_expert_intermediate_size", self.shared_intermediate_size),
        ] {
            if let Some(size) = size.filter(|&size| size == 0 || size > super::MAX_DIMENSION) {
                let most = super::MAX_DIMENSION;
                problems.push(format!("{key} must be between 1 and {most}, got {size}"));
            }
        }
        if self.balance_loss.is_some_and(|weight| !(weight >= 0.0 && weight.is_finite())) {
            problems.push("router_aux_loss_coef must be finite and not below 0".into());
        }
    }
}
