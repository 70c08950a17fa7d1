//! What a demanded form costs: for each of some demands the time to compile its grammar, and the time at each token of a
//! text that satisfies it, for the mask and for going on. With a vocabulary of 150,000 tokens the mask is the longer part.
//!
//! `cargo run --release -p redlite-server --example masks -- FILE.gguf | FOLDER_WITH_TOKENIZER_JSON`

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use server::grammar::Grammars;
use text::{CallFormat, Tokenizer, Vocabulary, call_rules};

/// One demand: its name, its rules, and a text that satisfies them.
struct Demand {
    name: &'static str,
    rules: String,
    text: String,
}

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("name a GGUF file, or a folder with tokenizer.json")?;
    let tokenizer = tokenizer(Path::new(&path))?;
    let begun = Instant::now();
    let grammars = Grammars::new(&tokenizer)?;
    println!("vocabulary of {} tokens", tokenizer.len());
    println!(
        "{:<28} {:>10} {:>7} {:>12} {:>9} {:>9}",
        "demand", "compile ms", "tokens", "us a token", "p99", "max"
    );
    for (number, demand) in demands()?.into_iter().enumerate() {
        let started = Instant::now();
        let mut constraint = grammars.compile(demand.rules)?;
        let compiled = started.elapsed();
        if number == 0 {
            // The first one waits until the vocabulary is sorted.
            println!("{:<28} {:>10.1}", "(first, with vocabulary)", milliseconds(begun.elapsed()));
        }
        let mut times = Vec::new();
        for id in tokenizer.encode_raw_with_specials(&demand.text) {
            let started = Instant::now();
            let mask = constraint.mask()?;
            if !mask.allows(id) {
                let token = String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default());
                return Err(format!("{}: {token:?} is not allowed as token {}", demand.name, times.len()));
            }
            constraint.commit(id)?;
            times.push(started.elapsed());
        }
        let mean = times.iter().sum::<Duration>() / times.len() as u32;
        times.sort_unstable();
        let p99 = times[times.len() * 99 / 100];
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{:<28} {:>10.1} {:>7} {:>12.1} {:>9.1} {:>9.1}",
            demand.name,
            milliseconds(compiled),
            times.len(),
            micros(mean),
            micros(p99),
            micros(times[times.len() - 1])
        );
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn tokenizer(path: &Path) -> Result<Tokenizer, String> {
    let vocabulary = if path.is_dir() {
        Vocabulary::from_hf_folder(path).map_err(|error| error.to_string())?
    } else {
        let model = model::Model::open(path).map_err(|error| error.to_string())?;
        model::vocabulary(model.gguf.metadata()).map_err(|error| error.to_string())?
    };
    Tokenizer::new(vocabulary).map_err(|error| error.to_string())
}

fn demands() -> Result<Vec<Demand>, String> {
    let people: Vec<Json> =
        (0..20).map(|n| json!({"name": format!("Person {n}"), "age": 20 + n, "tags": ["a", "b"]})).collect();
    let schema = json!({"type": "object", "properties": {"people": {"type": "array", "items": {"type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age", "tags"],
        "additionalProperties": false}}}, "required": ["people"], "additionalProperties": false});
    // Properties come in the order of the schema.
    let people = people.iter().map(|one| {
        format!("{{\"name\": {}, \"age\": {}, \"tags\": [\"a\", \"b\"]}}", one["name"], one["age"])
    });
    let people = format!("{{\"people\": [{}]}}", people.collect::<Vec<_>>().join(", "));
    let request: Json = serde_json::from_str(include_str!("../tests/data/agents/opencode.json"))
        .map_err(|error| error.to_string())?;
    let tools: Vec<&Json> = request["request"]["tools"].as_array().into_iter().flatten().collect();
    let code = include_str!("masks.rs").get(..3000).unwrap_or_default();
    let edit = json!({"filePath": "src/main.rs", "oldString": "todo", "newString": code});
    let edit =
        ["filePath", "oldString", "newString"].map(|key| format!("{}: {}", json!(key), edit[key])).join(", ");
    let rules = |format| {
        call_rules(format, &tools).map(|rules| format!("{rules}start: call\n")).map_err(|bad| bad.what)
    };
    Ok(vec![
        Demand {
            name: "any JSON object",
            rules: "start: %json {\"type\": \"object\"}\n".to_owned(),
            text: people.clone(),
        },
        Demand { name: "JSON of a schema", rules: format!("start: %json {schema}\n"), text: people },
        Demand {
            name: "a call, JSON notation",
            rules: rules(CallFormat::Json)?,
            text: format!("<tool_call>\n{{\"name\": \"edit\", \"arguments\": {{{edit}}}}}\n</tool_call>"),
        },
        Demand {
            name: "a call, XML notation",
            rules: rules(CallFormat::Xml)?,
            text: format!(
                "<tool_call>\n<function=edit>\n<parameter=filePath>\nsrc/main.rs\n</parameter>\n<parameter=oldString>\ntodo\n\
                 </parameter>\n<parameter=newString>\n{code}\n</parameter>\n</function>\n</tool_call>"
            ),
        },
    ])
}
