//! Sampling settings by name, for `/set` and `/show`.

use aligner_core::Sampling;

/// One setting.
struct Setting {
    name: &'static str,
    get: fn(&Sampling) -> String,
    set: fn(&mut Sampling, &str) -> Result<(), String>,
}

/// A setting whose field is a number of its own name.
macro_rules! number {
    ($field:ident) => {
        Setting {
            name: stringify!($field),
            get: |sampling| sampling.$field.to_string(),
            set: |sampling, text| {
                sampling.$field = text.parse().map_err(|_| format!("expected a number, got `{text}`"))?;
                Ok(())
            },
        }
    };
}

const SETTINGS: [Setting; 12] = [
    number!(temperature),
    number!(max_tokens),
    number!(min_tokens),
    number!(top_k),
    number!(top_p),
    number!(min_p),
    number!(typical_p),
    number!(repetition_penalty),
    number!(presence_penalty),
    number!(frequency_penalty),
    number!(seed),
    Setting { name: "stop", get: |sampling| format!("{:?}", sampling.stop_strings), set: set_stop },
];

/// Gives the setting `name` the value `text`; out of range, nothing changes.
pub(super) fn set(sampling: &mut Sampling, name: &str, text: &str, vocab: usize) -> Result<(), String> {
    let wanted = name.replace('-', "_");
    let setting = SETTINGS.iter().find(|setting| setting.name == wanted).ok_or_else(|| {
        let names: Vec<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
        format!("no setting `{name}`; there are {}", names.join(", "))
    })?;
    let mut changed = sampling.clone();
    (setting.set)(&mut changed, text).map_err(|error| format!("{name}: {error}"))?;
    changed.check(vocab).map_err(|error| error.to_string())?;
    *sampling = changed;
    Ok(())
}

/// All settings, a line each.
pub(super) fn show(sampling: &Sampling) -> String {
    let line = |setting: &Setting| format!("{:<19} {}", setting.name, (setting.get)(sampling));
    SETTINGS.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A JSON list of texts, a JSON text, a plain text, or nothing for no stop.
fn set_stop(sampling: &mut Sampling, text: &str) -> Result<(), String> {
    sampling.stop_strings = match serde_json::from_str(text) {
        _ if text.is_empty() => Vec::new(),
        Ok(serde_json::Value::String(stop)) => vec![stop],
        Ok(list @ serde_json::Value::Array(_)) => {
            serde_json::from_value(list).map_err(|_| format!("expected texts, got {text}"))?
        }
        _ => vec![text.to_string()],
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_checked_and_left_alone_where_wrong() {
        let mut sampling = Sampling::default();
        set(&mut sampling, "temperature", "0.7", 10).unwrap();
        set(&mut sampling, "top-k", "4", 10).unwrap();
        assert!((sampling.temperature - 0.7).abs() < 1e-6 && sampling.top_k == 4);
        let before = sampling.clone();
        for (name, text, part) in [
            ("temprature", "1", "there are temperature, max_tokens"),
            ("temperature", "warm", "expected a number"),
            ("top_p", "2", "top_p"),
            ("seed", "-1", "seed"),
            ("stop", "[1]", "expected texts"),
        ] {
            assert!(set(&mut sampling, name, text, 10).unwrap_err().contains(part), "{name} {text}");
        }
        assert_eq!(sampling, before);
    }

    #[test]
    fn stop_texts_are_json_or_plain() {
        let mut sampling = Sampling::default();
        for (text, stops) in
            [("END", vec!["END"]), ("\"\\n\"", vec!["\n"]), ("[\"a\", \"b\"]", vec!["a", "b"]), ("", vec![])]
        {
            set(&mut sampling, "stop", text, 10).unwrap();
            assert_eq!(sampling.stop_strings, stops, "{text}");
        }
    }

    #[test]
    fn every_setting_shows_the_value_that_sets_it() {
        for setting in &SETTINGS {
            let mut sampling = Sampling::default();
            (setting.set)(&mut sampling, &(setting.get)(&Sampling::default())).unwrap();
            assert_eq!(sampling, Sampling::default(), "{}", setting.name);
        }
    }
}
