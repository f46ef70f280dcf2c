//! A JSON object in which no key comes twice.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// Deserialises an object and refuses a repeated key, which serde's maps let pass silently.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

struct Entries<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value().map_err(|error| A::Error::custom(format!("{key:?}: {error}")))?;
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("{key:?} is there twice")));
            }
            map.insert(key, value);
        }
        Ok(UniqueMap(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_key_is_refused_by_name() {
        let message =
            serde_json::from_str::<UniqueMap<u8>>(r#"{"a":1,"b":2,"a":3}"#).unwrap_err().to_string();
        assert!(message.contains("\"a\" is there twice"), "{message}");
        assert_eq!(serde_json::from_str::<UniqueMap<u8>>(r#"{"a":1}"#).unwrap().0["a"], 1);
    }
}
