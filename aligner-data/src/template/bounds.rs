//! Bounds on what a template may build: it comes with a model from anywhere.
//!
//! Fuel bounds how many instructions a rendering takes, not what one of them makes. That is bounded here: of what
//! is written, of each filter or method that can make much out of little, and, where the template is
//! [rewritten](super::rewrite), of every other value.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::work::{bounded, glance, spend, weigh};

/// Filters that stand in rewritten templates: what goes through them is counted whole, or by its length alone.
pub(super) const WEIGH: &str = "__weigh";
pub(super) const GLANCE: &str = "__glance";
/// The operators `~` and `+`, on a list of operands.
pub(super) const CONCAT: &str = "__concat";
pub(super) const ADD: &str = "__add";

/// Widest field that a format may ask for, in characters.
const MOST_WIDTH: usize = 1 << 12;

/// Most items of one batch, and most slices.
const MOST_PARTS: usize = 1 << 16;

/// Says whether the arguments of a filter make too much.
type Check = fn(&[Value]) -> Result<(), Error>;

/// Puts a check before each filter that can make much out of little, and before what is written.
pub(super) fn bound(environment: &mut Environment<'static>) {
    environment.set_formatter(|out, state, value| {
        weigh(value)?;
        escape_formatter(out, state, value)
    });
    environment.add_filter(WEIGH, |value: Value| weigh(&value).map(|_| value));
    environment.add_filter(GLANCE, |value: Value| glance(&value).map(|()| value));
    environment.add_filter(CONCAT, |operands: Vec<Value>| concat(&operands));
    environment.add_filter(ADD, |operands: Vec<Value>| sum(operands));
    // The engine's own filters get a second name, under which the checked ones call them.
    environment.add_filter("__batch", minijinja::filters::batch);
    environment.add_filter("__slice", minijinja::filters::slice);
    environment.add_filter("__format", minijinja::filters::format);
    environment.add_filter("__indent", minijinja::filters::indent);
    environment.add_filter("__join", minijinja::filters::join);
    environment.add_filter("__list", minijinja::filters::list);
    environment.add_filter("__replace", minijinja::filters::replace);
    let checked: [(&str, &'static str, Check); 7] = [
        ("batch", "__batch", parts),
        ("slice", "__slice", parts),
        ("format", "__format", |args| format(args, '%')),
        ("indent", "__indent", indent),
        ("join", "__join", |args| join(args.first(), args.get(1))),
        ("list", "__list", |args| args.first().map_or(Ok(()), within)),
        ("replace", "__replace", replace),
    ];
    for (name, inner, check) in checked {
        environment.add_filter(name, move |state: &State, args: Rest<Value>| {
            check(&args)?;
            state.apply_filter(inner, &args)
        });
    }
}

/// Python's methods, with the same checks.
pub(super) fn bounded_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    glance(value)?;
    args.iter().try_for_each(glance)?;
    if value.as_str().is_some() {
        let with_self = || [std::slice::from_ref(value), args].concat();
        match method {
            "format" => format(&with_self(), '{')?,
            "join" => join(args.first(), Some(value))?,
            "replace" => replace(&with_self())?,
            _ => {}
        }
    }
    unknown_method_callback(state, value, method, args)
}

/// Checks that what the value holds is within the limit: a list that is repeated is short in memory.
pub(super) fn within(value: &Value) -> Result<(), Error> {
    weigh(value).map(drop)
}

/// The texts of values behind each other.
fn concat(operands: &[Value]) -> Result<String, Error> {
    let mut bytes = 0_usize;
    for operand in operands {
        bytes = bytes.saturating_add(weigh(operand)?);
        bounded(bytes)?;
    }
    Ok(operands.iter().map(ToString::to_string).collect())
}

/// The sum of values from left to right: of texts and of lists, they stand behind each other.
fn sum(operands: Vec<Value>) -> Result<Value, Error> {
    operands.iter().try_for_each(within)?;
    let mut operands = operands.into_iter();
    let first = operands.next().unwrap_or_default();
    operands.try_fold(first, |left, right| add(&left, &right))
}

fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        bounded(a.len().saturating_add(b.len()))?;
        spend(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(left) && is_list(right) {
        let both: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        let both = Value::from(both);
        return weigh(&both).map(|_| both);
    }
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !(number(left) && number(right)) {
        let message =
            format!("tried to use + operator on unsupported types {} and {}", left.kind(), right.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    if let (Ok(a), Ok(b)) = (whole(left), whole(right)) {
        let sum =
            a.checked_add(b).map(|sum| i64::try_from(sum).map_or_else(|_| Value::from(sum), Value::from));
        let failed =
            || Error::new(ErrorKind::InvalidOperation, format!("unable to calculate {left} + {right}"));
        return sum.ok_or_else(failed);
    }
    Ok(Value::from(f64::try_from(left.clone())? + f64::try_from(right.clone())?))
}

/// A number that is whole by its type; true is 1.
fn whole(value: &Value) -> Result<i128, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(i128::from(value.is_true())),
        _ if value.is_integer() => i128::try_from(value.clone()),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "not whole")),
    }
}

/// Batches of so many items, or so many slices.
fn parts(args: &[Value]) -> Result<(), Error> {
    match args.iter().skip(1).find_map(Value::as_usize) {
        Some(count) if count > MOST_PARTS => {
            let message = format!("expected at most {MOST_PARTS} items, got {count}");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
        _ => Ok(()),
    }
}

/// A list's texts with a text between them.
fn join(items: Option<&Value>, between: Option<&Value>) -> Result<(), Error> {
    let Some(Ok(items)) = items.map(Value::try_iter) else { return Ok(()) };
    let between = between.and_then(Value::as_str).unwrap_or_default();
    let mut bytes = 0_usize;
    for item in items {
        bytes = bytes.saturating_add(weigh(&item)?).saturating_add(between.len());
        bounded(bytes)?;
    }
    Ok(())
}

fn replace(args: &[Value]) -> Result<(), Error> {
    let text = |at: usize| args.get(at).and_then(Value::as_str);
    let (Some(text), Some(from), Some(to)) = (text(0), text(1), text(2)) else { return Ok(()) };
    bounded(text.len().saturating_add(text.matches(from).count().saturating_mul(to.len())))
}

fn indent(args: &[Value]) -> Result<(), Error> {
    let Some(text) = args.first().and_then(Value::as_str) else { return Ok(()) };
    let named = args.last().filter(|last| last.is_kwargs()).and_then(|last| last.get_attr("width").ok());
    let width = named.iter().chain(args.get(1)).find_map(Value::as_usize).unwrap_or(4);
    let lines = text.matches('\n').count() + 1;
    bounded(text.len().saturating_add(lines.saturating_mul(width)))
}

/// Refuses wide fields, each of which begins at `mark`: `%5d`, or `{:5}`.
fn format(args: &[Value], mark: char) -> Result<(), Error> {
    let Some((text, rest)) = args.split_first().and_then(|(text, rest)| Some((text.as_str()?, rest))) else {
        return Ok(());
    };
    // A mark that is doubled stands for itself.
    let text = text.replace(&String::from_iter([mark, mark]), "");
    let mut bytes = text.len();
    for field in text.split(mark).skip(1) {
        let widest = if mark == '{' { braced_width(field) } else { printf_width(field) };
        if widest > MOST_WIDTH {
            let message = format!("format: a field {widest} wide, where at most {MOST_WIDTH} is allowed");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        bytes = bytes.saturating_add(widest);
    }
    let mut longest = 0_usize;
    for value in rest {
        longest = longest.saturating_add(weigh(value)?);
    }
    // Any field may show any value.
    bounded(bytes.saturating_add(longest.saturating_mul(text.matches(mark).count())))
}

/// The larger of width and precision of `(key)`, flags, width, `.` and precision.
fn printf_width(field: &str) -> usize {
    let spec =
        field.strip_prefix('(').and_then(|keyed| keyed.split_once(')')).map_or(field, |(_, spec)| spec);
    let end = spec.find(|c: char| !c.is_ascii_digit() && !"#- +.".contains(c)).unwrap_or(spec.len());
    largest_number(&spec[..end])
}

/// The larger of width and precision of `name:spec}`.
fn braced_width(field: &str) -> usize {
    let inside = field.split_once('}').map_or(field, |(inside, _)| inside);
    inside.split_once(':').map_or(0, |(_, spec)| largest_number(spec))
}

fn largest_number(text: &str) -> usize {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::ChatTemplate;

    fn render(source: &str) -> Result<String, String> {
        ChatTemplate::new(source).unwrap().render(&[], false).map_err(|error| error.to_string())
    }

    #[test]
    fn a_template_that_makes_much_out_of_little_is_stopped() {
        for source in [
            "{{ '%999999999999d' | format(1) }}",
            "{{ '%0999999999d' | format(1) }}",
            "{{ '%.999999999f' | format(1) }}",
            "{{ '%(x)999999999s' | format(x=1) }}",
            "{{ '{:>999999999}'.format('x') }}",
            "{{ 'x' | indent(99999999999, true) }}",
            "{{ 'x' | indent(width=99999999999, first=true) }}",
            "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
            "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
            "{{ ([1] * 999999999999) | join('x') }}",
            "{{ 'x'.join([''] * 999999999999) }}",
            "{{ ([1] * 999999999999) | list }}",
            "{{ ([1] * 999999999999) | tojson }}",
            "{{ {'a': 1} | tojson(indent=999999999999) }}",
            "{{ 'x' * 1000000000 }}",
            "{{ [1] * 999999999999 }}",
            "{% set x = namespace(t='x') %}{% for i in range(26) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
            "{% for i in range(1000) %}{% for j in range(1000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        ] {
            let message = render(source).expect_err(source);
            assert!(message.starts_with("chat template: "), "{source}: {message}");
            assert!(message.contains("chat_template"), "{source}: {message}");
        }
    }

    #[test]
    fn what_templates_usually_do_is_as_before() {
        for (source, expected) in [
            ("{{ '%5d|%-4s|%05.1f' | format(1, 'ab', 2.5) }}", "    1|ab  |002.5"),
            ("{{ '100%% of %s in 20240101' | format('x') }}", "100% of x in 20240101"),
            ("{{ '{:>4}|{}'.format('ab', 7) }}", "  ab|7"),
            ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
            ("{{ 'a\nb' | indent(width=1, first=true) }}", " a\n b"),
            ("{{ [1, 'b'] | join(', ') }}", "1, b"),
            ("{{ '-'.join(['a', 'b']) }}", "a-b"),
            ("{{ 'aXb' | replace('X', '--') }}{{ 'aXbX'.replace('X', '', 1) }}", "a--babX"),
            ("{{ range(3) | list }}", "[0, 1, 2]"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
        }
    }
}
