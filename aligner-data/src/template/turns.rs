//! Which part of a rendered conversation each turn wrote.

use std::ops::Range;

use aligner_core::{Error, Result};

use super::{ChatTemplate, RenderOptions};
use crate::Message;

/// For each turn, whether it is a target.
pub(super) fn learnt(messages: &[Message], last_only: bool) -> Vec<bool> {
    let last = messages.len().saturating_sub(1);
    messages.iter().enumerate().map(|(at, message)| message.learn && (!last_only || at == last)).collect()
}

impl ChatTemplate {
    /// Spans of the turns in `learnt`, in bytes of `text`, ascending and disjoint.
    ///
    /// `marks` are the spans that the template marked, one for each of the model's turns as a rule.
    pub(super) fn spans(
        &self,
        messages: &[Message],
        learnt: &[bool],
        text: &str,
        marks: Vec<Range<usize>>,
        options: &RenderOptions,
    ) -> Result<Vec<Range<usize>>> {
        let only_model = messages.iter().zip(learnt).all(|(message, &learn)| message.is_model() || !learn);
        if !self.has_marks || !only_model {
            return self.spans_by_increments(messages, learnt, text, options);
        }
        let model_learnt = messages.iter().zip(learnt).filter(|(message, _)| message.is_model());
        let model_learnt: Vec<bool> = model_learnt.map(|(_, &learn)| learn).collect();
        if model_learnt.iter().all(|&learn| learn) {
            return Ok(marks);
        }
        if model_learnt.len() != marks.len() {
            // The marks do not say which turn they belong to.
            return self.spans_by_increments(messages, learnt, text, options);
        }
        Ok(marks.into_iter().zip(model_learnt).filter(|(_, learn)| *learn).map(|(span, _)| span).collect())
    }

    /// The span of turn `i` is what the conversation up to `i` adds to the one before `i` with a
    /// generation prompt.
    fn spans_by_increments(
        &self,
        messages: &[Message],
        learnt: &[bool],
        text: &str,
        options: &RenderOptions,
    ) -> Result<Vec<Range<usize>>> {
        let turns = (0..messages.len()).filter(|&turn| learnt[turn]);
        turns.map(|turn| self.increment(messages, turn, text, options)).collect()
    }

    fn increment(
        &self,
        messages: &[Message],
        turn: usize,
        text: &str,
        options: &RenderOptions,
    ) -> Result<Range<usize>> {
        let prompted = messages[turn].is_model();
        let before = self.prefix(&messages[..turn], prompted, options)?;
        let through = self.prefix(&messages[..=turn], false, options)?;
        if !through.starts_with(&before) || !text.starts_with(&through) {
            let role = &messages[turn].role;
            let number = turn + 1;
            return Err(Error::Invalid(format!(
                "chat template: turn {number} ({role}) is written differently once it is followed or completed, \
                 so the template's rendering does not tell which tokens are the model's; \
                 use a template with `generation` marks, or learn the last turn only (train_on = \"last\")"
            )));
        }
        Ok(before.len()..through.len())
    }

    fn prefix(&self, messages: &[Message], prompt: bool, options: &RenderOptions) -> Result<String> {
        if messages.is_empty() && !prompt {
            return Ok(String::new());
        }
        self.render_with(messages, &RenderOptions { add_generation_prompt: prompt, ..options.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}\
                         {% if add_generation_prompt %}<assistant>{% endif %}";

    fn spans(source: &str, messages: &[Message], last_only: bool) -> Result<Vec<String>> {
        let template = ChatTemplate::new(source)?;
        let options = RenderOptions::default();
        let (text, marks) = template.render_marked(messages, &options)?;
        let spans = template.spans(messages, &learnt(messages, last_only), &text, marks, &options)?;
        Ok(spans.into_iter().map(|span| text[span].to_owned()).collect())
    }

    fn dialogue() -> Vec<Message> {
        [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
            .map(|(role, content)| Message::new(role, content))
            .into()
    }

    #[test]
    fn increments_find_what_the_model_says_after_its_header() {
        assert_eq!(spans(PLAIN, &dialogue(), false).unwrap(), ["b;", "d;"]);
        assert_eq!(spans(PLAIN, &dialogue(), true).unwrap(), ["d;"]);
    }

    #[test]
    fn a_turn_that_is_not_learnt_is_left_out_with_marks_and_without() {
        let marked = PLAIN.replace(
            "{{ m.content }};",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}",
        );
        let mut messages = dialogue();
        messages[1].learn = false;
        for source in [PLAIN, &marked] {
            assert_eq!(spans(source, &messages, false).unwrap(), ["d;"]);
        }
    }

    #[test]
    fn a_user_turn_can_be_learnt_by_increments() {
        let mut messages = dialogue();
        messages[0].learn = true;
        assert_eq!(spans(PLAIN, &messages, false).unwrap(), ["<user>a;", "b;", "d;"]);
    }

    #[test]
    fn a_template_that_rewrites_earlier_turns_is_refused_by_turn() {
        let source = "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %};{% endfor %}\
                      {% if add_generation_prompt %}<assistant>{% endif %}";
        let message = spans(source, &dialogue(), false).unwrap_err().to_string();
        assert!(message.contains("turn 2 (assistant)"), "{message}");
        assert_eq!(spans(source, &dialogue(), true).unwrap(), ["d;"]);
    }

    #[test]
    fn the_day_of_a_template_is_kept_where_the_text_has_the_usual_markers() {
        let template =
            ChatTemplate::new("{{ strftime_now('%Y') }} {{ messages[0].content }}").unwrap().at(0).unwrap();
        for text in ["x", "\u{FFFFC}"] {
            let rendered = template.render(&[Message::new("user", text)], false).unwrap();
            assert_eq!(rendered, format!("1970 {text}"));
        }
    }

    #[test]
    fn text_cannot_forge_a_mark() {
        let source = "{% for m in messages %}{{ m.content }}{% generation %}!{% endgeneration %}{% endfor %}";
        let messages = [Message::new("assistant", "\u{FFFFC}x\u{FFFFD}")];
        assert_eq!(spans(source, &messages, false).unwrap(), ["!"]);
    }
}
