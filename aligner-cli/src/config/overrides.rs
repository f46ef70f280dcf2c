//! `--set key=value` arguments, written over the run file's tree.

use std::sync::Arc;

use toml::de::DeValue;

use super::problem::Problems;
use super::tree::{Node, Origin, Value};

/// Writes each `key=value` into `root`; what cannot be written is a problem that names the argument.
pub(crate) fn apply(root: &mut Node, arguments: &[String], problems: &mut Problems) {
    for argument in arguments {
        let text: Arc<str> = argument.as_str().into();
        let origin = Origin::Override(Arc::clone(&text));
        if let Err(message) = apply_one(root, argument, &origin) {
            problems.push(Some(origin), message);
        }
    }
}

/// Parts of the longest dotted key; sections nest three deep.
const DEEPEST: usize = 16;

fn apply_one(root: &mut Node, argument: &str, origin: &Origin) -> Result<(), String> {
    let Some((key, value)) = argument.split_once('=') else {
        return Err("expected `key=value`, as in `algorithm.dpo.beta=0.1`".into());
    };
    let path: Vec<&str> = key.trim().split('.').map(str::trim).collect();
    if path.iter().any(|part| part.is_empty()) {
        return Err(format!("expected a dotted key before `=`, got `{key}`"));
    }
    if path.len() > DEEPEST {
        return Err(format!("a key has at most {DEEPEST} parts, got {}", path.len()));
    }
    root.set(&path, value_of(value.trim(), origin))
}

/// A TOML value; text that is none is a string, so that paths and names need no quotes.
fn value_of(text: &str, origin: &Origin) -> Node {
    match DeValue::parse(text) {
        Ok(value) => Node::from_value(value, &|_| origin.clone()),
        Err(_) => Node { origin: origin.clone(), value: Value::String(text.to_string()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(arguments: &[&str]) -> (Node, String) {
        let mut root = Node { origin: Origin::File(0..0), value: Value::Table(Vec::new()) };
        let mut problems = Problems::new("run.toml".as_ref(), "");
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        apply(&mut root, &arguments, &mut problems);
        (root, problems.to_string())
    }

    #[test]
    fn values_have_tomls_types_and_bare_text_is_a_string() {
        let (root, _) = applied(&["a.b=0.5", "a.c=[1, 2]", "a.d=runs/x", "a.e=true"]);
        assert!(
            matches!(root.find("a.b").unwrap().node.value, Value::Float(half) if (half - 0.5).abs() < 1e-12)
        );
        assert!(matches!(&root.find("a.c").unwrap().node.value, Value::Array(items) if items.len() == 2));
        assert!(matches!(&root.find("a.d").unwrap().node.value, Value::String(path) if path == "runs/x"));
        assert!(matches!(root.find("a.e").unwrap().node.value, Value::Boolean(true)));
    }

    #[test]
    fn the_last_of_two_wins() {
        let (root, _) = applied(&["a=1", "a=2"]);
        assert!(matches!(root.find("a").unwrap().node.value, Value::Integer(2)));
    }

    #[test]
    fn an_argument_that_cannot_be_written_is_named() {
        let (_, problems) = applied(&["beta", "a=1", "a.b=2", "=3"]);
        assert!(problems.contains("--set beta: expected `key=value`"), "{problems}");
        assert!(problems.contains("--set a.b=2: `b` cannot be set inside an integer"), "{problems}");
        assert!(problems.contains("--set =3: expected a dotted key"), "{problems}");
    }
}
