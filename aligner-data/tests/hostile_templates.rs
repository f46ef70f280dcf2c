//! Templates that want much time or memory: an error within a second of a processor's time, and in little memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use aligner_data::{ChatTemplate, Message};

/// Bytes that are in use, and the most that have been.
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The engine itself repeats a text up to a hundred million bytes.
const MOST_BYTES: usize = 300 << 20;

struct Counted;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// The counts are of the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Seconds that a processor has spent on this thread.
fn processor_secs() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos: f64 = stat.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0);
    nanos / 1e9
}

/// Renders and gives the error, if any, with the time and memory that it took.
fn cost(source: &str) -> (Option<String>, f64, usize) {
    let messages = [Message::new("user", "Hi"), Message::new("assistant", "Ho")];
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let start = processor_secs();
    let rendered = ChatTemplate::new(source).and_then(|template| template.render(&messages, true));
    let taken = processor_secs() - start;
    (rendered.err().map(|error| error.to_string()), taken, MOST.load(Ordering::Relaxed) - before)
}

const DOUBLING: [&str; 11] = [
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}",
    "{% set x = namespace(t=[1]) %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}{{ x.t | length }}",
    "{% set x = namespace(t=[1]) %}{% for i in range(60) %}{% set x.t = [x.t, x.t] %}{% endfor %}{{ x.t }}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set y %}{{ x.t }}{{ x.t }}{% endset %}{% set x.t = y %}{% endfor %}",
    "{% macro m(t, n) %}{% if n %}{{ m(t ~ t, n - 1) | length }}{% endif %}{% endmacro %}{{ m('x', 60) }}",
    "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = m(x.t) %}{% endfor %}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = x.t | replace('x', 'xx') %}{% endfor %}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = x.t.replace('x', 'xx') %}{% endfor %}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = [x.t, x.t] | join %}{% endfor %}",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = '%s%s' | format(x.t, x.t) %}{% endfor %}",
];

const ENDLESS: [&str; 19] = [
    "{{ [1] * 999999999999 == [1] * 999999999999 }}",
    "{{ 2 in [1] * 999999999999 }}",
    "{{ ([1] * 999999999999) ~ '' }}",
    "{{ ([1] * 999999999999) | sort }}",
    "{{ ([1] * 999999999999) | pprint }}",
    "{{ ([1] * 999999999999) | string | length }}",
    "{{ ([1] * 999999999999) | map('upper') | list | length }}",
    "{{ ([1] * 999999999999)[::-1][0] }}",
    "{{ [1] | slice(1000000000) | list | length }}",
    "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "{{ 'a' * 100000000 ~ 'a' * 100000000 ~ 'a' * 100000000 ~ 'a' * 100000000 ~ 'a' * 100000000 }}",
    "{% set x = 'a' * 16000000 %}{% for i in range(100000) %}{% for j in range(1000) %}{% set n = x | length %}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 16000000 %}{% for i in range(100000) %}{% if x[15999999] %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 16000000 %}{% for i in range(100000) %}{% if x == x ~ '' %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 16000000 %}{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 16000000 %}{% for i in range(100000) %}{% if x.find('b') %}{% endif %}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}{% for j in range(100000) %}some raw text that is gathered{% endfor %}{% endfor %}{% endset %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i * j %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i %}{% endfor %}{% endfor %}",
];

#[test]
#[expect(clippy::print_stdout, reason = "what was measured, for those who ask for it")]
fn much_out_of_little_is_an_error_in_a_second_and_in_little_memory() {
    let _alone = ONE_AT_A_TIME.lock();
    let (mut longest, mut largest): (f64, usize) = (0.0, 0);
    for source in DOUBLING.into_iter().chain(ENDLESS) {
        let (error, secs, bytes) = cost(source);
        assert!(error.is_some(), "{source}");
        assert!(secs < 1.0, "{secs:.2} s: {source}: {error:?}");
        assert!(bytes < MOST_BYTES, "{bytes} bytes: {source}: {error:?}");
        println!("{secs:.3} s, {:>3} MiB: {source}", bytes >> 20);
        (longest, largest) = (longest.max(secs), largest.max(bytes));
    }
    println!("at most {longest:.2} s and {} MiB", largest >> 20);
}

#[test]
fn lists_within_lists_do_not_end_the_process() {
    let _alone = ONE_AT_A_TIME.lock();
    for deeper in [
        "[x.t]",
        "{'a': x.t}",
        "[x.t] + [1]",
        "dict(a=x.t)",
        "x.t | batch(1)",
        "namespace(a=x.t)",
        "[x.t] * 1",
    ] {
        let source = format!(
            "{{% set x = namespace(t=[1]) %}}{{% for i in range(100000) %}}{{% set x.t = {deeper} %}}{{% endfor %}}"
        );
        let (error, _, _) = cost(&source);
        assert!(error.is_some_and(|error| error.contains("more than 64 deep")), "{deeper}");
    }
}

/// What a long dialogue needs is far from the bounds.
#[test]
#[expect(clippy::print_stdout, reason = "what was measured, for those who ask for it")]
fn a_long_dialogue_renders() {
    let _alone = ONE_AT_A_TIME.lock();
    let template = "{% set ns = namespace(last=0, all=[]) %}{% for m in messages[::-1] %}\
        {% if m.role == 'user' and ns.last < (messages | length) - loop.index0 %}{% set ns.last = ns.last + 1 %}{% endif %}\
        {% endfor %}{% for m in messages %}{{ '<' + m.role + '>\n' }}{% if '</think>' in m.content %}\
        {{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content | trim }}{% endif %}\
        {% if not loop.last and messages[loop.index].role == m.role %}{{ raise_exception('twice') }}{% endif %}{{ '<end>' }}{% endfor %}";
    let messages: Vec<Message> = (0..2000)
        .map(|at| {
            Message::new(
                if at % 2 == 0 { "user" } else { "assistant" },
                "some words of a dialogue ".repeat(40),
            )
        })
        .collect();
    let template = ChatTemplate::new(template).unwrap();
    let start = processor_secs();
    let text = template.render(&messages, false).unwrap();
    println!("{} bytes in {:.3} s", text.len(), processor_secs() - start);
    assert!(text.len() > 2_000_000);
}
