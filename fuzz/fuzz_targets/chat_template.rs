//! A chat template of any text.
#![no_main]

use aligner_data::{ChatTemplate, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source).and_then(|template| template.at(0)) else { return };
    let messages = [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4")]
        .map(|(role, text)| Message::new(role, text));
    let _ = template.render(&messages, true);
});
