//! Penalties, bias and masks: what changes single logits before the softmax.

use aligner_core::Sampling;

use super::{Row, Seen};

/// Writes the row's logits with penalties, bias and masks to `adjusted`, `[vocab]`. False where none
/// applies; `adjusted` is left as it was then.
pub(super) fn adjust(row: &Row<'_>, adjusted: &mut Vec<f32>) -> bool {
    let Row { logits, sampling, seen, .. } = *row;
    let barred = if seen.len() < sampling.min_tokens { sampling.stop_tokens.as_slice() } else { &[] };
    let unchanged = seen.entries().is_empty() && sampling.logit_bias.is_empty() && barred.is_empty();
    if unchanged && sampling.allowed.is_none() {
        return false;
    }
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    penalise(adjusted, sampling, seen);
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = adjusted.get_mut(token as usize) {
            *logit += bias;
        }
    }
    if let Some(allowed) = &sampling.allowed {
        for (token, logit) in adjusted.iter_mut().enumerate() {
            if !allowed.contains(token as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    for &token in barred {
        if let Some(logit) = adjusted.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    true
}

fn penalise(logits: &mut [f32], sampling: &Sampling, seen: &Seen) {
    let repetition = sampling.repetition_penalty;
    for entry in seen.entries() {
        // A token whose proposals were all taken back has an entry, but was not seen.
        if let Some(logit) = logits.get_mut(entry.token as usize)
            && (entry.in_prompt || entry.count > 0)
        {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if entry.count > 0 {
                *logit -= sampling.presence_penalty + sampling.frequency_penalty * entry.count as f32;
            }
        }
    }
}
