//! Expressions, with filters of ours around what makes a value.

use minijinja::Value;
use minijinja::machinery::ast::{BinOp, BinOpKind, CallArg, Compare, CompareOpKind, Expr, UnaryOpKind};

use super::Writer;
use crate::template::bounds::{ADD, CONCAT, GLANCE, WEIGH};

/// Filters that look at a list without going through it.
const GLANCING: [&str; 6] = ["length", "count", "first", "last", "default", "d"];

impl Writer {
    /// An expression, in parentheses where what stands around it could take it apart.
    pub(super) fn expression(&mut self, expression: &Expr<'_>) {
        match expression {
            Expr::Var(variable) => self.out.push_str(variable.id),
            Expr::Const(constant) => self.constant(&constant.value),
            Expr::GetAttr(attribute) => {
                self.expression(&attribute.expr);
                self.out.extend([".", attribute.name]);
            }
            Expr::GetItem(item) => {
                // A text is gone through to its place; a key is looked up.
                if is_text(&item.subscript_expr) {
                    self.expression(&item.expr);
                } else {
                    self.filtered(GLANCE, |this| this.expression(&item.expr));
                }
                self.out.push('[');
                self.expression(&item.subscript_expr);
                self.out.push(']');
            }
            Expr::Slice(slice) => self.made(|this| {
                this.filtered(GLANCE, |this| this.expression(&slice.expr));
                this.out.push('[');
                for (at, part) in [&slice.start, &slice.stop, &slice.step].into_iter().enumerate() {
                    this.out.push_str(if at > 0 { ":" } else { "" });
                    if let Some(part) = part {
                        this.expression(part);
                    }
                }
                this.out.push(']');
            }),
            Expr::UnaryOp(unary) => {
                let sign = match unary.op {
                    UnaryOpKind::Not => "not ",
                    UnaryOpKind::Neg => "-",
                };
                self.enclosed(sign, |this| this.expression(&unary.expr));
            }
            Expr::BinOp(binary) => self.binary(binary),
            Expr::Compare(compare) => self.compare(compare),
            Expr::IfExpr(choice) => self.enclosed("", |this| {
                this.expression(&choice.true_expr);
                this.out.push_str(" if ");
                this.expression(&choice.test_expr);
                if let Some(other) = &choice.false_expr {
                    this.out.push_str(" else ");
                    this.expression(other);
                }
            }),
            Expr::Filter(filter) => self.made(|this| {
                let look = if GLANCING.contains(&filter.name) { GLANCE } else { WEIGH };
                if let Some(input) = &filter.expr {
                    this.filtered(look, |this| this.expression(input));
                    this.out.push('|');
                }
                this.out.push_str(filter.name);
                this.arguments(&filter.args);
            }),
            Expr::Test(test) => self.enclosed("", |this| {
                this.filtered(GLANCE, |this| this.expression(&test.expr));
                this.out.extend([" is ", test.name]);
                if !test.args.is_empty() {
                    this.arguments(&test.args);
                }
            }),
            Expr::Call(call) => self.made(|this| this.call(&call.expr, &call.args)),
            Expr::List(list) => self.made(|this| {
                this.out.push('[');
                this.separated(&list.items, |this, item| this.expression(item));
                this.out.push(']');
            }),
            Expr::Map(map) => self.made(|this| {
                let entries: Vec<_> = map.keys.iter().zip(&map.values).collect();
                this.out.push('{');
                this.separated(&entries, |this, (key, value)| {
                    this.expression(key);
                    this.out.push(':');
                    this.expression(value);
                });
                this.out.push('}');
            }),
        }
    }

    /// A call as it is, for tags that take nothing else.
    pub(super) fn call(&mut self, called: &Expr<'_>, arguments: &[CallArg<'_>]) {
        self.expression(called);
        self.arguments(arguments);
    }

    /// What a value is given to: a name, an attribute, several of them.
    pub(super) fn target(&mut self, target: &Expr<'_>) {
        match target {
            Expr::Var(variable) => self.out.push_str(variable.id),
            Expr::GetAttr(attribute) => {
                self.target(&attribute.expr);
                self.out.extend([".", attribute.name]);
            }
            Expr::List(list) => {
                self.out.push('(');
                self.separated(&list.items, |this, item| this.target(item));
                self.out.push(')');
            }
            other => self.expression(other),
        }
    }

    /// A value that is made anew.
    pub(super) fn made(&mut self, write: impl FnOnce(&mut Self)) {
        self.filtered(WEIGH, write);
    }

    /// What `write` writes must bind as tightly as a filter does.
    fn filtered(&mut self, filter: &str, write: impl FnOnce(&mut Self)) {
        self.enclosed("", |this| {
            write(this);
            this.out.extend(["|", filter]);
        });
    }

    fn enclosed(&mut self, before: &str, write: impl FnOnce(&mut Self)) {
        self.out.push('(');
        self.out.push_str(before);
        write(self);
        self.out.push(')');
    }

    fn binary(&mut self, binary: &BinOp<'_>) {
        let sign = match binary.op {
            BinOpKind::Concat => return self.gathered(CONCAT, binary),
            BinOpKind::Add => return self.gathered(ADD, binary),
            BinOpKind::ScAnd => return self.chained(" and ", binary),
            BinOpKind::ScOr => return self.chained(" or ", binary),
            BinOpKind::Eq => "==",
            BinOpKind::Ne => "!=",
            BinOpKind::Lt => "<",
            BinOpKind::Lte => "<=",
            BinOpKind::Gt => ">",
            BinOpKind::Gte => ">=",
            BinOpKind::Sub => "-",
            BinOpKind::Mul => "*",
            BinOpKind::Div => "/",
            BinOpKind::FloorDiv => "//",
            BinOpKind::Rem => "%",
            BinOpKind::Pow => "**",
            BinOpKind::In => " in ",
        };
        // A filter is never computed while compiling, where nothing is bounded.
        let write = |this: &mut Self| {
            this.enclosed("", |this| {
                this.filtered(WEIGH, |this| this.expression(&binary.left));
                this.out.push_str(sign);
                this.filtered(WEIGH, |this| this.expression(&binary.right));
            });
        };
        if matches!(binary.op, BinOpKind::Mul) { self.made(write) } else { write(self) }
    }

    /// A sum or a concatenation as one list: it is checked before it is made.
    fn gathered(&mut self, filter: &str, binary: &BinOp<'_>) {
        let operands = operands(binary);
        self.enclosed("", |this| {
            this.out.push('[');
            this.separated(&operands, |this, operand| this.expression(operand));
            this.out.extend(["]|", filter]);
        });
    }

    fn chained(&mut self, sign: &str, binary: &BinOp<'_>) {
        let operands = operands(binary);
        self.enclosed("", |this| {
            for (at, operand) in operands.into_iter().enumerate() {
                this.out.push_str(if at > 0 { sign } else { "" });
                this.expression(operand);
            }
        });
    }

    fn compare(&mut self, compare: &Compare<'_>) {
        self.enclosed("", |this| {
            this.filtered(WEIGH, |this| this.expression(&compare.expr));
            for operation in &compare.ops {
                this.out.push_str(match operation.op {
                    CompareOpKind::Eq => " == ",
                    CompareOpKind::Ne => " != ",
                    CompareOpKind::Lt => " < ",
                    CompareOpKind::Lte => " <= ",
                    CompareOpKind::Gt => " > ",
                    CompareOpKind::Gte => " >= ",
                    CompareOpKind::In => " in ",
                    CompareOpKind::NotIn => " not in ",
                });
                if is_text(&operation.expr) {
                    this.expression(&operation.expr);
                } else {
                    this.filtered(WEIGH, |this| this.expression(&operation.expr));
                }
            }
        });
    }

    fn constant(&mut self, value: &Value) {
        match value.as_str() {
            Some(text) => self.text(text),
            // What is too large for a number's type is written as it can be read.
            None if value.to_string() == "inf" => self.out.push_str("1e999"),
            None => self.out.push_str(&value.to_string()),
        }
    }

    pub(super) fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn is_text(expression: &Expr<'_>) -> bool {
    matches!(expression, Expr::Const(constant) if constant.value.as_str().is_some())
}

/// The operands of a chain of one operator, from left to right: such a chain is a tree that leans to the left.
fn operands<'e, 'a>(binary: &'e BinOp<'a>) -> Vec<&'e Expr<'a>> {
    let same = |op: BinOpKind| std::mem::discriminant(&op) == std::mem::discriminant(&binary.op);
    let mut found = vec![&binary.right];
    let mut left = &binary.left;
    while let Expr::BinOp(next) = left
        && same(next.op)
    {
        found.push(&next.right);
        left = &next.left;
    }
    found.push(left);
    found.reverse();
    found
}
