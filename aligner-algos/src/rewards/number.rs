//! Numbers as people and models write them.

/// The value of a number: thousands set off by commas, a currency sign before it, a per cent sign or a full
/// stop behind it, `a/b`, `\frac{a}{b}`; none where the text is anything else.
pub(super) fn parse(text: &str) -> Option<f64> {
    let text = text.trim().trim_end_matches('.').trim_matches('$').trim_end_matches(['%', '\\']).trim();
    let (sign, text) = match text.chars().next()? {
        '-' | '−' => (-1.0, text.trim_start_matches(['-', '−'])),
        '+' => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    let text = text.trim_start_matches(['$', '€', '£', '\\']).trim();
    let value = fraction(text).or_else(|| decimal(text))?;
    Some(sign * value)
}

fn fraction(text: &str) -> Option<f64> {
    // A backslash before it is off already.
    let command = text.strip_prefix("frac{").or_else(|| text.strip_prefix("dfrac{"));
    let (numerator, denominator) = match command.or_else(|| text.strip_prefix("tfrac{")) {
        Some(rest) => rest.strip_suffix('}')?.split_once("}{")?,
        None => text.split_once('/')?,
    };
    let denominator = decimal(denominator.trim())?;
    (denominator != 0.0).then_some(decimal(numerator.trim())? / denominator)
}

/// Digits with at most one point and an exponent; commas only where they set off thousands.
fn decimal(text: &str) -> Option<f64> {
    if !text.starts_with(|symbol: char| symbol.is_ascii_digit() || symbol == '.') {
        return None;
    }
    let whole = text.split(['.', 'e', 'E']).next().unwrap_or(text);
    let (first, groups) = whole.split_once(',').map_or((whole, None), |(first, rest)| (first, Some(rest)));
    if let Some(groups) = groups {
        let sound = !first.is_empty() && first.len() <= 3 && groups.split(',').all(|group| group.len() == 3);
        if !sound {
            return None;
        }
    }
    let value: f64 = text.replace(',', "").parse().ok()?;
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_spellings_are_read() {
        let cases = [
            ("7", 7.0),
            (" +01,000.00 ", 1000.0),
            ("-0.5", -0.5),
            ("−12", -12.0),
            ("$1,234.", 1234.0),
            ("-$3", -3.0),
            ("$72$", 72.0),
            ("\\$5", 5.0),
            ("45%", 45.0),
            ("45\\%", 45.0),
            ("3/4", 0.75),
            ("-3 / 4", -0.75),
            ("\\frac{1}{8}", 0.125),
            ("-\\dfrac{1}{2}", -0.5),
            (".25", 0.25),
            ("1e3", 1000.0),
        ];
        for (text, value) in cases {
            assert_eq!(parse(text), Some(value), "{text}");
        }
    }

    #[test]
    fn other_texts_are_no_numbers() {
        for text in [
            "",
            "-",
            "--",
            "1,2",
            "12,34,567",
            ",123",
            "1.2.3",
            "1/0",
            "x",
            "7 apples",
            "inf",
            "nan",
            "1e999",
            "/",
            "0x10",
            "\\frac{1}",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
