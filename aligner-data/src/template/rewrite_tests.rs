//! A rewritten template renders what the engine makes of the template itself.

use minijinja::{Environment, Value, context};

use super::rewrite;
use crate::template::ChatTemplate;

const NAME: &str = "chat_template";

/// What the engine makes of a template with transformers' settings.
fn plainly(source: &str, context: &Value) -> String {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_template(NAME, source).unwrap_or_else(|error| panic!("{source}: {error}"));
    environment
        .get_template(NAME)
        .unwrap()
        .render(context)
        .unwrap_or_else(|error| panic!("{source}: {error}"))
}

fn rewritten(source: &str, context: &Value) -> String {
    let markers = crate::template::generation::Markers::USUAL;
    let environment = crate::template::environment::compile(source, markers, None);
    let environment = environment.unwrap_or_else(|error| panic!("{source}: {error}"));
    let template = environment.get_template(NAME).unwrap();
    let rewritten = rewrite(source, NAME).unwrap();
    template.render(context).unwrap_or_else(|error| panic!("{source}: {rewritten}: {error:#}"))
}

fn scene() -> Value {
    let messages = [("system", "Be \"brief\".\n"), ("user", "2 + 2?"), ("assistant", "{{ 4 }} \\ <b>")];
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| context! { role => role, content => content }).collect();
    context! { messages => messages, bos_token => "<s>", none_at_all => (), count => 3, half => 0.5, yes => true }
}

#[test]
fn every_construct_renders_the_same() {
    for source in [
        "plain \"text\" with \\ and \t{ signs } {%- if true -%}  x  {%- endif %}\n\n",
        "  {% if yes %}\n  a\n  {% elif count %}\nb\n{% else %}\nc\n{% endif %}\n tail\n",
        "{# gone #}{% raw %}{{ kept }}{% endraw %}{{ '{% kept %}' }}",
        "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ loop.last }}{{ m['role'] }}{% else %}none{% endfor %}",
        "{% for (a, b) in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
        "{% for x in [] %}x{% else %}none{% endfor %}{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% for item in [[1, [2, [3]]], [4]] recursive %}{% if item is sequence %}({{ loop(item) }}){% else %}{{ item }}{% endif %}{% endfor %}",
        "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.role %}{% endfor %}{{ ns.n }}{{ ns.s }}",
        "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}",
        "{% set block %}a {{ count }}{% endset %}{{ block }}{% set up | upper | replace('A', 'bb') %}a{% endset %}{{ up }}",
        "{% with a = 1, b = count %}{{ a + b }}{% endwith %}{% filter upper | trim %}  x {{ count }}{% endfilter %}",
        "{% macro greet(name, sign='!') %}Hi {{ name }}{{ sign }}{% endmacro %}{{ greet('a') }}{{ greet('b', sign='?') }}",
        "{% macro box(w) %}[{{ caller(w) }}]{% endmacro %}{% call(x) box(3) %}<{{ x }}>{% endcall %}{% macro plain() %}({{ caller() }}){% endmacro %}{% call plain() %}y{% endcall %}",
        "{% block b %}in{% endblock %}{% autoescape false %}<b>{% endautoescape %}{% do range(1) %}",
        "{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ -count }} {{ 1 - -1 }} {{ (1 + 2) * 3 }} {{ 1 - (2 - 3) }}",
        "{{ 'a' + 'b' + 'c' }}{{ [1] + [2, 3] }}{{ 1 + half }}{{ true + 1 }}{{ 'a' ~ 1 ~ none ~ [1, 'x'] ~ 0.5 ~ missing }}",
        "{{ 'ab' * 2 }}{{ ([1, 2] * 2) | list }}{{ 9223372036854775807 + 1 }}{{ 1e3 }} {{ 1.5e300 * 1e300 }}",
        "{{ 1 < 2 < 3 }}{{ 3 > 2 >= 2 != 1 }}{{ 'a' in 'cab' }}{{ 'role' in messages[0] }}{{ 'x' not in messages[0] }}{{ 1 in [1] }}",
        "{{ not yes }}{{ not yes or count and none_at_all }}{{ yes and 'x' or 'y' }}{{ (yes or count) and '' }}",
        "{{ 'a' if yes else 'b' }}{{ 'a' if not yes else 'b' if count > 5 else 'c' }}{{ ('x' if not yes) is defined }}",
        "{{ missing is defined }}{{ missing is not defined }}{{ count is number }}{{ 6 is divisibleby 3 }}{{ 6 is divisibleby(4) }}{{ 'a' is in ['a'] }}",
        "{{ missing | default('d') }}{{ messages | length }}{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ messages[0].content | tojson }}{{ {'a': 1, 'b': [true, none]} }}{{ {'a': {'b': 2}}.a.b }}{{ {1: 'x'}[1] }}",
        "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:4] }}{{ 'abcdef'[:-1] }}{{ messages[-1]['content'] }}{{ 'abc'[1] }}",
        "{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'abc'.startswith('a') }}{{ 'x-y'.replace('-', '+').upper() }}{{ '{} {}'.format(1, 2) }}",
        "{{ dict(a=1, **{'b': 2}) }}{{ range(*[1, 3]) }}{{ dict(**dict(a=1)) }}",
        "{{ \"quo'te\" }}{{ 'quo\"te' }}{{ 'back\\\\slash' }}{{ 'tab\\tline\\nend' }}{{ 'a' 'b' }}{{ 'e\\u0301' }}",
        "{%- for m in messages -%}\n  {{- m.role }}:\n{% endfor -%}\n  tail  \n",
    ] {
        assert_eq!(rewritten(source, &scene()), plainly(source, &scene()), "{source}");
    }
}

#[test]
fn errors_keep_their_lines() {
    for (source, line) in [
        ("a\nb\n{{ 1 + 'x' }}", 3),
        ("{% if true %}\n\n  {%- for x in [1] %}\n\n{{ x.y.z }}\n{% endfor %}{% endif %}", 5),
        ("{% set x %}\n\n{% endset %}\n{# \n\n #}\n{{ raise_exception('no') }}", 7),
        ("\n\n{{ 1 + }}", 3),
        ("{% if a %}\n{{ b }}\n", 2),
    ] {
        let message = match ChatTemplate::new(source) {
            Ok(template) => template.render(&[], false).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(&format!("(in chat_template:{line})")), "{source:?}: {message}");
    }
}

#[test]
fn long_and_deep_expressions_are_read() {
    let sum = format!("{{{{ 0{} }}}}", " + 1".repeat(20_000));
    assert_eq!(rewritten(&sum, &scene()), "20000");
    let joined = format!("{{{{ 'a'{} }}}}", "~'a'".repeat(20_000));
    assert_eq!(rewritten(&joined, &scene()).len(), 20_001);
    let many = format!("{{% if count == 0 %}}{}{{% endif %}}", "{% elif count == 3 %}x".repeat(300));
    assert_eq!(rewritten(&many, &scene()), "x");
    // Whether it is read or refused, it does not end the process.
    for (open, close) in
        [("(", ")"), ("[", "]"), ("not ", ""), ("-", ""), ("1*", ""), ("1-", ""), ("a.b|f ~ (", ")")]
    {
        let deep = format!("{{{{ {}1{} }}}}", open.repeat(30_000), close.repeat(30_000));
        let _ = ChatTemplate::new(deep);
    }
    for after in ["*1", "-1", ".a", "[0]", "()", "|f", " is f", " if a else b"] {
        let _ = ChatTemplate::new(format!("{{{{ a{} }}}}", after.repeat(30_000)));
    }
    let _ = ChatTemplate::new(format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(15_000)));
    let message = ChatTemplate::new("x".repeat(300_000)).unwrap_err().to_string();
    assert!(message.contains("at most 262144 bytes, got 300000"), "{message}");
}

#[test]
fn other_templates_are_refused() {
    for source in
        ["{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as x %}", "{% from 'x' import y %}"]
    {
        let message = ChatTemplate::new(source).unwrap_err().to_string();
        assert!(message.contains("stands alone"), "{message}");
    }
}
