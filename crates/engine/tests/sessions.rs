//! Sessions: limits, cancellation, forks, and answers.

mod common;

use common::engine;
use engine::{
    Cancel, Engine, Error, Finish, Generation, GenerationOptions, LogitRows, Options, Request, Sampling,
    Session,
};
use testkit::{TinyModel, TinyOptions};
use text::Tokenizer;

fn tiny() -> TinyModel {
    TinyModel::new(TinyOptions::default())
}

fn tokens(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + 11) % 97).collect()
}

fn read(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    engine.ingest(session, tokens, &mut Request::default()).unwrap().logits
}

#[test]
fn two_requests_continue_one_session() {
    let tiny = tiny();
    let mut engine = engine("reference", &tiny.model, Options { chunk: 64, context: 400 });
    let all = tokens(192);
    let (mut whole, mut parts) = (engine.open(), engine.open());
    let expected = read(&mut engine, &mut whole, &all);
    read(&mut engine, &mut parts, &all[..128]);
    let found = read(&mut engine, &mut parts, &all[128..]);
    assert_eq!(expected, found, "a cut on the grid changes no bit");
    assert_eq!(parts.tokens(), all);

    let mut fork = engine.fork(&parts).unwrap();
    let (a, b) = (read(&mut engine, &mut fork, &[5]), read(&mut engine, &mut parts, &[5]));
    assert_eq!(a, b);
    assert_eq!((fork.len(), parts.len()), (193, 193));
}

#[test]
fn the_context_is_never_overrun() {
    let tiny = tiny();
    let mut engine = engine("reference", &tiny.model, Options { chunk: 64, context: 100 });
    let mut session = engine.open();
    read(&mut engine, &mut session, &tokens(90));
    let error = engine.ingest(&mut session, &tokens(11), &mut Request::default()).unwrap_err();
    assert!(matches!(error, Error::ContextOverflow { needed: 101, context: 100 }), "{error}");
    assert_eq!(session.len(), 90, "nothing was read");
    assert!(matches!(engine.ingest(&mut session, &[], &mut Request::default()), Err(Error::EmptyPrompt)));
    read(&mut engine, &mut session, &tokens(10));
}

#[test]
fn cancelling_keeps_the_complete_chunks() {
    let tiny = tiny();
    let mut engine = engine("reference", &tiny.model, Options { chunk: 64, context: 400 });
    let all = tokens(256);
    let mut session = engine.open();
    let cancel = Cancel::new();
    let flag = cancel.clone();
    let mut progress = |done: f64, _: usize| {
        if done > 150.0 {
            flag.cancel();
        }
    };
    let mut request = Request { on_progress: Some(&mut progress), cancel, ..Request::default() };
    let error = engine.ingest(&mut session, &all, &mut request).unwrap_err();
    assert!(matches!(error, Error::Cancelled { read: 128, total: 256 }), "{error}");
    assert_eq!(session.tokens(), &all[..128]);

    let rest = read(&mut engine, &mut session, &all[128..]);
    let mut fresh = engine.open();
    assert_eq!(rest, read(&mut engine, &mut fresh, &all), "as if nobody had interrupted");
}

#[test]
fn wanted_logits_arrive_once_and_in_order() {
    let tiny = tiny();
    let mut engine = engine("reference", &tiny.model, Options { chunk: 64, context: 400 });
    let all = tokens(200);
    let mut session = engine.open();
    let mut rows = Vec::new();
    let mut hear = |row: usize, logits: &[f32]| rows.push((row, logits.to_vec()));
    let mut request =
        Request { logits: LogitRows::Range(60..131), on_logits: Some(&mut hear), ..Request::default() };
    let result = engine.ingest(&mut session, &all, &mut request).unwrap();
    assert!(result.logits.is_empty(), "the last row was not among them");
    assert_eq!(result.chunks, 4);
    assert_eq!(rows.iter().map(|(row, _)| *row).collect::<Vec<_>>(), (60..131).collect::<Vec<_>>());
    let mut prefix = engine.open();
    let last = read(&mut engine, &mut prefix, &all[..131]);
    assert_eq!(rows.last().unwrap().1, last);
}

/// A tokenizer of 97 tokens: bytes would not fit, so these tests use the one of the trained model and
/// logits made by hand where text matters.
fn pocket_engine() -> (Engine, Tokenizer) {
    let model = common::pocket();
    let tokenizer = Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap();
    (engine("cpu", &model, Options { chunk: 256, context: 96 }), tokenizer)
}

fn write(prompt: &str, options: &GenerationOptions) -> (String, usize, Finish) {
    let (mut engine, tokenizer) = pocket_engine();
    let mut session = engine.open();
    let prompt = tokenizer.encode_raw_with_specials(prompt);
    let logits = read(&mut engine, &mut session, &prompt);
    let mut generation = Generation::new(&tokenizer, logits, options).unwrap();
    let (mut text, mut count, mut finish) = (String::new(), 0, None);
    while let Some(token) = generation.next(&mut engine, &mut session, &tokenizer, &Cancel::new()).unwrap() {
        text += &token.text;
        count += 1;
        assert!(finish.is_none(), "nothing follows the end");
        finish = token.finish;
    }
    (text, count, finish.unwrap())
}

fn greedy(max_tokens: usize) -> GenerationOptions {
    GenerationOptions { sampling: Sampling::greedy(), max_tokens, ..GenerationOptions::default() }
}

#[test]
fn answers_end_for_each_of_the_reasons() {
    let chat = "<|im_start|>user\nWrite a Python function `is_sorted`: Return True if the list is sorted.<|im_end|>\n<|im_start|>assistant\n";
    let (text, _, finish) = write(chat, &greedy(64));
    assert_eq!(finish, Finish::Stop);
    assert!(text.contains("def is_sorted") && !text.contains("<|im_end|>"), "{text:?}");

    let (short, count, finish) = write(chat, &greedy(5));
    assert_eq!((count, finish), (5, Finish::Length));
    assert!(text.starts_with(&short), "{short:?} {text:?}");

    let stop = GenerationOptions { stop: vec!["nowhere".into(), "is_sorted(".into()], ..greedy(64) };
    let (cut, _, finish) = write(chat, &stop);
    assert_eq!(finish, Finish::StopText(1));
    assert_eq!(cut, text.split("is_sorted(").next().unwrap());

    let endless = GenerationOptions { ignore_eos: true, ..greedy(1000) };
    let (_, count, finish) = write("import numpy", &endless);
    assert_eq!(finish, Finish::Context);
    assert!((90..=96).contains(&count), "a context of 96 holds the prompt and {count} more");
}

#[test]
fn a_seed_makes_sampling_repeatable() {
    let sample = |seed| {
        let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed, ..Sampling::default() };
        write("import ", &GenerationOptions { sampling, max_tokens: 24, ..GenerationOptions::default() }).0
    };
    assert_eq!(sample(1), sample(1));
    assert_ne!(sample(1), sample(2));
}
