//! Answers taken apart: any split of the stream gives the same, and nothing is lost.

use serde_json::{Value, json};
use text::{AnswerParser, CallFormat, Piece};

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
            "path": {"type": "string"}, "zip": {"type": "string"}, "count": {"type": "integer"},
            "ratio": {"type": "number"}, "force": {"type": "boolean"}, "list": {"type": "array"},
            "map": {"type": "object"}, "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "mode": {"enum": ["fast", "slow"]}, "deep": {"$ref": "#/$defs/size"}
        }, "$defs": {"size": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "now"}}
    ])
}

/// A call as its pieces add up.
#[derive(Debug, Clone, Default, PartialEq)]
struct ToolCall {
    name: String,
    arguments: String,
}

/// Pieces joined: reasoning, content, calls.
type Whole = (String, String, Vec<ToolCall>);

fn collect(pieces: impl IntoIterator<Item = Piece>) -> Whole {
    let mut whole = Whole::default();
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => whole.0 += &text,
            Piece::Content(text) => whole.1 += &text,
            Piece::Call(name) => whole.2.push(ToolCall { name, arguments: String::new() }),
            Piece::Arguments(text) => whole.2.last_mut().expect("a call has begun").arguments += &text,
        }
    }
    whole
}

fn parse(mut parser: AnswerParser, pieces: &[&str]) -> Whole {
    let mut out = Vec::new();
    pieces.iter().for_each(|piece| out.extend(parser.push(piece)));
    out.extend(parser.finish());
    collect(out)
}

/// The result of a whole answer, after every split in two and the split into characters gave the same.
fn check(format: Option<CallFormat>, thinking: bool, answer: &str) -> Whole {
    let parser = || AnswerParser::new(format, Some(&tools()), thinking);
    let whole = parse(parser(), &[answer]);
    for at in (1..answer.len()).filter(|&at| answer.is_char_boundary(at)) {
        let (a, b) = answer.split_at(at);
        assert_eq!(parse(parser(), &[a, b]), whole, "{a:?} | {b:?}");
    }
    let mut buffer = [0; 4];
    let letters: Vec<String> = answer.chars().map(|c| c.encode_utf8(&mut buffer).to_owned()).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(parse(parser(), &letters), whole, "letter by letter");
    whole
}

fn xml(answer: &str) -> Whole {
    check(Some(CallFormat::Xml), false, answer)
}

fn json_calls(answer: &str) -> Whole {
    check(Some(CallFormat::Json), false, answer)
}

fn arguments(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap()
}

#[test]
fn templates_choose_the_notation() {
    let template = |name: &str| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates").join(name);
        CallFormat::of_template(&std::fs::read_to_string(path).unwrap())
    };
    assert_eq!(template("tools_xml.jinja"), Some(CallFormat::Xml));
    assert_eq!(template("tools_json.jinja"), Some(CallFormat::Json));
    assert_eq!(template("chatml.jinja"), None);
}

#[test]
fn two_json_calls_in_a_row() {
    let (_, content, calls) = json_calls(
        "Let me look.\n<tool_call>\n{\"name\": \"edit\", \"arguments\": {\"path\": \"a </tool_call> b\", \"count\": 3}}\n\
         </tool_call>\n<tool_call>{\"name\": \"now\"}</tool_call>",
    );
    assert_eq!(content, "Let me look.");
    assert_eq!(calls.len(), 2);
    assert_eq!((calls[0].name.as_str(), calls[1].name.as_str()), ("edit", "now"));
    assert_eq!(arguments(&calls[0]), json!({"path": "a </tool_call> b", "count": 3}));
    assert_eq!(calls[1].arguments, "{}");
}

#[test]
fn json_values_take_the_types_of_the_schema() {
    let call = json!({"name": "edit", "arguments": {"path": {"a": 1}, "zip": 2134, "count": "30", "ratio": "0.5",
        "force": "true", "maybe": null, "list": "[1]", "map": "no map", "other": "5"}});
    let (_, _, calls) = json_calls(&format!("<tool_call>{call}</tool_call>"));
    let expected = json!({"path": "{\"a\":1}", "zip": "2134", "count": 30, "ratio": 0.5, "force": true, "maybe": null,
        "list": [1], "map": "no map", "other": "5"});
    assert_eq!(arguments(&calls[0]), expected);
}

fn xml_call(parameters: &[(&str, &str)]) -> String {
    let parameters: String =
        parameters.iter().map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n")).collect();
    format!("<tool_call>\n<function=edit>\n{parameters}</function>\n</tool_call>")
}

#[test]
fn xml_values_are_typed_by_the_schema_only() {
    let call = xml_call(&[
        ("path", "5"),
        ("zip", "02134"),
        ("count", "30"),
        ("ratio", "1e3"),
        ("force", "True"),
        ("list", "[1, \"a\"]"),
        ("map", "{\"k\": null}"),
        ("maybe", "null"),
        ("mode", "fast"),
        ("deep", "7"),
        ("unknown", "{\"a\": 1}"),
    ]);
    let (_, content, calls) = xml(&format!("Now.\n\n{call}\n{call}"));
    assert_eq!((content.as_str(), calls.len()), ("Now.", 2));
    let expected = json!({"path": "5", "zip": "02134", "count": 30, "ratio": 1e3, "force": true, "list": [1, "a"],
        "map": {"k": null}, "maybe": null, "mode": "fast", "deep": 7, "unknown": "{\"a\": 1}"});
    assert_eq!(arguments(&calls[0]), expected);
    assert_eq!(calls[0], calls[1]);
}

#[test]
fn values_that_do_not_convert_keep_the_call() {
    let call = xml_call(&[
        ("count", "2024-01-01"),
        ("map", "fn main() {}"),
        ("list", ""),
        ("maybe", ""),
        ("path", ""),
    ]);
    let (_, _, calls) = xml(&call);
    let expected = json!({"count": "2024-01-01", "map": "fn main() {}", "maybe": null, "path": ""});
    assert_eq!(arguments(&calls[0]), expected);
}

#[test]
fn tags_inside_values_belong_to_them() {
    let value = "a\n</parameter>\nb </function> </tool_call>\n\n  indented\n";
    let (_, _, calls) = xml(&xml_call(&[("path", value), ("zip", "<tool_call>")]));
    assert_eq!(arguments(&calls[0]), json!({"path": value, "zip": "<tool_call>"}));
}

#[test]
fn a_call_without_its_wrapper_is_a_call_if_the_tool_is_declared() {
    let (_, content, calls) =
        xml("I will.\n<function=edit>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>\nDone.");
    assert_eq!((content.as_str(), calls.len()), ("I will.Done.", 1));
    let cut = "I will.\n<function=edit>\n<parameter=path>\nx\n</parameter>\n</function>\nDone.";
    assert_eq!((xml(cut).1.as_str(), xml(cut).2.len()), ("I will.Done.", 1));
    let odd = "Write `<function=foo>` and\n<function=bar>\n</function> here.";
    assert_eq!(xml(odd), (String::new(), odd.to_owned(), vec![]));
}

#[test]
fn an_answer_cut_off_after_a_complete_call_has_it() {
    assert_eq!(json_calls("<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n").2.len(), 1);
    assert_eq!(xml("<tool_call>\n<function=now>\n</function>\n").2.len(), 1);
}

#[test]
fn odd_output_stays_text() {
    for odd in [
        "<tool_call>\n{\"name\": \"other\", \"arguments\": {\"path\": \"unfin",
        "<tool_call>\n{\"name\": \"edit\", \"argu",
        "<tool_call>not json</tool_call> and more",
        "<tool_call>{\"no name\": 1}</tool_call>",
        "<tool_call>{\"name\": \"edit\", \"arguments\": 5}</tool_call>",
        "a < b, <tool, <tool_cal",
        "text with <think> in it </think>",
        "ends with space \n",
    ] {
        assert_eq!(json_calls(odd), (String::new(), odd.to_owned(), vec![]), "{odd:?}");
        assert_eq!(xml(odd), (String::new(), odd.to_owned(), vec![]), "{odd:?}");
    }
    for cut in ["<tool_call>\n<function=other>\n<parameter=path>\nhalf", "<tool_call>\n<function=edi"] {
        assert_eq!(xml(cut), (String::new(), cut.to_owned(), vec![]));
    }
}

/// The only call of an answer in which there is nothing else.
fn only(whole: Whole) -> ToolCall {
    assert_eq!((whole.0.as_str(), whole.1.as_str(), whole.2.len()), ("", "", 1), "{whole:?}");
    whole.2[0].clone()
}

#[test]
fn a_call_cut_off_cannot_be_taken_for_a_complete_one() {
    for (answer, arguments) in [
        ("<tool_call>\n{\"name\": \"edit\", \"arguments\": {\"path\": \"unfin", "{\"path\":\"unfin"),
        (
            "<tool_call>{\"name\": \"edit\", \"arguments\": {\"path\": \"a\", \"list\": [1, 2",
            "{\"path\":\"a\",\"list\":[1, 2",
        ),
        ("<tool_call>{\"name\": \"edit\", \"arguments\": {\"path\": \"a\",", "{\"path\":\"a\","),
        ("<tool_call>{\"name\": \"edit\", \"arguments\": {", "{"),
    ] {
        assert_eq!(only(json_calls(answer)).arguments, arguments, "{answer:?}");
    }
    for (answer, arguments) in [
        ("<tool_call>\n<function=edit>\n<parameter=path>\nhalf\n", "{\"path\":\"half\\n"),
        ("<function=edit>\n<parameter=path>\na\n</parameter>\n", "{\"path\":\"a\""),
        ("<tool_call>\n<function=edit>\n<parameter=count>\n1", "{\"count\":\"1"),
        ("<tool_call>\n<function=edit>\n", "{"),
    ] {
        assert_eq!(only(xml(answer)).arguments, arguments, "{answer:?}");
    }
}

#[test]
fn calls_with_mistakes_are_mended_or_kept_as_they_are() {
    let call = |arguments: &str| {
        format!("<tool_call>{{\"name\": \"edit\", \"arguments\": {arguments}}}</tool_call>")
    };
    for (written, meant) in [
        // New lines and backslashes that were not escaped.
        ("{\"path\": \"a\nb\"}", json!({"path": "a\nb"})),
        (r#"{"path": "\d \' é é \\"}"#, json!({"path": "\\d \\' é é \\"})),
        ("{\"list\": [\"a\nb\"]}", json!({"list": ["a\nb"]})),
        (r#"{"path": "\u12"}"#, json!({"path": "\\u12"})),
        ("{ \"path\" : \"a\" , \"count\" : 1 }", json!({"path": "a", "count": 1})),
    ] {
        assert_eq!(arguments(&only(json_calls(&call(written)))), meant, "{written}");
    }
    // A brace that is missing, fields that nobody asked for.
    for answer in [
        "<tool_call>{\"name\": \"now\", \"arguments\": {}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": {}, \"id\": \"7\"}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"parameters\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}, \"name\": \"now\"}</tool_call>",
        "<tool_call>[{\"name\": \"now\", \"arguments\": {}}]</tool_call>",
    ] {
        assert_eq!(only(json_calls(answer)).arguments, "{}", "{answer}");
    }
    for odd in ["{\"path\": }", "{\"path\" \"a\"}", "{\"count\": 1 2}", "{path: 1}"] {
        let call = only(json_calls(&call(odd)));
        assert!(serde_json::from_str::<Value>(&call.arguments).is_err(), "{odd}: {call:?}");
    }
    // A function block without its end, text between parameters, two blocks in one wrapper.
    let whole = xml("<tool_call>\n<function=edit>\nwell <parameter=path>\na\n</parameter>\n</tool_call> ok");
    assert_eq!((whole.1.as_str(), whole.2[0].arguments.as_str()), ("well ok", "{\"path\":\"a\"}"));
    let two = xml("<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>");
    assert_eq!((two.1.as_str(), two.2.len()), ("", 2));
}

#[test]
fn texts_among_the_arguments_come_as_they_are_written() {
    let long: String = (0..200).map(|line| format!("line {line} of a \"file\"\n")).collect();
    let json_call = json!({"name": "edit", "arguments": {"count": 3, "path": long}});
    let answers = [
        (CallFormat::Json, format!("<tool_call>{json_call}</tool_call>")),
        (CallFormat::Xml, xml_call(&[("count", "3"), ("path", &long)])),
    ];
    for (format, answer) in answers {
        let mut parser = AnswerParser::new(Some(format), Some(&tools()), false);
        let (mut given, mut parts) = (String::new(), 0);
        for (at, letter) in answer.char_indices() {
            for piece in parser.push(letter.encode_utf8(&mut [0; 4])) {
                let Piece::Arguments(text) = piece else { continue };
                (given, parts) = (given + &text, parts + 1);
            }
            // Never far behind what has been written; escapes make it longer.
            let written = at.saturating_sub(answer.find("line 0").unwrap());
            assert!(given.len() + 40 > written, "{format:?}: {} of {written}", given.len());
        }
        assert!(parts > 2000, "{format:?}: {parts} parts");
        let whole = check(Some(format), false, &answer[..400]).2.remove(0).arguments;
        assert!(given.starts_with(whole.trim_end_matches("\\n")), "{format:?}");
        assert_eq!(serde_json::from_str::<Value>(&given).unwrap(), json!({"count": 3, "path": long}));
    }
}

#[test]
fn reasoning_is_kept_apart() {
    let thought = "first\n\nthen";
    let expected = (thought.to_owned(), "Answer.".to_owned(), vec![]);
    assert_eq!(check(None, true, &format!("\n{thought}\n</think>\n\nAnswer.")), expected);
    assert_eq!(check(None, false, &format!("<think>\n{thought}\n</think>\n\nAnswer.")), expected);
    assert_eq!(check(None, true, "never ends </thin").0, "never ends </thin");
    let (reasoning, content, calls) =
        check(Some(CallFormat::Json), true, "hm\n</think>\n\n<tool_call>{\"name\": \"now\"}</tool_call>");
    assert_eq!((reasoning.as_str(), content.as_str(), calls.len()), ("hm", "", 1));
    // Calls that are thought of are not made.
    assert_eq!(
        check(Some(CallFormat::Json), true, "<tool_call>{\"name\": \"now\"}</tool_call></think>ok").2.len(),
        0
    );
}

#[test]
fn without_tools_calls_are_text() {
    let text = "<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(check(None, false, text), (String::new(), text.to_owned(), vec![]));
}
