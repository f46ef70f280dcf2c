//! An `adapter_config.json` of any bytes, beside an adapter's tensors that are good.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use aligner_core::model::ModelConfig;
use aligner_core::weights::AdapterCheckpoint;
use aligner_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

static MODEL: LazyLock<(Scratch, ModelConfig)> = LazyLock::new(|| {
    let scratch = Scratch::new();
    scratch.golden("lora/lora_qv_r4/adapter_model.safetensors", "adapter_model.safetensors");
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/llama_gqa_untied/config.json");
    (scratch, ModelConfig::from_file(&golden).expect("a golden model"))
});

fuzz_target!(|bytes: &[u8]| {
    let (scratch, model) = &*MODEL;
    scratch.write("adapter_config.json", bytes);
    if let Ok(adapter) = AdapterCheckpoint::open(scratch.dir()) {
        let _ = adapter.adapter(model);
    }
});
