//! A golden model whose linears are in eight bits with scales beside them, and the values that these stand for.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::collections::BTreeMap;
use std::path::Path;

use aligner_core::weights::read_tensors;
use serde_json::{Value, json};

/// Largest number of four bits of exponent and three of mantissa.
const LARGEST: f32 = 448.0;

/// How weights are stored.
pub(crate) struct Form {
    /// `quantization_config`.
    pub(crate) config: Value,
    /// What follows a weight's name in that of its scales.
    pub(crate) end: &'static str,
    /// Rows and columns with a scale in common, of a matrix.
    pub(crate) block: fn([usize; 2]) -> [usize; 2],
    /// The shape of scales, of how many there are below and beside each other.
    pub(crate) shape: fn([usize; 2]) -> Vec<usize>,
    /// Whether scales are stored in two bytes.
    pub(crate) short: bool,
}

/// As DeepSeek-V3 and Qwen 3 are published, in blocks of so many rows and columns.
pub(crate) fn blocks(short: bool) -> Form {
    Form {
        config: json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "modules_to_not_convert": ["model.embed_tokens"], "weight_block_size": [32, 20]}),
        end: "_scale_inv",
        block: |_| [32, 20],
        shape: |[rows, columns]| vec![rows, columns],
        short,
    }
}

fn compressed(strategy: &str) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["model.embed_tokens"],
        "kv_cache_scheme": null, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": null,
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": true, "strategy": "token"},
            "weights": {"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": strategy}}}})
}

/// As llm-compressor writes them, with a scale for each row.
pub(crate) fn rows() -> Form {
    Form {
        config: compressed("channel"),
        end: "_scale",
        block: |[_, columns]| [1, columns],
        shape: |[rows, _]| vec![rows, 1],
        short: true,
    }
}

/// The same with one scale for each matrix.
pub(crate) fn whole() -> Form {
    Form {
        config: compressed("tensor"),
        end: "_scale",
        block: |matrix| matrix,
        shape: |_| vec![1],
        short: false,
    }
}

/// A number of eight bits by its definition.
fn defined(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude =
        if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest of them.
fn nearest(value: f32) -> u8 {
    // In the order of their magnitudes; the one after the last is no number.
    let above = (0..0x7E).find(|&byte| defined(byte) >= value.abs()).unwrap_or(0x7E);
    let below = above.saturating_sub(1);
    let byte = if defined(above) - value.abs() < value.abs() - defined(below) { above } else { below };
    if value < 0.0 { byte | 0x80 } else { byte }
}

/// A tensor of a file: its type, shape and bytes.
type Stored = (&'static str, Vec<usize>, Vec<u8>);

/// Writes the model `from` to `dir`, its linears in this form, and returns what all of its tensors are.
pub(crate) fn write(from: &Path, dir: &Path, form: &Form) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = form.config.clone();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors = read_tensors(&from.join("model.safetensors")).unwrap();
    let mut stored: BTreeMap<String, Stored> = BTreeMap::new();
    for (name, (shape, values)) in &mut tensors {
        let is_linear = name.ends_with("_proj.weight") || name == "lm_head.weight";
        if !is_linear {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            stored.insert(name.clone(), ("F32", shape.clone(), bytes));
            continue;
        }
        let matrix = [shape[0], shape[1]];
        let (bytes, scales, blocks) = quantised(values, matrix, form);
        stored.insert(name.clone(), ("F8_E4M3", shape.clone(), bytes));
        let (dtype, width) = if form.short { ("BF16", 2) } else { ("F32", 4) };
        let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()[4 - width..].to_vec()).collect();
        stored.insert(format!("{name}{}", form.end), (dtype, (form.shape)(blocks), bytes));
        if form.end == "_scale" {
            let name = name.replace(".weight", ".input_scale");
            stored.insert(name, ("F32", vec![1], 0.5_f32.to_le_bytes().to_vec()));
        }
    }
    write_file(&dir.join("model.safetensors"), &stored);
    tensors
}

/// A matrix's bytes, its scales, and how many of these are below and beside each other; `values` become what they stand for.
fn quantised(
    values: &mut [f32],
    [rows, columns]: [usize; 2],
    form: &Form,
) -> (Vec<u8>, Vec<f32>, [usize; 2]) {
    let block = (form.block)([rows, columns]);
    let blocks = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
    let place = |at: usize| at / columns / block[0] * blocks[1] + at % columns / block[1];
    let mut scales = vec![0.0_f32; blocks[0] * blocks[1]];
    for (at, value) in values.iter().enumerate() {
        scales[place(at)] = scales[place(at)].max(value.abs() / LARGEST);
    }
    if form.short {
        // The upper half of a single.
        for scale in &mut scales {
            *scale = f32::from_bits(((scale.to_bits() >> 16) + 1) << 16);
        }
    }
    let mut bytes = Vec::with_capacity(values.len());
    for (at, value) in values.iter_mut().enumerate() {
        let scale = scales[place(at)];
        let byte = nearest(*value / scale);
        *value = defined(byte) * scale;
        bytes.push(byte);
    }
    (bytes, scales, blocks)
}

pub(crate) fn write_file(path: &Path, tensors: &BTreeMap<String, Stored>) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [length.as_slice(), header.as_bytes(), &data].concat()).unwrap();
}
