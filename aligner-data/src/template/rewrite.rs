//! A template with the work of its operators bounded: every value that it makes goes through a filter of ours.
//!
//! The engine bounds how many instructions a rendering takes, but not what one of them makes, and its operators
//! take no hooks: `x ~ x` on a text of a gigabyte is one instruction. So a template is parsed, and written again
//! with filters of [`bounds`](super::bounds) around whatever makes a value or reads much of one. It renders the
//! same, and errors keep their lines. Text between tags becomes an expression too, since a loop may gather it.

mod expressions;

use minijinja::machinery::ast::{CallArg, Expr, Macro, Spanned, Stmt};
use minijinja::machinery::{WhitespaceConfig, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// Longest template that is read, in bytes; those of known models are a tenth.
const MOST_BYTES: usize = 1 << 18;

/// Room for an expression with a sign in every second byte, each of which may take a call within the last.
const STACK_BYTES: usize = 1 << 28;

/// The template with its work bounded, to be compiled without any treatment of white space.
///
/// # Errors
/// A syntax error with its line; a template that is too long, or that wants others beside it.
pub(super) fn rewrite(source: &str, name: &str) -> Result<String, Error> {
    if source.len() > MOST_BYTES {
        let message = format!("expected at most {MOST_BYTES} bytes, got {}", source.len());
        return Err(Error::new(ErrorKind::SyntaxError, message));
    }
    let whitespace =
        WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let template = parse(source, name, SyntaxConfig, whitespace)?;
    let mut writer = Writer { out: String::with_capacity(source.len() * 2), line: 1 };
    writer.statement(&template)?;
    Ok(writer.out)
}

/// Reads a template where there is room for its tree, which is as deep as an expression is long and is left by calls
/// within calls.
///
/// # Errors
/// Those of `read`; no thread can be had.
pub(super) fn deeply<T: Send>(read: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, read);
        let thread = thread.map_err(|error| failed(format!("no thread to read it: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("it cannot be read".into())))
    })
}

struct Writer {
    out: String,
    /// The line that is written, from 1.
    line: u16,
}

impl Writer {
    /// Begins a tag on the line that it has in the source. No line of the source is written as more than one, so
    /// what is written is never ahead.
    fn open(&mut self, mark: &str, line: u16) {
        self.out.push_str(mark);
        for _ in self.line..line {
            self.out.push('\n');
        }
        self.line = self.line.max(line);
        self.out.push(' ');
    }

    fn tag(&mut self, line: u16, parts: &[&str]) {
        self.open("{%", line);
        self.out.extend(parts.iter().copied());
        self.out.push_str(" %}");
    }

    /// A tag with expressions: `write` writes what stands between its marks.
    fn tag_with(&mut self, line: u16, write: impl FnOnce(&mut Self)) {
        self.open("{%", line);
        write(self);
        self.out.push_str(" %}");
    }

    fn end(&mut self, name: &str) {
        self.tag(0, &["end", name]);
    }

    fn body(&mut self, body: &[Stmt<'_>]) -> Result<(), Error> {
        body.iter().try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::Template(template) => self.body(&template.children)?,
            Stmt::EmitExpr(emit) => {
                self.open("{{", emit.span().start_line);
                self.expression(&emit.expr);
                self.out.push_str(" }}");
            }
            Stmt::EmitRaw(raw) if !raw.raw.is_empty() => {
                self.open("{{", raw.span().start_line);
                self.text(raw.raw);
                self.out.push_str(" }}");
            }
            Stmt::EmitRaw(_) => {}
            Stmt::ForLoop(each) => {
                self.tag_with(each.span().start_line, |this| {
                    this.out.push_str("for ");
                    this.target(&each.target);
                    this.out.push_str(" in ");
                    this.expression(&each.iter);
                    if let Some(filter) = &each.filter_expr {
                        this.out.push_str(" if ");
                        this.expression(filter);
                    }
                    if each.recursive {
                        this.out.push_str(" recursive");
                    }
                });
                self.body(&each.body)?;
                self.otherwise(&each.else_body)?;
                self.end("for");
            }
            Stmt::IfCond(condition) => {
                self.tag_with(condition.span().start_line, |this| {
                    this.out.push_str("if ");
                    this.expression(&condition.expr);
                });
                self.body(&condition.true_body)?;
                let mut rest = &condition.false_body;
                // Written as they were: choices within choices are bounded by the parser.
                while let [Stmt::IfCond(next)] = rest.as_slice() {
                    self.tag_with(next.span().start_line, |this| {
                        this.out.push_str("elif ");
                        this.expression(&next.expr);
                    });
                    self.body(&next.true_body)?;
                    rest = &next.false_body;
                }
                self.otherwise(rest)?;
                self.end("if");
            }
            Stmt::WithBlock(with) => {
                self.tag_with(with.span().start_line, |this| {
                    this.out.push_str("with ");
                    this.separated(&with.assignments, |this, (target, value)| {
                        this.target(target);
                        this.out.push('=');
                        this.expression(value);
                    });
                });
                self.body(&with.body)?;
                self.end("with");
            }
            Stmt::Set(set) => self.tag_with(set.span().start_line, |this| {
                this.out.push_str("set ");
                this.target(&set.target);
                this.out.push_str(" = ");
                this.expression(&set.expr);
            }),
            Stmt::SetBlock(set) => {
                self.tag_with(set.span().start_line, |this| {
                    this.out.push_str("set ");
                    this.target(&set.target);
                    if let Some(filter) = &set.filter {
                        this.out.push('|');
                        this.block_filter(filter);
                    }
                });
                self.body(&set.body)?;
                self.end("set");
                self.tag_with(0, |this| {
                    this.out.push_str("set ");
                    this.target(&set.target);
                    this.out.push_str(" = ");
                    this.made(|this| this.target(&set.target));
                });
            }
            Stmt::AutoEscape(escape) => {
                self.tag_with(escape.span().start_line, |this| {
                    this.out.push_str("autoescape ");
                    this.expression(&escape.enabled);
                });
                self.body(&escape.body)?;
                self.end("autoescape");
            }
            Stmt::FilterBlock(block) => {
                self.tag_with(block.span().start_line, |this| {
                    this.out.push_str("filter ");
                    this.block_filter(&block.filter);
                });
                self.body(&block.body)?;
                self.end("filter");
            }
            Stmt::Block(block) => {
                self.tag(block.span().start_line, &["block ", block.name]);
                self.body(&block.body)?;
                self.end("block");
            }
            Stmt::Macro(declared) => {
                self.tag_with(declared.span().start_line, |this| {
                    this.out.extend(["macro ", declared.name]);
                    this.parameters(declared);
                });
                self.body(&declared.body)?;
                self.end("macro");
            }
            Stmt::CallBlock(block) => {
                self.tag_with(block.span().start_line, |this| {
                    this.out.push_str("call");
                    if !block.macro_decl.args.is_empty() {
                        this.parameters(&block.macro_decl);
                    }
                    this.out.push(' ');
                    this.call(&block.call.expr, &block.call.args);
                });
                self.body(&block.macro_decl.body)?;
                self.end("call");
            }
            Stmt::Continue(span) => self.tag(span.span().start_line, &["continue"]),
            Stmt::Break(span) => self.tag(span.span().start_line, &["break"]),
            Stmt::Do(statement) => self.tag_with(statement.span().start_line, |this| {
                this.out.push_str("do ");
                this.call(&statement.call.expr, &statement.call.args);
            }),
            Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                let message = "a chat template stands alone: it cannot import, extend or include others";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn otherwise(&mut self, body: &[Stmt<'_>]) -> Result<(), Error> {
        if body.is_empty() {
            return Ok(());
        }
        self.tag(0, &["else"]);
        self.body(body)
    }

    /// A macro's parameters; the last ones have defaults.
    fn parameters(&mut self, declared: &Spanned<Macro<'_>>) {
        let without = declared.args.len() - declared.defaults.len();
        let defaults = std::iter::repeat_n(None, without).chain(declared.defaults.iter().map(Some));
        let all: Vec<_> = declared.args.iter().zip(defaults).collect();
        self.out.push('(');
        self.separated(&all, |this, (name, default)| {
            this.target(name);
            if let Some(default) = default {
                this.out.push('=');
                this.expression(default);
            }
        });
        self.out.push(')');
    }

    /// The filters of a block: the innermost has no expression, but the block's text.
    fn block_filter(&mut self, filter: &Expr<'_>) {
        let mut chain = Vec::new();
        let mut next = Some(filter);
        while let Some(Expr::Filter(filter)) = next {
            chain.push(filter);
            next = filter.expr.as_ref();
        }
        for (at, filter) in chain.iter().rev().enumerate() {
            self.out.extend([if at > 0 { "|" } else { "" }, filter.name]);
            self.arguments(&filter.args);
        }
    }

    fn separated<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.out.push_str(", ");
            }
            write(self, item);
        }
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) {
        self.out.push('(');
        self.separated(arguments, |this, argument| match argument {
            CallArg::Pos(value) => this.expression(value),
            CallArg::Kwarg(name, value) => {
                this.out.extend([name, "="]);
                this.expression(value);
            }
            CallArg::PosSplat(value) => {
                this.out.push('*');
                this.expression(value);
            }
            CallArg::KwargSplat(value) => {
                this.out.push_str("**");
                this.expression(value);
            }
        });
        self.out.push(')');
    }
}

#[cfg(test)]
#[path = "rewrite_tests.rs"]
mod tests;
