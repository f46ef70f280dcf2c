//! A subset of JSON Schema, draft 2020-12.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use ::regex::Regex;
use serde_json::{Map, Number, Value};

/// Keywords that say nothing about which values are allowed.
const ANNOTATIONS: [&str; 7] = ["$schema", "$id", "$comment", "title", "description", "default", "examples"];

/// A schema, checked and ready to be asked.
///
/// It knows `type`, `enum`, `const`, `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `minLength`,
/// `maxLength`, `pattern` (in the syntax of the `regex` crate), `items`, `minItems`, `maxItems`, `properties`,
/// `required`, `additionalProperties`, and `true` and `false` in place of a schema. Annotations such as `title` are
/// passed over; any other keyword is refused, since a schema that is read in part allows too much.
#[derive(Debug, Clone)]
pub struct Schema(Rule);

#[derive(Debug, Clone)]
enum Rule {
    /// Everything, or nothing.
    All(bool),
    /// What each of these allows.
    Each(Vec<Keyword>),
}

#[derive(Debug, Clone)]
enum Keyword {
    Type(Vec<Type>),
    Enum(Vec<Value>),
    /// The number's order to the limit must be one of these.
    Limit(Number, &'static [Ordering]),
    Length {
        least: usize,
        most: usize,
    },
    Pattern(Regex),
    Items(Box<Rule>),
    ItemCount {
        least: usize,
        most: usize,
    },
    Required(Vec<String>),
    Properties {
        own: BTreeMap<String, Rule>,
        others: Box<Rule>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Null,
    Boolean,
    Integer,
    Number,
    String,
    Array,
    Object,
}

impl Schema {
    /// Reads a schema.
    ///
    /// # Errors
    /// A message that names the place and the keyword.
    pub fn new(schema: &Value) -> Result<Self, String> {
        read(schema, "").map(Self)
    }

    /// Whether the schema allows a value.
    pub fn allows(&self, value: &Value) -> bool {
        self.0.allows(value)
    }
}

fn read(schema: &Value, path: &str) -> Result<Rule, String> {
    match schema {
        Value::Bool(all) => Ok(Rule::All(*all)),
        Value::Object(keywords) => {
            let mut rules = Vec::new();
            for (keyword, value) in keywords {
                if !ANNOTATIONS.contains(&keyword.as_str()) {
                    rules.extend(read_keyword(keyword, value, path)?);
                }
            }
            rules.extend(read_properties(keywords, path)?);
            Ok(Rule::Each(rules))
        }
        _ => Err(format!("{}: a schema must be a table, true or false", place(path))),
    }
}

/// One keyword; none for those that are read together with others.
fn read_keyword(keyword: &str, value: &Value, path: &str) -> Result<Option<Keyword>, String> {
    let wrong = |expected: &str| format!("{}: `{keyword}` must be {expected}, got {value}", place(path));
    let count = || value.as_u64().map(|count| count as usize).ok_or_else(|| wrong("a count"));
    let limit = |orders| match value {
        Value::Number(limit) => Ok(Keyword::Limit(limit.clone(), orders)),
        _ => Err(wrong("a number")),
    };
    let most = usize::MAX;
    Ok(Some(match keyword {
        "type" => {
            Keyword::Type(read_types(value).ok_or_else(|| wrong("the name of a type, or a list of such"))?)
        }
        "enum" => Keyword::Enum(value.as_array().ok_or_else(|| wrong("a list"))?.clone()),
        "const" => Keyword::Enum(vec![value.clone()]),
        "minimum" => limit(&[Ordering::Greater, Ordering::Equal])?,
        "maximum" => limit(&[Ordering::Less, Ordering::Equal])?,
        "exclusiveMinimum" => limit(&[Ordering::Greater])?,
        "exclusiveMaximum" => limit(&[Ordering::Less])?,
        "minLength" => Keyword::Length { least: count()?, most },
        "maxLength" => Keyword::Length { least: 0, most: count()? },
        "minItems" => Keyword::ItemCount { least: count()?, most },
        "maxItems" => Keyword::ItemCount { least: 0, most: count()? },
        "pattern" => {
            let pattern = value.as_str().ok_or_else(|| wrong("a text"))?;
            let pattern = Regex::new(pattern);
            Keyword::Pattern(pattern.map_err(|error| format!("{}: `pattern`: {error}", place(path)))?)
        }
        "items" => Keyword::Items(Box::new(read(value, &format!("{path}.items"))?)),
        "required" => {
            let names = value.as_array().and_then(|names| names.iter().map(Value::as_str).collect());
            let names: Vec<&str> = names.ok_or_else(|| wrong("a list of texts"))?;
            Keyword::Required(names.into_iter().map(str::to_owned).collect())
        }
        "properties" if value.is_object() => return Ok(None),
        "properties" => return Err(wrong("a table")),
        "additionalProperties" => return Ok(None),
        _ => return Err(format!("{}: the keyword `{keyword}` is not supported", place(path))),
    }))
}

fn read_types(value: &Value) -> Option<Vec<Type>> {
    let read = |name: &Value| {
        Some(match name.as_str()? {
            "null" => Type::Null,
            "boolean" => Type::Boolean,
            "integer" => Type::Integer,
            "number" => Type::Number,
            "string" => Type::String,
            "array" => Type::Array,
            "object" => Type::Object,
            _ => return None,
        })
    };
    match value {
        Value::Array(names) => names.iter().map(read).collect(),
        name => read(name).map(|name| vec![name]),
    }
}

/// `properties` and `additionalProperties`, of which the second needs to know the first.
fn read_properties(keywords: &Map<String, Value>, path: &str) -> Result<Option<Keyword>, String> {
    let (own, others) = (keywords.get("properties"), keywords.get("additionalProperties"));
    if own.is_none() && others.is_none() {
        return Ok(None);
    }
    let rule =
        |(name, schema): (&String, &Value)| Ok((name.clone(), read(schema, &format!("{path}.{name}"))?));
    let own =
        own.and_then(Value::as_object).into_iter().flatten().map(rule).collect::<Result<_, String>>()?;
    let others = match others {
        Some(schema) => read(schema, &format!("{path}.additionalProperties"))?,
        None => Rule::All(true),
    };
    Ok(Some(Keyword::Properties { own, others: Box::new(others) }))
}

fn place(path: &str) -> String {
    format!("${path}")
}

impl Rule {
    fn allows(&self, value: &Value) -> bool {
        match self {
            Self::All(all) => *all,
            Self::Each(keywords) => keywords.iter().all(|keyword| keyword.allows(value)),
        }
    }
}

impl Keyword {
    /// Whether it allows a value; what it does not speak of, it allows.
    fn allows(&self, value: &Value) -> bool {
        match (self, value) {
            (Self::Type(types), _) => types.iter().any(|kind| kind.holds(value)),
            (Self::Enum(values), _) => values.iter().any(|allowed| equal(allowed, value)),
            (Self::Limit(limit, orders), Value::Number(number)) => {
                compare(number, limit).is_some_and(|order| orders.contains(&order))
            }
            (Self::Length { least, most }, Value::String(text)) => {
                (*least..=*most).contains(&text.chars().count())
            }
            (Self::Pattern(pattern), Value::String(text)) => pattern.is_match(text),
            (Self::Items(rule), Value::Array(items)) => items.iter().all(|item| rule.allows(item)),
            (Self::ItemCount { least, most }, Value::Array(items)) => (*least..=*most).contains(&items.len()),
            (Self::Required(names), Value::Object(fields)) => {
                names.iter().all(|name| fields.contains_key(name))
            }
            (Self::Properties { own, others }, Value::Object(fields)) => {
                fields.iter().all(|(name, value)| own.get(name).unwrap_or(others).allows(value))
            }
            _ => true,
        }
    }
}

impl Type {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Null => value.is_null(),
            Self::Boolean => value.is_boolean(),
            // 1.0 is an integer too: JSON Schema asks for the value, not the spelling.
            Self::Integer => {
                value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
            }
            Self::Number => value.is_number(),
            Self::String => value.is_string(),
            Self::Array => value.is_array(),
            Self::Object => value.is_object(),
        }
    }
}

/// Equality by value: 1 and 1.0 are the same number, and the order of a table's fields does not matter.
fn equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => compare(one, other) == Some(Ordering::Equal),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let same = |(name, value)| other.get(name).is_some_and(|other| equal(value, other));
            one.len() == other.len() && one.iter().all(same)
        }
        _ => one == other,
    }
}

/// The order of two numbers; whole ones of 64 bits are compared as such.
fn compare(one: &Number, other: &Number) -> Option<Ordering> {
    let whole = |number: &Number| number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    match (whole(one), whole(other)) {
        (Some(one), Some(other)) => Some(one.cmp(&other)),
        _ => one.as_f64()?.partial_cmp(&other.as_f64()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allowed(schema: &Value, values: &[Value]) -> Vec<bool> {
        let schema = Schema::new(schema).expect("of the subset");
        values.iter().map(|value| schema.allows(value)).collect()
    }

    #[test]
    fn types_are_told_apart() {
        let values =
            [json!(null), json!(true), json!(1), json!(1.0), json!(1.5), json!("a"), json!([]), json!({})];
        let types = ["null", "boolean", "integer", "number", "string", "array", "object"];
        let expected = ["10000000", "01000000", "00110000", "00111000", "00000100", "00000010", "00000001"];
        for (name, expected) in types.into_iter().zip(expected) {
            let expected: Vec<bool> = expected.chars().map(|bit| bit == '1').collect();
            assert_eq!(allowed(&json!({"type": name}), &values), expected, "{name}");
        }
        assert_eq!(allowed(&json!({"type": ["null", "string"]}), &values[..2]), [true, false]);
    }

    #[test]
    fn limits_hold_for_their_own_type_alone() {
        let values = [json!(2), json!(3), json!(3.0), json!(4), json!("long text")];
        assert_eq!(allowed(&json!({"minimum": 3}), &values), [false, true, true, true, true]);
        assert_eq!(allowed(&json!({"exclusiveMinimum": 3}), &values), [false, false, false, true, true]);
        assert_eq!(allowed(&json!({"maximum": 3.0}), &values), [true, true, true, false, true]);
        assert_eq!(allowed(&json!({"exclusiveMaximum": 3}), &values), [true, false, false, false, true]);
        let texts = [json!("ä"), json!("äö"), json!("äöü"), json!(7)];
        assert_eq!(allowed(&json!({"minLength": 2, "maxLength": 2}), &texts), [false, true, false, true]);
        let lists = [json!([]), json!([1]), json!([1, 2])];
        assert_eq!(allowed(&json!({"minItems": 1, "maxItems": 1}), &lists), [false, true, false]);
        let large = json!({"maximum": 9_007_199_254_740_992_u64});
        assert_eq!(allowed(&large, &[json!(9_007_199_254_740_993_u64)]), [false]);
    }

    #[test]
    fn enum_and_const_compare_by_value() {
        let values = [json!(1), json!(1.0), json!("1"), json!({"b": 2, "a": [1.0]}), json!({"a": [1]})];
        assert_eq!(allowed(&json!({"const": 1}), &values), [true, true, false, false, false]);
        let allowed_values = json!({"enum": ["1", {"a": [1], "b": 2.0}]});
        assert_eq!(allowed(&allowed_values, &values), [false, false, true, true, false]);
    }

    #[test]
    fn fields_and_items_have_schemas_of_their_own() {
        let schema = json!({
            "title": "a person",
            "properties": {"age": {"type": "integer"}, "tags": {"items": {"type": "string", "pattern": "^[a-z]+$"}}},
            "required": ["age"],
            "additionalProperties": false,
        });
        let values = [
            json!({"age": 7}),
            json!({"age": "7"}),
            json!({"tags": []}),
            json!({"age": 7, "tags": ["a", "bc"]}),
            json!({"age": 7, "tags": ["a", "B"]}),
            json!({"age": 7, "name": "Ann"}),
        ];
        assert_eq!(allowed(&schema, &values), [true, false, false, true, false, false]);
        let others = json!({"properties": {"a": true, "b": false}, "additionalProperties": {"type": "null"}});
        let values = [json!({"a": 1}), json!({"b": 1}), json!({"c": 1}), json!({"c": null})];
        assert_eq!(allowed(&others, &values), [true, false, false, true]);
    }

    #[test]
    fn what_cannot_be_read_names_place_and_keyword() {
        let refused = |schema: Value| Schema::new(&schema).expect_err("not of the subset");
        let message = refused(json!({"properties": {"a": {"items": {"format": "date"}}}}));
        assert!(message.contains("$.a.items") && message.contains("`format`"), "{message}");
        for (schema, keyword) in [
            (json!({"type": "int"}), "`type`"),
            (json!({"required": "a"}), "`required`"),
            (json!({"properties": []}), "`properties`"),
            (json!({"minimum": "1"}), "`minimum`"),
            (json!({"minLength": -1}), "`minLength`"),
            (json!({"pattern": "("}), "`pattern`"),
            (json!({"anyOf": []}), "`anyOf`"),
            (json!({"enum": 1}), "`enum`"),
        ] {
            let message = refused(schema);
            assert!(message.contains(keyword), "{message}");
        }
        assert!(refused(json!([])).contains('$'));
    }
}
