//! Arithmetic with whole numbers, evaluated exactly: what a countdown's answer comes to.

use std::iter::Peekable;
use std::str::CharIndices;

/// Bytes of an expression, at most.
const MOST_BYTES: usize = 2000;
/// Brackets and signs within each other, at most.
const MOST_DEPTH: usize = 100;

/// What an expression comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Evaluated {
    /// Its value.
    pub(super) value: Ratio,
    /// The numbers that it is made of, in order.
    pub(super) numbers: Vec<i64>,
}

/// A fraction in lowest terms; its denominator is positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ratio {
    numerator: i128,
    denominator: i128,
}

impl From<i64> for Ratio {
    fn from(value: i64) -> Self {
        Self { numerator: value.into(), denominator: 1 }
    }
}

impl Ratio {
    /// None where a part leaves 128 bits, or the denominator is 0.
    fn new(numerator: Option<i128>, denominator: Option<i128>) -> Option<Self> {
        let (numerator, denominator) = (numerator?, denominator?);
        if denominator == 0 {
            return None;
        }
        let common = i128::try_from(gcd(numerator.unsigned_abs(), denominator.unsigned_abs())).ok()?;
        let sign = denominator.signum();
        Some(Self {
            numerator: (numerator / common).checked_mul(sign)?,
            denominator: (denominator / common).checked_mul(sign)?,
        })
    }

    fn negated(self) -> Option<Self> {
        Self::new(self.numerator.checked_neg(), Some(self.denominator))
    }

    fn plus(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::new(left.checked_add(right), self.denominator.checked_mul(other.denominator))
    }

    fn times(self, other: Self) -> Option<Self> {
        let denominator = self.denominator.checked_mul(other.denominator);
        Self::new(self.numerator.checked_mul(other.numerator), denominator)
    }

    fn over(self, other: Self) -> Option<Self> {
        let denominator = self.denominator.checked_mul(other.numerator);
        Self::new(self.numerator.checked_mul(other.denominator), denominator)
    }
}

fn gcd(one: u128, other: u128) -> u128 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Evaluates whole numbers joined by `+ - * /` (or `− × · ÷`) and brackets.
///
/// None where the text is anything else, divides by 0, or goes beyond 128 bits.
pub(super) fn evaluate(text: &str) -> Option<Evaluated> {
    if text.len() > MOST_BYTES {
        return None;
    }
    let mut parser = Parser { text, symbols: text.char_indices().peekable(), numbers: Vec::new(), depth: 0 };
    let value = parser.sum()?;
    parser.skip_space();
    parser.symbols.peek().is_none().then_some(Evaluated { value, numbers: parser.numbers })
}

struct Parser<'t> {
    text: &'t str,
    symbols: Peekable<CharIndices<'t>>,
    numbers: Vec<i64>,
    depth: usize,
}

impl Parser<'_> {
    fn skip_space(&mut self) {
        while self.symbols.next_if(|(_, symbol)| symbol.is_whitespace()).is_some() {}
    }

    /// Takes the next symbol where it is one of these.
    fn take(&mut self, wanted: &str) -> Option<char> {
        self.skip_space();
        self.symbols.next_if(|(_, symbol)| wanted.contains(*symbol)).map(|(_, symbol)| symbol)
    }

    fn sum(&mut self) -> Option<Ratio> {
        let mut value = self.product()?;
        while let Some(symbol) = self.take("+-−") {
            let term = self.product()?;
            value = value.plus(if symbol == '+' { term } else { term.negated()? })?;
        }
        Some(value)
    }

    fn product(&mut self) -> Option<Ratio> {
        let mut value = self.factor()?;
        while let Some(symbol) = self.take("*×·/÷") {
            let factor = self.factor()?;
            value = if "/÷".contains(symbol) { value.over(factor)? } else { value.times(factor)? };
        }
        Some(value)
    }

    fn factor(&mut self) -> Option<Ratio> {
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return None;
        }
        let value = if let Some(sign) = self.take("+-−") {
            let value = self.factor()?;
            if sign == '+' { value } else { value.negated()? }
        } else if self.take("(").is_some() {
            let value = self.sum()?;
            self.take(")")?;
            value
        } else {
            self.number()?.into()
        };
        self.depth -= 1;
        Some(value)
    }

    fn number(&mut self) -> Option<i64> {
        self.skip_space();
        let &(start, _) = self.symbols.peek()?;
        let mut end = start;
        while let Some((at, _)) = self.symbols.next_if(|(_, symbol)| symbol.is_ascii_digit()) {
            end = at + 1;
        }
        let number = self.text[start..end].parse().ok()?;
        self.numbers.push(number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(text: &str) -> Option<Ratio> {
        evaluate(text).map(|evaluated| evaluated.value)
    }

    #[test]
    fn precedence_brackets_and_signs_are_the_usual() {
        assert_eq!(value("2 + 3 * 4 - 5"), Some(9.into()));
        assert_eq!(value("(2+3)*4"), Some(20.into()));
        assert_eq!(value("100 / 5 / 2"), Some(10.into()));
        assert_eq!(value("10 - 4 - 3"), Some(3.into()));
        assert_eq!(value("-(2 - 5) × +7 ÷ 3 − 1"), Some(6.into()));
        assert_eq!(value("((((7))))"), Some(7.into()));
    }

    #[test]
    fn thirds_are_exact() {
        // The famous 24 of 3, 3, 8 and 8.
        let evaluated = evaluate("8 / (3 - 8 / 3)").expect("an expression");
        assert_eq!(evaluated.value, Ratio::from(24));
        assert_eq!(evaluated.numbers, [8, 3, 8, 3]);
        assert_eq!(value("1/3 + 1/3 + 1/3"), Some(1.into()));
        assert_ne!(value("1/3"), Some(0.into()));
    }

    #[test]
    fn anything_else_has_no_value() {
        let texts = [
            "",
            " ",
            "2 +",
            "* 2",
            "(2",
            "2)",
            "2 3",
            "2(3)",
            "2 ** 3",
            "2 ^ 3",
            "2.5",
            "x",
            "2 = 2",
            "1 / 0",
            "1 / (2 - 2)",
            "99999999999999999999",
            "__import__('os')",
            "2 // 3",
            "()",
            "1e3",
            "٣",
        ];
        for text in texts {
            assert_eq!(evaluate(text), None, "{text}");
        }
    }

    #[test]
    fn size_and_depth_are_bounded() {
        assert_eq!(value(&format!("{}7{}", "(".repeat(99), ")".repeat(99))), Some(7.into()));
        assert_eq!(value(&format!("{}7{}", "(".repeat(500), ")".repeat(500))), None);
        assert_eq!(value(&"-".repeat(1999)), None);
        assert_eq!(value(&format!("1{}", "+1".repeat(1000))), None);
        let large = ["9223372036854775807"; 3].join(" * ");
        assert_eq!(value(&large), None, "beyond 128 bits");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[-+*/()0-9 x×÷−.]{0,60}") {
            let _ = evaluate(&text);
        }

        #[test]
        fn sums_are_those_of_integers(terms in prop::collection::vec(-1000_i64..1000, 1..20)) {
            let terms_in_brackets: Vec<String> = terms.iter().map(|term| format!("({term})")).collect();
            prop_assert_eq!(value(&terms_in_brackets.join(" + ")), Some(Ratio::from(terms.iter().sum::<i64>())));
        }
    }
}
