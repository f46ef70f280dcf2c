//! `aligner convert`, as a user calls it.

#[path = "../../aligner-core/tests/gguf_split/splitter.rs"]
mod splitter;

mod scene;

use aligner_core::weights::{Gguf, read_tensors};
use scene::{Scene, copy_dir, golden};
use splitter::Whole;

fn tensors(scene: &Scene, dir: &str) -> Vec<(String, Vec<u32>)> {
    let tensors = read_tensors(&scene.path(dir).join("model.safetensors")).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    tensors.into_iter().map(|(name, (_, values))| (name, bits(values))).collect()
}

fn answer(scene: &Scene, model: &str) -> String {
    scene.aligner(&["generate", model, "Say 3 in words.", "-n", "12"]).succeeds().to_string()
}

#[test]
fn a_model_turned_through_gguf_is_the_same_and_says_the_same() {
    let scene = Scene::new();
    let convert = |arguments: &[&str]| scene.aligner(&[&["convert"], arguments].concat());
    let call = convert(&["model", "-o", "model.gguf", "--to", "gguf", "--dtype", "f32"]);
    assert!(call.succeeds().contains("parameters  72432"), "{}", call.stdout);
    convert(&["model.gguf", "-o", "back", "--dtype", "f32"]).succeeds();
    assert_eq!(tensors(&scene, "model"), tensors(&scene, "back"));
    let expected = answer(&scene, "model");
    assert_eq!(expected, answer(&scene, "model.gguf"));
    assert_eq!(expected, answer(&scene, "back"));
    let file = Gguf::open(&scene.path("model.gguf")).unwrap();
    for (key, value) in
        [("general.architecture", "llama"), ("general.name", "model"), ("tokenizer.ggml.pre", "gpt-2")]
    {
        assert_eq!(file.text(key).unwrap(), Some(value));
    }
    assert_eq!(file.texts("tokenizer.ggml.tokens").unwrap().unwrap().len(), 320);
    assert_eq!(file.token("tokenizer.ggml.eos_token_id").unwrap(), Some(2));
    let config: serde_json::Value = serde_json::from_str(&scene.read("back/config.json")).unwrap();
    assert_eq!((&config["model_type"], &config["dtype"]), (&"llama".into(), &"float32".into()));
}

#[test]
fn a_model_in_several_files_is_used_as_one() {
    let scene = Scene::new();
    let whole = ["convert", "model", "-o", "model.gguf", "--to", "gguf", "--dtype", "f32"];
    scene.aligner(&whole).succeeds();
    let whole = Whole::read(&scene.path("model.gguf"));
    whole.write(&scene.path(""), "parts", &[2, 9, whole.tensors()]);
    let [first, second] = ["parts-00001-of-00003.gguf", "parts-00002-of-00003.gguf"];
    assert_eq!(answer(&scene, first), answer(&scene, "model"));
    scene.aligner(&["convert", first, "-o", "back", "--dtype", "f32"]).succeeds();
    assert_eq!(tensors(&scene, "model"), tensors(&scene, "back"));
    let onto = ["convert", first, "-o", second, "--to", "gguf", "--force"];
    scene.aligner(&onto).fails(2, &[second, "a part of the model that is read"]);
    scene.aligner(&["convert", first, "-o", "one.gguf", "--to", "gguf"]).succeeds();
    let one = Gguf::open(&scene.path("one.gguf")).unwrap();
    assert_eq!((one.text("general.name").unwrap(), one.value("split.count")), (Some("parts"), None));

    scene.sft();
    let run = scene.read("run.toml").replace("path = \"model\"", &format!("path = \"{first}\""));
    scene.write("run.toml", run);
    scene.aligner(&["inspect", "run.toml"]).succeeds();
    assert!(scene.aligner(&["plan", "run.toml"]).succeeds().contains("parameters  0.07 M"));
    scene.aligner(&["train", "run.toml"]).succeeds();
    assert!(scene.read("run/run.json").contains(second), "what a run has read of weights is known");
    std::fs::remove_file(scene.path(second)).unwrap();
    scene.aligner(&["generate", first, "hello"]).fails(1, &[first, second, "is missing"]);
}

#[test]
fn weights_that_lie_where_they_would_be_replaced_are_refused() {
    let scene = Scene::new();
    copy_dir(&scene.path("model"), &scene.path("links"));
    let link = scene.path("links/model.safetensors");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(scene.path("model/model.safetensors"), &link).unwrap();
    let before = tensors(&scene, "model");
    let call = ["convert", "links", "-o", "model", "--force", "--dtype", "bf16"];
    scene.aligner(&call).fails(2, &["model/model.safetensors", "a part of the model that is read"]);
    assert_eq!(tensors(&scene, "model"), before);
}

#[test]
fn other_number_types_are_smaller_and_load() {
    let scene = Scene::new();
    let size = |path: &str| scene.bytes(path).len();
    let convert = |arguments: &[&str]| {
        scene.aligner(&[&["convert", "model"], arguments].concat()).succeeds();
    };
    convert(&["-o", "half"]);
    convert(&["-o", "f16", "--dtype", "f16"]);
    let whole = size("model/model.safetensors");
    for half in ["half", "f16"] {
        assert!(size(&format!("{half}/model.safetensors")) < whole * 6 / 10);
        answer(&scene, half);
    }
    for dtype in ["f16", "bf16", "q8_0"] {
        let file = format!("{dtype}.gguf");
        convert(&["-o", &file, "--to", "gguf", "--dtype", dtype]);
        answer(&scene, &file);
    }
    assert!(size("q8_0.gguf") < size("f16.gguf"));
}

#[test]
fn pickled_weights_become_safetensors() {
    let scene = Scene::new();
    copy_dir(&golden().join("pytorch/model"), &scene.path("pickled"));
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(scene.path("model").join(name), scene.path("pickled").join(name)).unwrap();
    }
    scene.aligner(&["convert", "pickled", "-o", "plain", "--dtype", "f32"]).succeeds();
    let golden = read_tensors(&golden().join("pytorch/model.safetensors")).unwrap();
    let written = read_tensors(&scene.path("plain/model.safetensors")).unwrap();
    // The tied head is not written twice.
    assert_eq!(written.len() + 1, golden.len());
    assert!(written.iter().all(|(name, tensor)| &golden[name] == tensor));
    assert_eq!(answer(&scene, "pickled"), answer(&scene, "plain"));
}

#[test]
fn nothing_is_written_over_without_a_word_and_mistakes_are_named() {
    let scene = Scene::new();
    let convert = |arguments: &[&str]| scene.aligner(&[&["convert", "model"], arguments].concat());
    convert(&["-o", "out.gguf", "--to", "gguf"]).succeeds();
    convert(&["-o", "out.gguf", "--to", "gguf"]).fails(2, &["out.gguf is there already", "--force"]);
    convert(&["-o", "out.gguf", "--to", "gguf", "--force"]).succeeds();
    convert(&["-o", "out"]).succeeds();
    scene.write("out/note.txt", "kept");
    convert(&["-o", "out"]).fails(2, &["out is there already", "--force"]);
    assert_eq!(scene.read("out/note.txt"), "kept");
    convert(&["-o", "out", "--force"]).succeeds();
    assert!(!scene.path("out/note.txt").exists());
    std::fs::create_dir(scene.path("papers")).unwrap();
    convert(&["-o", "papers", "--force"]).fails(2, &["papers is no such model"]);
    convert(&["-o", "out", "--force", "--to", "gguf"]).fails(2, &["expected the name of a `.gguf` file"]);
    convert(&["-o", "model", "--force"]).fails(2, &["the model that is read"]);
    convert(&["-o", "x.gguf"]).fails(2, &["expected a directory", "--to gguf"]);
    convert(&["-o", "x", "--dtype", "q8_0"]).fails(2, &["q8_0 is for `--to gguf` alone"]);
    let scores = golden().join("models/llama_rm");
    let scores = scores.to_str().unwrap();
    scene
        .aligner(&["convert", scores, "-o", "rm.gguf", "--to", "gguf"])
        .fails(1, &["rm.gguf: not written", "head of scores"]);
    assert!(!scene.path("rm.gguf").exists());
}

#[test]
fn a_tokenizer_that_gguf_has_no_name_for_is_refused() {
    let scene = Scene::new();
    let text = scene.read("model/tokenizer.json");
    let other = text.replace("\"use_regex\": true", "\"use_regex\": false");
    assert_ne!(text, other);
    scene.write("model/tokenizer.json", other);
    scene
        .aligner(&["convert", "model", "-o", "x.gguf", "--to", "gguf"])
        .fails(1, &["the tokenizer cannot be written to GGUF", "known are gpt-2"]);
    scene.aligner(&["convert", "model", "-o", "x"]).succeeds();
}
