//! One turn of a conversation, as chat templates see it.

use serde_json::{Map, Value};

/// One turn: who speaks, what is said, and whether the model learns to say it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// The turn's text.
    pub content: String,
    /// Whether the turn's tokens are targets. [`Message::new`] sets it on the model's own turns.
    pub learn: bool,
    /// Further fields that templates read: `tool_calls`, `reasoning_content`, `name` and so on.
    pub fields: Map<String, Value>,
}

impl Message {
    /// A turn whose tokens are targets if the model is the one who speaks.
    ///
    /// ```
    /// use aligner_data::Message;
    ///
    /// assert!(Message::new("assistant", "4").learn);
    /// assert!(!Message::new("user", "2 + 2?").learn);
    /// ```
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let role = role.into();
        let learn = is_model(&role);
        Self { role, content: content.into(), learn, fields: Map::new() }
    }

    /// Whether the model itself speaks.
    pub fn is_model(&self) -> bool {
        is_model(&self.role)
    }

    /// The same turn, as context that is not learnt.
    #[must_use]
    pub fn context(mut self) -> Self {
        self.learn = false;
        self
    }

    /// Whether both say the same, whoever learns it.
    pub fn says_the_same(&self, other: &Self) -> bool {
        (&self.role, &self.content, &self.fields) == (&other.role, &other.content, &other.fields)
    }

    /// The object that a template reads: `role`, `content`, then the further fields.
    pub fn to_value(&self) -> Value {
        let mut object = Map::new();
        object.insert("role".into(), self.role.clone().into());
        object.insert("content".into(), self.content.clone().into());
        object.extend(self.fields.iter().map(|(key, value)| (key.clone(), value.clone())));
        Value::Object(object)
    }
}

fn is_model(role: &str) -> bool {
    matches!(role, "assistant" | "model")
}
