//! `aligner chat`: a conversation with a model.

mod settings;
mod signals;

use std::io::{BufRead, IsTerminal as _};
use std::sync::Arc;

use aligner_core::{Detokenize, Engine, FinishReason, Prompt, Request, Sampling};
use aligner_data::Message;
use anyhow::ensure;
use serde_json::{Map, Value};

use self::signals::Signals;
use crate::Usage;
use crate::generate::{SamplingFlags, prompt, stream, write_out};
use crate::progress::{colour, say};
use crate::wire::{EngineFlags, LoadedModel, ModelFlags};

/// Talk with a model; `/help` lists the commands.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelFlags,
    /// A system turn before the conversation.
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    engine: EngineFlags,
}

const HELP: &str = "\
/system TEXT     say what the model is; without a text, nothing
/reset           forget the conversation, keep the system turn and the settings
/set NAME VALUE  change a sampling setting, as in /set temperature 0.7
/show            the system turn, the settings, the length of the conversation
/help            this list
/quit            end; so does the end of the input
A line that begins with // is said with one slash. Ctrl-C ends an answer, or the program at the prompt.";

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let model = arguments.model.writer()?;
    let shown = arguments.model.model.display();
    let advice = "--adapter: a conversation has one, without a name";
    ensure!(model.named.is_empty(), Usage(advice.into()));
    ensure!(
        model.tokenizer.template().is_some(),
        Usage(format!("{shown}: the model has no chat template; `aligner generate` continues texts"))
    );
    let sampling = arguments.sampling.sampling(&model)?;
    let mut engine = arguments.engine.engine(&model)?;
    let is_terminal = std::io::stdin().is_terminal();
    let mut chat = Chat {
        detokenize: Arc::new(model.tokenizer.clone()),
        signals: Signals::listen()?,
        system: arguments.system.clone(),
        turns: Vec::new(),
        model,
        sampling,
        is_terminal,
    };
    if is_terminal {
        say(&format!("{shown}; /help lists the commands"));
    }
    chat.talk(&mut engine, &mut std::io::stdin().lock())
}

/// A conversation, and how it goes on.
struct Chat {
    model: LoadedModel,
    detokenize: Arc<dyn Detokenize>,
    signals: Signals,
    sampling: Sampling,
    system: Option<String>,
    /// Without the system turn.
    turns: Vec<Message>,
    is_terminal: bool,
}

/// What a line asks for.
#[derive(Debug, PartialEq)]
enum Line<'a> {
    Say(&'a str),
    Command(&'a str, &'a str),
    Nothing,
}

impl<'a> Line<'a> {
    fn of(line: &'a str) -> Self {
        let line = line.trim();
        match line.strip_prefix('/') {
            None if line.is_empty() => Self::Nothing,
            None => Self::Say(line),
            Some(said) if said.starts_with('/') => Self::Say(said),
            Some(command) => {
                let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                Self::Command(name, rest.trim())
            }
        }
    }
}

impl Chat {
    fn talk(&mut self, engine: &mut dyn Engine, input: &mut dyn BufRead) -> anyhow::Result<()> {
        let mut line = Vec::new();
        loop {
            self.mark("> ", "1")?;
            line.clear();
            if input.read_until(b'\n', &mut line)? == 0 {
                if self.is_terminal {
                    write_out("\n")?;
                }
                return Ok(());
            }
            let Ok(text) = std::str::from_utf8(&line) else {
                say("error: the line is not UTF-8");
                continue;
            };
            match Line::of(text) {
                Line::Nothing => {}
                Line::Command("quit" | "exit", _) => return Ok(()),
                Line::Command(name, rest) => match self.command(name, rest) {
                    Ok(Some(answer)) => write_out(&format!("{answer}\n"))?,
                    Ok(None) => {}
                    Err(error) => say(&format!("error: {error}")),
                },
                Line::Say(text) => self.answer(engine, text)?,
            }
        }
    }

    /// Writes what is for people only, in a style of ANSI's.
    fn mark(&self, text: &str, style: &str) -> anyhow::Result<()> {
        match (self.is_terminal, colour()) {
            (true, true) => write_out(&format!("\u{1b}[{style}m{text}\u{1b}[0m")),
            (true, false) => write_out(text),
            (false, _) => Ok(()),
        }
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<Option<String>, String> {
        match name {
            "system" => self.system = Some(rest.to_string()).filter(|text| !text.is_empty()),
            "reset" => self.turns.clear(),
            "set" => {
                let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                let vocab = self.model.checkpoint.config().vocab_size;
                settings::set(&mut self.sampling, name, value.trim(), vocab)?;
            }
            "show" => return Ok(Some(self.show())),
            "help" => return Ok(Some(HELP.into())),
            other => return Err(format!("no command /{other}; /help lists them")),
        }
        Ok(None)
    }

    fn show(&self) -> String {
        let length =
            self.tokens().map_or_else(|error| format!("{error:#}"), |tokens| tokens.len().to_string());
        format!(
            "{:<19} {}\n{}\n{:<19} {} turns, {length} of {} tokens",
            "system",
            self.system.as_deref().unwrap_or("(none)"),
            settings::show(&self.sampling),
            "conversation",
            self.turns.len(),
            self.model.checkpoint.config().max_positions,
        )
    }

    fn tokens(&self) -> anyhow::Result<Vec<u32>> {
        let system = self.system.as_deref().map(|system| Message::new("system", system));
        let turns: Vec<Message> = system.into_iter().chain(self.turns.iter().cloned()).collect();
        prompt::conversation(&self.model.tokenizer, &turns, &Map::new())
    }

    /// Answers a turn of the user's. What cannot be answered is said, and not kept.
    fn answer(&mut self, engine: &mut dyn Engine, text: &str) -> anyhow::Result<()> {
        self.turns.push(Message::new("user", text));
        let tokens = match self.tokens() {
            Ok(tokens) => tokens,
            Err(error) => {
                self.refuse(&format!("{error:#}"));
                return Ok(());
            }
        };
        let context = self.model.checkpoint.config().max_positions;
        if tokens.len() >= context {
            let length = tokens.len();
            self.refuse(&format!(
                "the conversation has {length} tokens, but the model's context is {context}; /reset forgets it"
            ));
            return Ok(());
        }
        let id = self.turns.len().to_string();
        let request = Request::new(Prompt { id, tokens, metadata: Value::Null }, self.sampling.clone());
        self.signals.answering();
        let detokenize = Arc::clone(&self.detokenize);
        let answer = stream(engine, detokenize, request, || self.signals.came(), write_out);
        self.signals.asking();
        let answer = answer?;
        write_out("\n")?;
        match answer.reason {
            FinishReason::Stop => {}
            FinishReason::Cancelled => self.mark("(stopped)\n", "2")?,
            FinishReason::Length => {
                self.mark("(cut at max_tokens or the context; /set max_tokens N)\n", "2")?;
            }
        }
        self.turns.push(Message::new("assistant", answer.text));
        Ok(())
    }

    fn refuse(&mut self, why: &str) {
        self.turns.pop();
        say(&format!("error: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_said_or_are_commands() {
        for (line, expected) in [
            ("  hello there\n", Line::Say("hello there")),
            ("//etc is a directory", Line::Say("/etc is a directory")),
            ("/set  temperature 0.7\n", Line::Command("set", "temperature 0.7")),
            ("/reset\r\n", Line::Command("reset", "")),
            (" \n", Line::Nothing),
        ] {
            assert_eq!(Line::of(line), expected);
        }
    }
}
