//! Any chat template and any conversation: an error, or a prompt in which no control token comes from a value.
//!
//! The input is four UTF-8 texts with the byte 0xFF between them: template, messages, tools, variables (JSON).

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use text::{ChatTemplate, Segment, TemplateError, Tokenizer, Vocabulary};

const POCKET: &str = include_str!("../../crates/text/tests/data/pocket_tokenizer.json");
const CONFIG: &str = include_str!("../../crates/text/tests/data/pocket_tokenizer_config.json");
/// A turn for each message: two control tokens of its own.
const TURNS: &str = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let vocabulary = Vocabulary::from_hf(POCKET, Some(CONFIG)).expect("a good tokenizer");
    Tokenizer::new(vocabulary).expect("a good vocabulary")
});
static TURNS_TEMPLATE: LazyLock<ChatTemplate> =
    LazyLock::new(|| ChatTemplate::new(TURNS, &TOKENIZER).expect("a good template"));

fuzz_target!(|bytes: &[u8]| {
    let texts: Option<Vec<&str>> = bytes.split(|&b| b == 0xFF).map(|b| std::str::from_utf8(b).ok()).collect();
    let Some(texts) = texts else { return };
    let json = |at: usize| texts.get(at).and_then(|text| serde_json::from_str::<Value>(text).ok());
    let variables = match json(3) {
        Some(Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    if let Ok(template) = ChatTemplate::new(texts[0], &TOKENIZER) {
        let template = template.with_time(1_700_000_000);
        let messages = json(1).unwrap_or_else(|| json!([{"role": "user", "content": "Hi"}]));
        match template.render(&messages, json(2).as_ref(), true, &variables) {
            Ok(rendered) => drop(TOKENIZER.encode_rendered(&rendered)),
            Err(TemplateError::Syntax { .. }) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    values_stay_text(&texts);
});

/// Whatever the messages say, the tokens are those of the template, and the text is what was said.
fn values_stay_text(texts: &[&str]) {
    let messages: Vec<Value> = texts.iter().map(|text| json!({"role": "user", "content": text})).collect();
    let rendered = TURNS_TEMPLATE.render(&json!(messages), None, false, &serde_json::Map::new());
    let rendered = rendered.expect("a plain conversation");
    let mut expected = Vec::new();
    for text in texts {
        expected.push(Err("<|im_start|>"));
        expected.extend((!text.is_empty()).then_some(Ok(*text)));
        expected.push(Err("<|im_end|>"));
    }
    let found = rendered.segments().iter().map(|segment| match segment {
        Segment::Text(text) => Ok(text.as_str()),
        Segment::Token { text, .. } => Err(text.as_str()),
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
}
