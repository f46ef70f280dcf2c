//! Every mistake of a run file at once, each with its place and the nearest valid key.

mod scene;

use scene::Scene;

const MANY: &str = r#"[model]
path = "model"
tokeniser = "model"

[data.train]
path = "pairs.jsonl"
max_lenght = 512
overlong = "trunctate"

[algorithm.dpo]
bta = 0.1
label_smoothing = "none"

[learner]
learning_rte = 1e-5
micro_batch_tokens = -5

[runn]
dir = "x"

[run]
dir = "run"
steps = 10
epochs = 1
"#;

#[test]
fn all_mistakes_are_reported_at_once() {
    let scene = Scene::new();
    scene.write("run.toml", MANY);
    let call =
        scene.aligner(&["train", "run.toml", "--set", "algorithm.dpo.betta=0.2", "--set", "run.steps=many"]);
    assert_eq!(call.code, Some(2));
    insta::assert_snapshot!(call.stderr, @r#"
    error: run.toml: 10 problems
    run.toml:3:1: unknown key `tokeniser` in [model]; did you mean `tokenizer`?
      3 | tokeniser = "model"
        | ^^^^^^^^^
    run.toml:7:1: unknown key `max_lenght` in [data.train]; did you mean `max_length`?
      7 | max_lenght = 512
        | ^^^^^^^^^^
    run.toml:8:12: `data.train.overlong`: unknown value `trunctate`; did you mean `truncate`?
      8 | overlong = "trunctate"
        |            ^^^^^^^^^^^
    run.toml:11:1: unknown key `bta` in [algorithm.dpo]; did you mean `beta`?
      11 | bta = 0.1
         | ^^^
    run.toml:12:19: `algorithm.dpo.label_smoothing`: expected a number, got string "none"
      12 | label_smoothing = "none"
         |                   ^^^^^^
    run.toml:15:1: unknown key `learning_rte` in [learner]; did you mean `learning_rate`?
      15 | learning_rte = 1e-5
         | ^^^^^^^^^^^^
    run.toml:16:22: `learner.micro_batch_tokens`: expected a whole number, 0 or more, got integer `-5`
      16 | micro_batch_tokens = -5
         |                      ^^
    run.toml:18:2: unknown section `runn`; did you mean `run`?
      18 | [runn]
         |  ^^^^
    --set run.steps=many: `run.steps`: expected a whole number, 0 or more, got string "many"
    --set algorithm.dpo.betta=0.2: unknown key `betta` in [algorithm.dpo]; did you mean `beta`?
    "#);
    assert!(!scene.path("run").exists(), "nothing was made");
}

#[test]
fn a_syntax_error_has_its_place_and_hides_nothing_else() {
    let scene = Scene::new();
    scene.write("run.toml", "[model]\npath = \n[data.train]\npaht = \"pairs.jsonl\"\n[run]\ndir = \"run\"\n");
    let call = scene.aligner(&["plan", "run.toml"]);
    call.fails(
        2,
        &["run.toml:2:", "run.toml:4:1", "unknown key `paht` in [data.train]; did you mean `path`?"],
    );
    call.fails(2, &["`data.train.path`: expected a data file, or `task`", "missing key `algorithm`"]);
}

#[test]
fn an_unknown_algorithm_is_named_with_the_nearest() {
    let scene = Scene::new();
    scene.run_file("pairs.jsonl", "dppo", "");
    let call = scene.aligner(&["train", "run.toml"]);
    call.fails(2, &["run.toml:8:", "unknown algorithm `dppo` in [algorithm]; did you mean `dpo`?"]);
}

#[test]
fn values_that_cannot_work_are_found_before_anything_is_loaded() {
    let scene = Scene::new();
    scene.dpo();
    let overrides =
        ["algorithm.dpo.beta=-1", "learner.max_grad_norm=-2", "run.batch_size=0", "data.train.max_length=1"];
    let arguments: Vec<&str> =
        ["train", "run.toml"].into_iter().chain(overrides.iter().flat_map(|o| ["--set", *o])).collect();
    let call = scene.aligner(&arguments);
    call.fails(2, &["4 problems"]);
    for text in overrides {
        call.fails(2, &[&format!("--set {text}: ")]);
    }
}

#[test]
fn numbers_that_no_setting_may_have_are_named_with_their_place() {
    let scene = Scene::new();
    scene.dpo();
    for (setting, expected) in [
        ("preflight.max_kl=nan", "expected a finite number"),
        ("preflight.max_packing_error=inf", "expected a finite number"),
        ("preflight.max_loss_error=-1", "not negative"),
        ("preflight.max_kl_elsewhere=-0.5", "not negative"),
        ("learner.learning_rate=1e300", "expected a finite number"),
        ("learner.warmup_ratio=-nan", "expected a finite number"),
        ("learner.betas=[0.9, 0.99, 0.5]", "expected 2 items, got 3"),
        ("learner.betas=[0.9]", "expected 2 items, got 1"),
        ("learner.betas=[0.9, nan]", "expected a finite number"),
        ("learner.schedule_options.power=-1", "`learner.schedule_options.power`: must be finite"),
        ("learner.schedule_options.min_lr_rate=2", "at most 1"),
        ("algorithm.dpo.beta=inf", "expected a finite number"),
        ("run.epochs=nan", "expected a finite number"),
        ("run.seed=99999999999999999999", "expected a whole number up to 9223372036854775807"),
        ("run.seed=-1", "expected a whole number, 0 or more"),
        ("run.dir=", "got an empty text"),
        ("model.precision=bf16", "slower than those in `f32` on the device `cpu`"),
    ] {
        let place = format!("--set {setting}: ");
        scene.aligner(&["plan", "run.toml", "--set", setting]).fails(2, &["1 problem\n", &place, expected]);
    }
    let text = scene.read("run.toml") + "\n[preflight]\nmax_kl = nan\n";
    scene.write("run.toml", &text);
    let place = format!("run.toml:{}:10: `preflight.max_kl`", text.lines().count());
    scene.aligner(&["train", "run.toml"]).fails(2, &[&place]);
}

#[test]
fn a_run_file_that_is_not_text_or_not_there_is_named() {
    let scene = Scene::new();
    scene.write("run.toml", b"[model]\npath = \"\xff\"\n");
    scene.aligner(&["train", "run.toml"]).fails(2, &["run.toml:2: not UTF-8"]);
    scene.aligner(&["train", "absent.toml"]).fails(2, &["absent.toml: No such file"]);
}
