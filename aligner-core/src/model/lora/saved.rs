//! Modules that are trained in full beside an adapter, PEFT's `modules_to_save`.

use super::AdapterModule;
use super::targets::fits;
use crate::model::parameters::{HEAD, SCORE};
use crate::model::{CausalLm, ModelConfig, ParamSpec};
use crate::{Error, Result};

/// A parameter that is trained in full, with its shape.
pub type SavedParameter = (String, Vec<usize>);

/// The parameters of the modules whose names end like one of `names`, in the model's order; a score head is always
/// among them.
///
/// # Errors
/// [`Error::Setting`] for a name that no module has, and for a module that cannot be trained so.
pub(super) fn saved(
    names: &[String],
    model: &ModelConfig,
    modules: &[AdapterModule],
) -> Result<Vec<SavedParameter>> {
    let specs = CausalLm::parameters(model);
    for name in names {
        if let Some(message) = problem(name, model, &specs, modules) {
            return Err(Error::setting("modules_to_save", format!("`{name}`: {message}")));
        }
    }
    let chosen = specs
        .into_iter()
        .filter(|spec| spec.name == SCORE || names.iter().any(|name| spec.is_of_module(name)));
    Ok(chosen.map(|spec| (spec.name, spec.shape)).collect())
}

/// The module that a parameter belongs to.
fn module(spec: &ParamSpec) -> &str {
    spec.name.rsplit_once('.').map_or(spec.name.as_str(), |(module, _)| module)
}

/// What is wrong with a name.
fn problem(
    name: &str,
    model: &ModelConfig,
    specs: &[ParamSpec],
    modules: &[AdapterModule],
) -> Option<String> {
    let mut held = specs.iter().filter(|spec| spec.is_of_module(name)).peekable();
    if held.peek().is_none() {
        if model.tie_embeddings && fits(name, HEAD.trim_end_matches(".weight")) {
            let message = "the head of this model is its embedding: name that, embed_tokens or wte";
            return Some(message.into());
        }
        let mut kinds: Vec<&str> = Vec::new();
        for spec in specs {
            let kind = super::kind(module(spec));
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        return Some(format!("the model has no module of this name; it has {}", kinds.join(", ")));
    }
    if let Some(module) = held.clone().find(|spec| modules.iter().any(|own| own.name == module(spec))) {
        let module = self::module(module);
        return Some(format!("{module} has an addition, and is trained in full or by that, not both"));
    }
    let transposed = held.find(|spec| spec.transposed)?;
    Some(format!(
        "{} stands transposed in this family's files; only other modules are trained in full",
        transposed.name
    ))
}
