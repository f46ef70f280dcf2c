//! Programs as rewards: real ones, that answer, die, hang and talk nonsense.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aligner_algos::rewards::{ProcessConfig, ProcessReward, RewardParts};
use aligner_core::{Result, Reward, Sample, Score};
use serde_json::json;

fn sample(at: usize) -> Sample {
    Sample {
        text: "x".repeat(at),
        metadata: json!({"prompt": format!("prompt {at}"), "id": format!("row {at}")}),
        ..Sample::response(&[1, 2], &[3, 4, 5])
    }
}

fn samples(count: usize) -> Vec<Sample> {
    (0..count).map(sample).collect()
}

/// A Python program that runs `body` for each request, as `sample`; `n` counts them from 0.
fn python(body: &str) -> ProcessConfig {
    let body = body.replace('\n', "\n    ");
    let source = format!(
        "import json, os, sys, time\n\
         def give(id, **fields): print(json.dumps({{'id': id, **fields}}), flush=True)\n\
         for n, line in enumerate(sys.stdin):\n    sample = json.loads(line)\n    {body}\n"
    );
    command(&["python3", "-c", &source])
}

fn command(words: &[&str]) -> ProcessConfig {
    ProcessConfig {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        timeout_secs: 60.0,
        ..ProcessConfig::default()
    }
}

fn reward(config: ProcessConfig) -> ProcessReward {
    ProcessReward::new(config).unwrap()
}

fn score(config: ProcessConfig, count: usize) -> Result<Vec<Score>> {
    reward(config).score(&samples(count))
}

fn refused(config: ProcessConfig, count: usize) -> String {
    score(config, count).unwrap_err().to_string()
}

/// The length of each response.
fn lengths(count: usize) -> Vec<Score> {
    (0..count).map(|at| Score::Sample(at as f32)).collect()
}

const LENGTH: &str = "give(sample['id'], score=len(sample['response']))";

/// Waits for a file with a process id in it.
fn process_id(path: &Path) -> i32 {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Ok(id) = text.trim().parse() {
            return id;
        }
        assert!(Instant::now() < until, "{} was never written", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process ends within some seconds.
fn ends(id: i32) -> bool {
    let pid = rustix::process::Pid::from_raw(id).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        let gone = rustix::process::test_kill_process(pid).is_err();
        // Nobody may be there to collect what is left of a grandchild.
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        if gone || stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

#[test]
fn a_program_is_kept_between_batches() {
    let body = "give(sample['id'], score=os.getpid() % 1000003)";
    let reward = reward(python(body));
    let first = reward.score(&samples(2)).unwrap();
    assert_eq!(first[0], first[1]);
    assert_eq!(reward.score(&samples(1)).unwrap()[0], first[0], "the same process");
    assert_eq!(reward.score(&[]).unwrap(), []);
}

#[test]
fn requests_hold_prompt_response_and_metadata() {
    let body = "assert set(sample) == {'id', 'prompt', 'response', 'metadata'}, sample\n\
                ok = sample['metadata']['id'] == 'row ' + sample['prompt'].split()[1]\n\
                give(sample['id'], score=len(sample['response']) if ok else None)";
    assert_eq!(score(python(body), 5).unwrap(), lengths(5));
}

#[test]
fn the_example_works() {
    let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/rewards/length.py"));
    assert!(std::fs::read_to_string(&script).unwrap().lines().count() < 15);
    let reward = reward(command(&["python3", script.to_str().unwrap()]));
    let texts = ["", "one", "one two three four", &"word ".repeat(500)];
    let samples = texts.map(|text| Sample { text: text.into(), ..Sample::default() });
    let expected = [Score::None, Score::Sample(-0.005), Score::Sample(-0.02), Score::Sample(-1.0)];
    assert_eq!(reward.score(&samples).unwrap(), expected);
}

#[test]
fn scores_may_come_in_any_order_late_and_in_bulk() {
    let body = "todo = globals().setdefault('todo', [])\n\
                todo.append(sample)\n\
                if len(todo) == 200:\n    \
                    for sample in reversed(todo): give(sample['id'], score=len(sample['response']))";
    assert_eq!(score(python(body), 200).unwrap(), lengths(200));
}

#[test]
fn full_pipes_do_not_block() {
    // Far more than a pipe holds, in both directions, with nothing read before all is written.
    let source = "import json, sys\n\
                  first = sys.stdin.readline()\n\
                  sys.stderr.write('e' * 1000000 + '\\n')\n\
                  sys.stdout.write(' ' * 1000000 + '\\n')\n\
                  sys.stdout.flush()\n\
                  for line in [first] + [sys.stdin.readline() for _ in range(299)]:\n    \
                      print(json.dumps({'id': json.loads(line)['id'], 'score': 1}) + ' ' * 9000)\n\
                  sys.stdout.flush()\n\
                  sys.stdin.read()\n";
    let mut samples = samples(300);
    for sample in &mut samples {
        sample.text = "y".repeat(10_000);
    }
    let scores = reward(command(&["python3", "-c", source])).score(&samples).unwrap();
    assert_eq!(scores, vec![Score::Sample(1.0); 300]);
}

#[test]
fn no_score_and_token_scores_are_told_from_a_score() {
    let body = "give(sample['id'], **[{'score': None}, {'score': 0}, {'scores': [1, 2, 3]}, {'scores': [0, 0, 1, 1, 1]}][n])";
    let expected = [
        Score::None,
        Score::Sample(0.0),
        Score::Tokens(vec![0.0, 0.0, 1.0, 2.0, 3.0]),
        Score::Tokens(vec![0.0, 0.0, 1.0, 1.0, 1.0]),
    ];
    assert_eq!(score(python(body), 4).unwrap(), expected);
}

#[test]
fn tokens_are_sent_where_they_are_asked_for() {
    let body = "give(sample['id'], scores=[t * m for t, m in zip(sample['tokens'], sample['mask'])])";
    let config = ProcessConfig { send_tokens: true, ..python(body) };
    assert_eq!(score(config, 1).unwrap(), [Score::Tokens(vec![0.0, 0.0, 3.0, 4.0, 5.0])]);
}

#[test]
fn texts_of_any_script_arrive_whatever_the_locale() {
    let text = "é 漢字 \u{1F600} \u{2028} \" \\ \u{0}\n\r\tend";
    let codes: Vec<u32> = text.chars().map(u32::from).collect();
    let body = format!("give(sample['id'], score=float([ord(c) for c in sample['response']] == {codes:?}))");
    for locale in ["C", "POSIX", "en_US.ISO-8859-1"] {
        let mut config = python(&body);
        config.env.insert("LC_ALL".into(), locale.into());
        config.env.insert("PYTHONUTF8".into(), "0".into());
        config.env.insert("PYTHONCOERCECLOCALE".into(), "0".into());
        let samples = [Sample { text: text.into(), ..Sample::default() }];
        assert_eq!(reward(config).score(&samples).unwrap(), [Score::Sample(1.0)], "{locale}");
    }
}

#[test]
fn several_workers_share_a_batch() {
    let body = "time.sleep(0.05)\ngive(sample['id'], score=os.getpid())";
    let reward = reward(ProcessConfig { workers: 3, ..python(body) });
    let start = Instant::now();
    let scores = reward.score(&samples(9)).unwrap();
    let mut processes: Vec<String> = scores.iter().map(|score| format!("{score:?}")).collect();
    processes.sort();
    processes.dedup();
    assert_eq!(processes.len(), 3);
    assert!(start.elapsed() < Duration::from_secs(30));
    let ordered = ProcessReward::new(ProcessConfig { workers: 4, ..python(LENGTH) }).unwrap();
    for count in [10, 2, 7] {
        assert_eq!(ordered.score(&samples(count)).unwrap(), lengths(count), "each score with its sample");
    }
}

#[test]
fn a_program_that_dies_is_started_again_and_asked_for_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("asked");
    // Dies at its third request, so that it takes three lives for seven samples.
    let body = format!(
        "open({:?}, 'a').write(str(sample['id']) + '\\n')\nif n == 2: os._exit(3)\n{LENGTH}",
        log.to_str().unwrap()
    );
    assert_eq!(score(python(&body), 7).unwrap(), lengths(7));
    let asked = std::fs::read_to_string(log).unwrap();
    // Requests 2, 4 and 6 met a death each, and were sent again.
    assert_eq!(asked.lines().collect::<Vec<_>>(), ["0", "1", "2", "2", "3", "4", "4", "5", "6", "6"]);
}

#[test]
fn deaths_without_end_are_an_error_with_the_last_words() {
    let body = "print('out of', file=sys.stderr)\nraise ValueError('luck')";
    let message = refused(ProcessConfig { max_restarts: 1, ..python(body) }, 2);
    assert!(message.contains("`python3 -c"), "{message}");
    assert!(message.contains("ended (exit status: 1") && message.contains("ValueError: luck"), "{message}");
    assert!(
        message.contains("sample 0 (row 0), sample 1 (row 1)") && message.contains("1 times"),
        "{message}"
    );
    let message = refused(ProcessConfig { max_restarts: 0, ..command(&["sh", "-c", "kill -9 $$"]) }, 1);
    assert!(message.contains("signal: 9") && message.contains("0 times"), "{message}");
}

#[test]
fn restarts_count_from_the_last_batch_that_was_finished() {
    // One life for each batch.
    let reward = reward(ProcessConfig { max_restarts: 1, ..python(&format!("{LENGTH}\nos._exit(0)")) });
    for _ in 0..5 {
        assert_eq!(reward.score(&samples(1)).unwrap(), lengths(1));
    }
}

#[test]
fn too_few_scores_name_their_samples() {
    let body = "if len(sample['response']) % 2 == 0: give(sample['id'], score=1)";
    let config = ProcessConfig { timeout_secs: 1.0, startup_secs: 2.0, ..python(body) };
    let message = refused(config, 4);
    assert!(
        message.contains("no score for sample 1 (row 1), sample 3 (row 3) within 3 seconds"),
        "{message}"
    );
    // A program that ends without them.
    let source = "read line; echo '{\"id\": 0, \"score\": 1}'";
    let config = ProcessConfig { max_restarts: 0, ..command(&["sh", "-c", source]) };
    let message = refused(config, 2);
    assert!(message.contains("exit status: 0") && message.contains("for sample 1 (row 1)"), "{message}");
}

#[test]
fn a_program_that_hangs_is_killed_and_the_next_batch_has_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("id");
    let body = format!(
        "if len(sample['response']) == 0:\n    \
             open({:?}, 'w').write(str(os.getpid()))\n    \
             time.sleep(1000)\n{LENGTH}",
        file.to_str().unwrap()
    );
    let reward = reward(ProcessConfig { timeout_secs: 1.0, startup_secs: 2.0, ..python(&body) });
    let start = Instant::now();
    let message = reward.score(&samples(2)).unwrap_err().to_string();
    assert!(message.contains("sample 0 (row 0), sample 1 (row 1)") && message.contains("flush"), "{message}");
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(30), "{took:?}");
    assert!(ends(process_id(&file)), "the process is killed");
    assert_eq!(reward.score(&samples(3)[1..]).unwrap(), lengths(3)[1..], "another one answers");
}

#[test]
fn the_time_to_start_counts_once() {
    let source = format!("import time; time.sleep(1.5)\n{}", python(LENGTH).command[2]);
    let config =
        ProcessConfig { timeout_secs: 1.0, startup_secs: 30.0, ..command(&["python3", "-c", &source]) };
    let reward = reward(config);
    assert_eq!(reward.score(&samples(2)).unwrap(), lengths(2));
    assert_eq!(reward.score(&samples(2)).unwrap(), lengths(2));
}

#[test]
fn nonsense_names_its_line_and_the_sample_that_waits() {
    let message = refused(python(&format!("{LENGTH}\nif n == 1: print('debug:', sample, flush=True)")), 3);
    assert!(message.contains("line 3 of its output is not JSON"), "{message}");
    assert!(message.contains("sample 2 (row 2) waits") && message.contains("debug:"), "{message}");
    let message = refused(python("give(sample['id'], score=float('nan'))"), 1);
    assert!(message.contains("line 1 of its output is not JSON") && message.contains("NaN"), "{message}");
    let message = refused(python("give(sample['id'] + 100, score=1)"), 1);
    assert!(message.contains("the id 100, which was not asked for"), "{message}");
    let message = refused(python(&format!("{LENGTH}\n{LENGTH}")), 2);
    assert!(message.contains("line 2 of its output is a second answer for sample 0 (row 0)"), "{message}");
    let message = refused(python("sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stdout.flush()"), 1);
    assert!(message.contains("is not JSON"), "{message}");
    let message = refused(command(&["sh", "-c", "head -c 20000000 /dev/zero; sleep 60"]), 1);
    assert!(message.contains("line 1 of its output is over"), "{message}");
}

#[test]
fn a_late_second_answer_is_not_taken_for_another_samples() {
    let reward = reward(python(&format!("{LENGTH}\nif n == 1: give(sample['id'], score=99)")));
    assert_eq!(reward.score(&samples(2)).unwrap(), lengths(2));
    std::thread::sleep(Duration::from_millis(300));
    let message = reward.score(&samples(2)).unwrap_err().to_string();
    assert!(message.contains("the id 1, which was not asked for"), "{message}");
    assert_eq!(reward.score(&samples(1)).unwrap(), lengths(1), "a new program, a new beginning");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let message = refused(command(&["no-such-program-here", "--fast"]), 1);
    assert!(message.contains("`no-such-program-here --fast` could not be started"), "{message}");
    let config = ProcessConfig { directory: Some("/no/such/directory".into()), ..python(LENGTH) };
    assert!(refused(config, 1).contains("could not be started"));
}

#[test]
fn it_runs_in_its_directory_with_its_variables() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("bonus"), "2").unwrap();
    let body = "give(sample['id'], score=float(open('bonus').read()) + float(os.environ['MORE']))";
    let mut config = ProcessConfig { directory: Some(dir.path().into()), ..python(body) };
    config.env.insert("MORE".into(), "0.5".into());
    assert_eq!(score(config, 1).unwrap(), [Score::Sample(2.5)]);
}

#[test]
fn dropping_the_reward_kills_the_program_and_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let (own, child) = (dir.path().join("own"), dir.path().join("child"));
    let source = format!(
        "trap '' TERM HUP INT\n(echo $$ > {}; exec sh -c 'trap \"\" TERM HUP; echo $$ > {}; sleep 1000') &\n\
         read line; echo '{{\"id\": 0, \"score\": 1}}'; sleep 1000",
        own.display(),
        child.display()
    );
    let reward = reward(command(&["sh", "-c", &source]));
    assert_eq!(reward.score(&samples(1)).unwrap(), [Score::Sample(1.0)]);
    let ids = [process_id(&own), process_id(&child)];
    assert_ne!(ids[0], ids[1]);
    drop(reward);
    assert!(ids.into_iter().all(ends), "{ids:?} still run");
}

#[test]
fn nothing_is_started_before_the_first_sample() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("started");
    let config = command(&["sh", "-c", &format!("echo > {}; cat > /dev/null", file.display())]);
    let reward = reward(config);
    assert_eq!(reward.score(&[]).unwrap(), []);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!file.exists());
}

/// Counts the events that hold a text.
struct Log(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = String::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            write!(fields, "{field}={value:?} ").unwrap();
        });
        self.0.lock().unwrap().push(fields);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn the_standard_error_is_logged_with_the_programs_name() {
    let events = Arc::new(Mutex::new(Vec::new()));
    // Threads of the reward log too, so the subscriber is everybody's; texts of other tests do not matter.
    tracing::subscriber::set_global_default(Log(Arc::clone(&events))).unwrap();
    let body = format!("print('a remark on', sample['id'], file=sys.stderr, flush=True)\n{LENGTH}");
    let reward = reward(python(&body));
    assert_eq!(reward.score(&samples(2)).unwrap(), lengths(2));
    let until = Instant::now() + Duration::from_secs(10);
    let logged = || {
        let events = events.lock().unwrap();
        events.iter().any(|event| event.contains("a remark on 1") && event.contains("program=\"python3 -c"))
    };
    while !logged() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(logged(), "{:?}", events.lock().unwrap());
}

#[test]
fn a_program_is_a_part_like_any_other() {
    let parts = RewardParts::default();
    let parts = parts.with("program", 0.5, Box::new(reward(python(LENGTH)))).unwrap();
    let parts = parts.with("closure", 1.0, Box::new(|_: &Sample| Score::Sample(1.0))).unwrap();
    let scored = parts.score(&samples(3)).unwrap();
    assert_eq!(scored.totals, [Some(1.0), Some(1.5), Some(2.0)]);
    let parts = RewardParts::default().with("program", 1.0, Box::new(reward(python("os._exit(1)")))).unwrap();
    let message = parts.score(&samples(1)).unwrap_err().to_string();
    assert!(message.starts_with("reward `program`: the program `python3 -c"), "{message}");
}
