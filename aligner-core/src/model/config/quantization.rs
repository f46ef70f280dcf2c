//! `quantization_config`: which scales stand beside weights of eight bits.
//!
//! Two ways are known: `fp8`, as DeepSeek-V3 and Qwen 3 are published, and `compressed-tensors` of llm-compressor. How
//! activations are quantised there is passed over: here products are of the weights that the file stands for.

use serde_json::{Map, Value};

/// Largest side of a block, in elements.
const MOST_SIDE: u64 = 1 << 20;

/// The elements of a matrix that have a scale in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grid {
    /// All of them.
    Whole,
    /// Those of a row.
    Row,
    /// Those of a block of so many rows and columns; the last blocks may be smaller.
    Block([usize; 2]),
}

impl Grid {
    /// Rows and columns of a block in a matrix `[rows, columns]`.
    pub(crate) fn block(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Whole => [rows.max(1), columns.max(1)],
            Self::Row => [1, columns.max(1)],
            Self::Block(sides) => sides,
        }
    }

    /// The shape of a matrix's scales: how many blocks are below and beside each other.
    pub(crate) fn shape(self, matrix: [usize; 2]) -> [usize; 2] {
        let block = self.block(matrix);
        [0, 1].map(|side| matrix[side].div_ceil(block[side]))
    }
}

/// The scales that a `config.json` says its weights have, any one of these; none where it speaks of none.
///
/// # Errors
/// A way to quantise that is not known, by its name.
pub(crate) fn grids(config: &Map<String, Value>) -> Result<Option<Vec<Grid>>, String> {
    let Some(value) = config.get("quantization_config").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let of = |value: &Value| match value["quant_method"].as_str() {
        Some("fp8") => fp8(value),
        Some("compressed-tensors") => compressed(value),
        other => {
            let other = other.map_or_else(|| "none".into(), |name| format!("{name:?}"));
            Err(format!("quant_method: expected \"fp8\" or \"compressed-tensors\", got {other}"))
        }
    };
    of(value).map(Some).map_err(|message| format!("quantization_config.{message}"))
}

/// Blocks where there is a size of them, else a scale for each matrix.
fn fp8(value: &Value) -> Result<Vec<Grid>, String> {
    let size = &value["weight_block_size"];
    let grid = if size.is_null() { Grid::Whole } else { block("weight_block_size", size)? };
    Ok(vec![grid])
}

fn compressed(value: &Value) -> Result<Vec<Grid>, String> {
    let format = &value["format"];
    if format != "float-quantized" {
        return Err(format!("format: expected \"float-quantized\", got {format}"));
    }
    // Pruned weights lie in another form, and transforms turn them.
    let sparsity = &value["sparsity_config"]["format"];
    if !sparsity.is_null() && sparsity != "dense" {
        return Err(format!("sparsity_config.format: expected \"dense\", got {sparsity}"));
    }
    if value["transform_config"]["config_groups"].as_object().is_some_and(|groups| !groups.is_empty()) {
        return Err("transform_config changes the model; only its absence is supported".into());
    }
    let groups = value["config_groups"].as_object().ok_or("config_groups is missing")?;
    let weights = groups.iter().map(|(name, group)| (name, &group["weights"]));
    let grids: Result<Vec<Grid>, String> = weights
        .filter(|(_, weights)| !weights.is_null())
        .map(|(name, weights)| {
            of_group(weights).map_err(|message| format!("config_groups.{name}.weights.{message}"))
        })
        .collect();
    match grids?.as_slice() {
        [] => Err("config_groups: expected a group with `weights`, got none".into()),
        grids => Ok(grids.to_vec()),
    }
}

/// What a group of layers says of its weights.
fn of_group(weights: &Value) -> Result<Grid, String> {
    for (key, expected) in
        [("type", Value::from("float")), ("num_bits", 8.into()), ("symmetric", true.into())]
    {
        let got = &weights[key];
        if *got != expected {
            return Err(format!("{key}: expected {expected}, got {got}"));
        }
    }
    match weights["strategy"].as_str() {
        Some("tensor") => Ok(Grid::Whole),
        Some("channel") => Ok(Grid::Row),
        Some("block") => block("block_structure", &weights["block_structure"]),
        _ => {
            let got = &weights["strategy"];
            Err(format!("strategy: expected \"tensor\", \"channel\" or \"block\", got {got}"))
        }
    }
}

fn block(key: &str, value: &Value) -> Result<Grid, String> {
    let side = |value: &Value| value.as_u64().filter(|side| (1..=MOST_SIDE).contains(side));
    let sides: Option<Vec<u64>> = value.as_array().and_then(|sides| sides.iter().map(side).collect());
    match sides.as_deref() {
        Some(&[rows, columns]) => Ok(Grid::Block([rows as usize, columns as usize])),
        _ => Err(format!("{key}: expected rows and columns between 1 and {MOST_SIDE}, got {value}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(quantization: &Value) -> Result<Option<Vec<Grid>>, String> {
        grids(json!({"quantization_config": quantization}).as_object().unwrap())
    }

    fn compressed_with(weights: &Value) -> Value {
        let group =
            json!({"weights": weights, "input_activations": {"dynamic": true}, "targets": ["Linear"]});
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}})
    }

    #[test]
    fn published_configurations_say_which_scales_there_are() {
        let fp8 = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]});
        assert_eq!(read(&fp8), Ok(Some(vec![Grid::Block([128, 128])])));
        let whole = json!({"activation_scheme": "static", "quant_method": "fp8"});
        assert_eq!(read(&whole), Ok(Some(vec![Grid::Whole])));
        let weights = |strategy: &str| {
            json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
            "block_structure": [128, 64], "dynamic": false})
        };
        for (strategy, grid) in
            [("tensor", Grid::Whole), ("channel", Grid::Row), ("block", Grid::Block([128, 64]))]
        {
            assert_eq!(read(&compressed_with(&weights(strategy))), Ok(Some(vec![grid])));
        }
        assert_eq!(read(&Value::Null), Ok(None));
        assert_eq!(grids(&Map::new()), Ok(None));
    }

    #[test]
    fn other_ways_are_refused_by_name() {
        let weights = |changes: Value| {
            let mut weights =
                json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor"});
            weights.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            compressed_with(&weights)
        };
        let with = |key: &str, value: Value| {
            let mut whole = weights(json!({}));
            whole[key] = value;
            whole
        };
        for (value, part) in [
            (json!({"quant_method": "gptq", "bits": 4}), "got \"gptq\""),
            (json!({"load_in_4bit": true}), "quant_method: expected \"fp8\" or"),
            (json!("fp8"), "quant_method"),
            (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size"),
            (json!({"quant_method": "fp8", "weight_block_size": [128, 0]}), "between 1 and"),
            (json!({"quant_method": "fp8", "weight_block_size": "128x128"}), "weight_block_size"),
            (with("format", json!("pack-quantized")), "got \"pack-quantized\""),
            (with("sparsity_config", json!({"format": "sparse-24-bitmask"})), "sparsity_config.format"),
            (with("transform_config", json!({"config_groups": {"R1": {}}})), "transform_config"),
            (with("config_groups", json!({})), "expected a group"),
            (with("config_groups", json!([])), "config_groups is missing"),
            (weights(json!({"num_bits": 4})), "config_groups.group_0.weights.num_bits: expected 8, got 4"),
            (weights(json!({"type": "int"})), "got \"int\""),
            (weights(json!({"symmetric": false})), "symmetric"),
            (weights(json!({"strategy": "group"})), "got \"group\""),
            (weights(json!({"strategy": "block"})), "block_structure"),
        ] {
            let message = read(&value).unwrap_err();
            assert!(
                message.starts_with("quantization_config.") && message.contains(part),
                "{value}: {message}"
            );
        }
    }

    #[test]
    fn last_blocks_may_be_smaller() {
        assert_eq!(Grid::Block([128, 128]).shape([320, 129]), [3, 2]);
        assert_eq!(Grid::Block([128, 128]).shape([1, 128]), [1, 1]);
        assert_eq!((Grid::Row.shape([5, 7]), Grid::Whole.shape([5, 7])), ([5, 1], [1, 1]));
    }
}
