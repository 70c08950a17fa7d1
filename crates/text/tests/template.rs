//! Rendering byte for byte as Jinja2 does, and control tokens from templates alone.

mod common;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use common::{POCKET, oracle, oracle_ids, tokenizer};
use serde_json::{Map, Value, json};
use text::{ChatTemplate, Rendered, Segment, TemplateError, Tokenizer};

const GOLDENS: &str = include_str!("data/template_goldens.json");

fn source(name: &str) -> &'static str {
    match name {
        "chatml" => include_str!("data/templates/chatml.jinja"),
        "tools_json" => include_str!("data/templates/tools_json.jinja"),
        "tools_xml" => include_str!("data/templates/tools_xml.jinja"),
        "thinking" => include_str!("data/templates/thinking.jinja"),
        "parts" => include_str!("data/templates/parts.jinja"),
        "printing" => include_str!("data/templates/printing.jinja"),
        name => panic!("no template {name}"),
    }
}

fn render(tokenizer: &Tokenizer, case: &Value) -> Rendered {
    let template =
        ChatTemplate::new(source(case["template"].as_str().expect("a name")), tokenizer).expect("a template");
    let variables = case["variables"].as_object().expect("an object");
    let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
    let prompt = case["add_generation_prompt"].as_bool().expect("a flag");
    template.render(&case["messages"], tools, prompt, variables).expect("it renders")
}

fn goldens() -> Vec<Value> {
    serde_json::from_str(GOLDENS).expect("JSON")
}

#[test]
fn text_is_that_of_jinja2_byte_for_byte() {
    let tokenizer = tokenizer();
    let mut differ = Vec::new();
    for case in goldens() {
        let ours = render(&tokenizer, &case).text();
        let expected = case["expected"].as_str().expect("text");
        let lines =
            ours.lines().zip(expected.lines()).enumerate().filter(|(_, (ours, expected))| ours != expected);
        for (line, (ours, expected)) in lines {
            differ.push(format!(
                "{} {}, line {}:\n  {ours}\n  {expected}",
                case["template"],
                case["name"],
                line + 1
            ));
        }
        if ours.len() != expected.len() {
            differ.push(format!(
                "{} {}: {} bytes, not {}",
                case["template"],
                case["name"],
                ours.len(),
                expected.len()
            ));
        }
    }
    assert!(differ.is_empty(), "ours, and Jinja2's:\n{}", differ.join("\n"));
}

/// Where nobody writes a special token but the template, ids are those of Hugging Face.
#[test]
fn honest_conversations_have_the_ids_of_their_text() {
    let (tokenizer, oracle) = (tokenizer(), oracle(POCKET));
    let mut compared = 0;
    for case in goldens() {
        if case["name"] == "forged"
            || case["name"] == "mixed"
            || case["template"] == "printing"
            || case["name"] == "arguments as text"
            || case["name"] == "parts"
        {
            continue;
        }
        let rendered = render(&tokenizer, &case);
        assert_eq!(
            tokenizer.encode_rendered(&rendered),
            oracle_ids(&oracle, &rendered.text()),
            "{} {}",
            case["template"],
            case["name"]
        );
        compared += 1;
    }
    assert!(compared > 20);
}

/// Special tokens of a rendering, by how often each comes.
fn tokens(rendered: &Rendered) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for segment in rendered.segments() {
        if let Segment::Token { text, .. } = segment {
            *counts.entry(text.clone()).or_default() += 1;
        }
    }
    counts
}

fn counts(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected.iter().map(|&(text, count)| (text.to_owned(), count)).collect()
}

#[test]
fn forged_conversations_have_the_template_s_tokens_alone() {
    let tokenizer = tokenizer();
    let mut seen = 0;
    for case in goldens().iter().filter(|case| case["name"] == "forged") {
        let rendered = render(&tokenizer, case);
        let (turn_ends, others) = match case["template"].as_str().expect("a name") {
            // What the assistant itself said keeps its </think>.
            "chatml" => (4, counts(&[("</think>", 1)])),
            // The template's own instructions on how to call.
            "tools_json" => (4, counts(&[("<tool_call>", 1)])),
            "tools_xml" => (4, counts(&[("<tool_call>", 1), ("</tool_call>", 1)])),
            // Reasoning after the last question, and the start of the answer's.
            "thinking" => (5, counts(&[("<think>", 2), ("</think>", 1)])),
            name => panic!("{name}"),
        };
        let mut expected = counts(&[("<|im_end|>", turn_ends), ("<|im_start|>", turn_ends + 1)]);
        expected.extend(others);
        assert_eq!(tokens(&rendered), expected, "{}", case["template"]);
        let ids = tokenizer.encode_rendered(&rendered);
        let control = ids.iter().filter(|&&id| tokenizer.kind(id) == Some(text::TokenKind::Control)).count();
        assert_eq!(control, expected["<|im_end|>"] + expected["<|im_start|>"]);
        seen += 1;
    }
    assert_eq!(seen, 4);
}

fn shared() -> &'static Tokenizer {
    static SHARED: LazyLock<Tokenizer> = LazyLock::new(tokenizer);
    &SHARED
}

fn with(template: &str, value: Value) -> Result<Rendered, TemplateError> {
    let variables = Map::from_iter([("v".to_owned(), value)]);
    ChatTemplate::new(template, shared())?.render(&json!([]), None, false, &variables)
}

#[track_caller]
fn assert_plain(template: &str, value: Value, text: &str) {
    let rendered = with(template, value).expect("it renders");
    assert_eq!(rendered.segments(), [Segment::Text(text.to_owned())], "{template}");
}

/// What a template may do to values without meaning to make a token of them.
#[test]
fn no_operation_makes_a_control_token_of_values() {
    assert_plain("{{ v }}", json!("<|im_end|>"), "<|im_end|>");
    assert_plain("{{ v[0] ~ v[1] }}", json!(["<|im_", "end|>"]), "<|im_end|>");
    assert_plain("{{ v | join }}", json!(["<", "|im_end|>"]), "<|im_end|>");
    assert_plain("{{ v | join }}", json!(["<", "|", "im_end", "|", ">"]), "<|im_end|>");
    assert_plain("{{ '<' ~ v ~ '>' }}", json!("|im_end|"), "<|im_end|>");
    assert_plain("{% for k in v %}<{{ k }}>{% endfor %}", json!({"|im_end|": 1}), "<|im_end|>");
    assert_plain("{{ v | lower }}", json!("<|IM_END|>"), "<|im_end|>");
    assert_plain("{{ v.replace('<think>', '') }}", json!("<|im_<think>end|>"), "<|im_end|>");
    assert_plain("{{ v | replace('x', '') }}", json!("x<x|im_xend|>"), "<|im_end|>");
    assert_plain("{{ v | trim }}", json!(" <|im_end|>\n"), "<|im_end|>");
    assert_plain(
        "{{ v | tojson }}",
        json!({"<|im_end|>": ["<|im_start|>"]}),
        r#"{"<|im_end|>": ["<|im_start|>"]}"#,
    );
    assert_plain(
        "{{ v | tojson(ensure_ascii=true) }}",
        json!("<|im_end|>\u{fdd1}é"),
        r#""<|im_end|>\ufdd1\u00e9""#,
    );
    assert_plain("{{ v }}", json!(["<|im_end|>"]), "['<|im_end|>']");
    assert_plain("{{ v | reverse | reverse }}", json!("<|im_end|>"), "<|im_end|>");
    assert_plain("{{ v | list | join }}", json!("<|im_end|>"), "<|im_end|>");
    assert_plain("{{ v[:1] ~ v[-100:] }}", json!("<|im_end|>"), "<<|im_end|>");
    assert_plain(
        "{{ v }}",
        json!("\u{fdd3}\u{fdd0}<\u{fdd4}|\u{fdd2}im_end|>\u{fdd1}"),
        "\u{fdd3}\u{fdd0}<\u{fdd4}|\u{fdd2}im_end|>\u{fdd1}",
    );
}

#[test]
fn values_joined_at_random_stay_text() {
    const PARTS: [&str; 22] = [
        "<",
        "|",
        ">",
        "<|",
        "|>",
        "im_end",
        "im_",
        "end",
        "<|im_end|>",
        "<|im_start",
        "<thi",
        "nk>",
        "</",
        "<think>",
        "</think>",
        "<tool_call>",
        "\u{fdd0}",
        "\u{fdd1}",
        "\u{fdd3}",
        " ",
        "\n",
        "é",
    ];
    let mut random = common::Random(5);
    for _ in 0..600 {
        let values: Vec<String> =
            (0..4).map(|_| (0..random.below(5)).map(|_| random.pick(&PARTS)).collect()).collect();
        let rendered =
            with("<|im_start|>{{ v | join }}{% for x in v %}{{ x }}{% endfor %}<|im_end|>", json!(values))
                .expect("it renders");
        assert_eq!(tokens(&rendered), counts(&[("<|im_start|>", 1), ("<|im_end|>", 1)]), "{values:?}");
        assert_eq!(rendered.text(), format!("<|im_start|>{0}{0}<|im_end|>", values.concat()));
    }
}

#[test]
fn values_leave_the_template_s_own_tokens_alone() {
    for value in [
        "<",
        "|",
        "<|",
        ">",
        "<think",
        "</",
        "\u{fdd0}",
        "\u{fdd1}",
        "\u{fdd2}",
        "\u{fdd3}",
        "a<|im_end|>",
        "</think>",
        "<think>",
        "x",
    ] {
        let rendered = with("<|im_start|>{{ v }}<|im_end|>{{ v }}<think>{{ v }}</think>", json!(value))
            .expect("it renders");
        let expected = counts(&[("<|im_start|>", 1), ("<|im_end|>", 1), ("<think>", 1), ("</think>", 1)]);
        assert_eq!(tokens(&rendered), expected, "for {value:?}");
        assert_eq!(rendered.text(), format!("<|im_start|>{value}<|im_end|>{value}<think>{value}</think>"));
    }
}

#[test]
fn user_defined_tokens_are_text_everywhere_but_in_what_the_assistant_said() {
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{{ m.x }}{% endfor %}", shared())
        .expect("a template");
    let said = |role: &str| {
        let messages = json!([{"role": role, "content": "<think>a</think><|im_end|>", "x": "<tool_call>"}]);
        tokens(&template.render(&messages, None, false, &Map::new()).expect("it renders"))
    };
    for role in ["user", "system", "tool", "developer", "", "Assistant"] {
        assert_eq!(said(role), counts(&[]), "{role}");
    }
    assert_eq!(said("assistant"), counts(&[("<think>", 1), ("</think>", 1)]));
    assert_plain("{{ v[0] ~ v[1] }}", json!(["a <tool_", "call>"]), "a <tool_call>");
    assert_plain("{{ v[0] | trim ~ v[1] }}", json!(["a </thi\n", "nk>"]), "a </think>");
    // Templates ask how a message starts and ends.
    assert_plain(
        "{{ v.startswith('<think>') }} {{ v.endswith('</think>') }}",
        json!("<think>a</think>"),
        "True True",
    );
}

#[test]
fn bad_templates_are_refused_with_their_line() {
    let refused = |source: &str| ChatTemplate::new(source, shared()).expect_err("a bad template");
    assert!(matches!(refused("a\n{% if %}"), TemplateError::Syntax { line: 2, .. }));
    assert!(matches!(refused("{{ 'a"), TemplateError::Syntax { line: 1, .. }));
    assert!(matches!(refused("{% endfor %}"), TemplateError::Syntax { .. }));
    assert_eq!(refused("\u{fdd2}"), TemplateError::ReservedCharacter);
    let nested = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(matches!(refused(&nested), TemplateError::Syntax { .. }));
}

#[test]
fn failing_templates_say_where_and_why() {
    let failed = |template: &str| with(template, json!("<|x|>")).expect_err("a failing template");
    let refused = |line, message: &str| TemplateError::Refused { line, message: message.to_owned() };
    assert_eq!(failed("\n\n{{ raise_exception('no ' ~ v) }}"), refused(3, "no <|x|>"));
    assert_eq!(
        failed("{% macro m() %}\n{{ raise_exception(v) }}{% endmacro %}{{ m() }}").to_string(),
        refused(2, "<|x|>").to_string()
    );
    for template in [
        "\n{{ missing.field }}",
        "\n{{ v + 1 }}",
        "\n{{ 1 / 0 }}",
        "\n{{ v | nofilter }}",
        "\n{{ nofunction() }}",
        "\n{{ [] | tojson(indent=100000) }}",
        "\n{{ v | tojson(other=1) }}",
        "\n{{ missing | tojson }}",
        "\n{{ strftime_now('%Q') }}",
        "\n{% include 'x' %}",
        "\n{{ v.nomethod() }}",
        "\n{{ [1] | tojson(separators=[1]) }}",
    ] {
        let error = failed(template);
        assert!(
            matches!(error, TemplateError::Render { line: 2, .. } | TemplateError::Syntax { line: 2, .. }),
            "{template}: {error}"
        );
    }
    let empty = ChatTemplate::new(source("thinking"), shared()).expect("a template");
    for messages in [
        json!([]),
        json!(null),
        json!(5),
        json!([null]),
        json!(["x"]),
        json!([{}]),
        json!([{"role": 1}]),
        json!({"a": 1}),
    ] {
        assert!(empty.render(&messages, None, true, &Map::new()).is_err(), "{messages}");
    }
}

#[test]
fn runaway_templates_are_stopped() {
    let runaway = |template: &str| {
        let error = with(template, json!("x")).expect_err("a runaway template");
        assert!(
            matches!(error, TemplateError::Runaway { .. } | TemplateError::Render { .. }),
            "{template}: {error}"
        );
    };
    runaway("{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}");
    runaway("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    runaway("{{ 'x' * 100000000000 }}");
    runaway(
        "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(90000) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    );
    let mut nested = json!(1);
    for _ in 0..200 {
        nested = json!([nested]);
    }
    assert_eq!(with("{{ v }}", nested), Err(TemplateError::TooDeep("variables")));
}

/// Values that a template nests without end would exhaust the stack when they are printed, compared or dropped.
#[test]
fn namespaces_hold_no_bottomless_values() {
    let ends = ["", "{{ ns.v }}", "{{ ns.v | tojson }}", "{{ ns.v == ns.w }}", "{{ ns }}"];
    let values = [
        "[ns.v]",
        "{'a': ns.v}",
        "(ns.v, 1)",
        "ns.v, 1",
        "[[[ns.v]]]",
        "ns",
        "[ns]",
        "{'a': [ns]}",
        "namespace(v=ns.v)",
        "dict(a=ns.v)",
        "[ns.v] if true else 1",
        "x",
        "[ns.v] + [ns.v]",
    ];
    for end in ends {
        for value in values {
            let template = format!(
                "{{% set ns = namespace(v=1, w=1) %}}\n{{%- for i in range(20000) %}}{{% set x = [ns.v] %}}{{%-set ns.v={value}-%}}{{% endfor %}}{end}"
            );
            let error = with(&template, json!(1)).expect_err("too deep");
            assert!(
                matches!(error, TemplateError::Render { line: 2, .. } | TemplateError::Runaway { .. }),
                "{template}: {error}"
            );
        }
    }
    let text = |template: &str, v: Value| with(template, v).expect("it renders").text();
    let kept = "{% set ns = namespace(a=[]) %}{% for m in v %}{% set ns.a = ns.a + [m] %}{% endfor %}{{ ns.a }}{% set ns.t = 1, 'x=%}' %}{{ ns.t }}";
    assert_eq!(text(kept, json!([1, {"k": [2]}])), "[1, {'k': [2]}](1, 'x=%}')");
    let block = "{% set ns = namespace() %}{% set ns.a %}x = {{ v }}{% endset %}{% set b = [ns.a] %}{{ b }}{% set ns.m = v | map('upper') %}{{ ns.m | join }}";
    assert_eq!(text(block, json!("q")), "['x = q']Q");
}

#[test]
fn the_time_can_be_fixed() {
    let template = ChatTemplate::new("{{ strftime_now('%d %B %Y') }}", shared()).expect("a template");
    let text = |template: &ChatTemplate| {
        template.render(&json!([]), None, false, &Map::new()).expect("it renders").text()
    };
    assert!(text(&template).len() > 8);
    assert_eq!(text(&template.with_time(951_827_696)), "29 February 2000");
}
