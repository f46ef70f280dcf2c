//! The Jinja environment that Hugging Face templates are written for.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::bounds::{bound, bounded_method, within};
use super::generation::{FILTER, Markers};
use super::python_json::{Style, dumps};
use super::rewrite::{deeply, rewrite};

/// The one template's name in the environment, as error messages show it.
pub(super) const NAME: &str = "chat_template";

/// Instructions that one rendering may take, far above what a long dialogue needs: under a second.
const FUEL: u64 = 8_000_000;

/// Compiles `source` in an environment with transformers' settings, filters and functions, in which it
/// is `now_secs` (seconds since 1970), or the moment of each rendering.
pub(super) fn compile(
    source: &str,
    markers: Markers,
    now_secs: Option<i64>,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    // White space between tags is treated where the template is rewritten, and only there.
    environment.set_keep_trailing_newline(true);
    // A template comes with a model from anywhere: an endless one ends in an error.
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(bounded_method);
    bound(&mut environment);
    environment.add_filter("tojson", to_json);
    environment.add_filter(FILTER, move |text: String| markers.wrap(&text));
    // `None` is not iterable in Python; the engine iterates it as an empty list.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| {
        strftime(&format, now_secs.unwrap_or_else(self::now_secs))
    });
    deeply(|| {
        environment.add_template_owned(NAME, rewrite(source, NAME)?)?;
        Ok(environment)
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the engine calls filters with owned arguments")]
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let style = Style {
        indent: options.get("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: separators(options.get("separators")?)?,
    };
    // Characters are never escaped: transformers' own default, and no template asks otherwise.
    let _ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let failed =
        |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error);
    // A list that is short to write may be long to build.
    within(&value)?;
    let value = serde_json::to_value(&value).map_err(failed)?;
    dumps(&value, &style).map_err(failed)
}

fn separators(value: Option<Value>) -> Result<Option<(String, String)>, Error> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(None) };
    let pair: Vec<String> = value.try_iter()?.map(|item| item.to_string()).collect();
    match <[String; 2]>::try_from(pair) {
        Ok([item, key]) => Ok(Some((item, key))),
        Err(got) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: `separators` must be two strings, got {}", got.len()),
        )),
    }
}

/// Seconds since 1970, as chat templates see them: the system's, or `SOURCE_DATE_EPOCH`'s where nothing
/// may depend on the day.
pub fn now_secs() -> i64 {
    let fixed = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|secs| secs.parse().ok());
    fixed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
    })
}

/// `time` (seconds since 1970, UTC) in the format of C's `strftime`.
fn strftime(format: &str, time: i64) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let days = time.div_euclid(86_400);
    let secs = time.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let month_name = MONTHS[(month - 1) as usize];
    let day_name = DAYS[days.rem_euclid(7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let written = match directive {
            Some('Y') => format!("{year:04}"),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('H') => format!("{:02}", secs / 3600),
            Some('M') => format!("{:02}", secs / 60 % 60),
            Some('S') => format!("{:02}", secs % 60),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let shown = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: `%{shown}` is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&written);
    }
    Ok(out)
}

/// Year, month and day of a day count since 1970 (Howard Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y", 0).unwrap(), "01 Jan 1970");
        assert_eq!(
            strftime("%A %d %B %Y %H:%M:%S", 1_709_210_096).unwrap(),
            "Thursday 29 February 2024 12:34:56"
        );
        assert!(strftime("%Q", 0).unwrap_err().to_string().contains("%Q"));
    }

    #[test]
    fn a_template_may_be_told_what_day_it_is() {
        let environment = compile("{{ strftime_now('%d %b %Y') }}", Markers::USUAL, Some(0)).unwrap();
        assert_eq!(environment.get_template(NAME).unwrap().render(()).unwrap(), "01 Jan 1970");
    }

    #[test]
    fn to_json_takes_python_keywords_and_refuses_others() {
        let render = |source: &str| {
            compile(source, Markers::USUAL, None)?
                .get_template(NAME)?
                .render(minijinja::context! { x => [1, 2] })
        };
        assert_eq!(render("{{ x | tojson }}").unwrap(), "[1, 2]");
        assert_eq!(render("{{ x | tojson(separators=(',', ':')) }}").unwrap(), "[1,2]");
        assert!(render("{{ x | tojson(sort=true) }}").is_err());
    }

    #[test]
    fn none_is_not_iterable_but_texts_and_lists_are() {
        let source = "{{ none is iterable }} {{ 'a' is iterable }} {{ [] is iterable }} {{ 1 is iterable }}";
        let environment = compile(source, Markers::USUAL, None).unwrap();
        let rendered = environment.get_template(NAME).unwrap().render(()).unwrap();
        assert_eq!(rendered.to_lowercase(), "false true true false");
    }

    #[test]
    fn raise_exception_carries_its_message() {
        let environment = compile("{{ raise_exception('no tools here') }}", Markers::USUAL, None).unwrap();
        let error = environment.get_template(NAME).unwrap().render(()).unwrap_err();
        assert!(error.to_string().contains("no tools here"), "{error}");
    }

    #[test]
    fn loops_can_break() {
        let source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}";
        let environment = compile(source, Markers::USUAL, None).unwrap();
        assert_eq!(environment.get_template(NAME).unwrap().render(()).unwrap(), "1");
    }
}
