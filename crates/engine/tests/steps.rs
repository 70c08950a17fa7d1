//! Tokens appended one at a time, to several sessions at once, and what is handed out of the logits behind them.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::backend;
use engine::{
    Cancel, Engine, Error, LogitRows, Logits, Needed, Options, Request, Sampler, Sampling, Session, Step,
};
use model::state::PAGE;
use model::{MappedExperts, Model};
use testkit::{Random, TinyModel, TinyOptions};

/// A backend that picks the largest logits out itself, and one that leaves it to the engine.
const BACKENDS: [&str; 2] = ["reference", "cpu"];

const VOCAB: u32 = TinyOptions::VOCAB as u32;

fn engine(name: &str, model: &Arc<Model>) -> Engine {
    let options = Options { chunk: 64, context: 100 };
    Engine::new(model.clone(), backend(name, model, 32 * PAGE), Box::new(MappedExperts::new(model)), options)
}

/// A session that has read a prompt of `len` tokens.
fn open(engine: &mut Engine, len: usize) -> Session {
    let tokens = Random::new(len as u64, "prompt").tokens(len, 7);
    let mut session = engine.open();
    let mut request = Request { logits: LogitRows::None, ..Request::default() };
    engine.ingest(&mut session, &tokens, &mut request).unwrap();
    session
}

/// Appends a token to each session.
fn step(
    engine: &mut Engine,
    sessions: &mut [Session],
    tokens: &[u32],
    needed: &[Needed],
) -> Result<Vec<Logits>, Error> {
    let mut logits = vec![Logits::default(); sessions.len()];
    let all = sessions.iter_mut().zip(tokens).zip(needed).zip(&mut logits);
    let mut steps: Vec<Step> =
        all.map(|(((session, &token), &needed), logits)| Step { session, token, needed, logits }).collect();
    engine.step_all(&mut steps)?;
    Ok(logits)
}

/// The bits of logits, those of candidates at their places.
fn bits(logits: &Logits) -> Vec<(u32, u32)> {
    let mut bits: Vec<(u32, u32)> = match logits {
        Logits::All(logits) => (0..).zip(logits).map(|(id, logit)| (id, logit.to_bits())).collect(),
        Logits::Largest(found) => found.iter().map(|c| (c.id, c.logit.to_bits())).collect(),
    };
    bits.sort_unstable();
    bits
}

#[test]
fn together_sessions_get_what_each_would_get_alone() {
    let tiny = TinyModel::new(TinyOptions::default());
    for name in BACKENDS {
        let mut engine = engine(name, &tiny.model);
        let lengths = [3, 64, 70];
        let all = [Needed::All; 3];
        let some = [Needed::Largest(1), Needed::Largest(64), Needed::Largest(20)];
        let mixed = [Needed::All, Needed::Largest(5), Needed::All];
        let [mut alone, mut with_all, mut with_some, mut with_mixed] =
            [(); 4].map(|()| lengths.map(|len| open(&mut engine, len)));
        for tokens in [[8, 9, 10], [11, 8, 96], [1, 1, 1]] {
            let expected: Vec<Vec<f32>> = (alone.iter_mut().zip(tokens))
                .map(|(session, token)| engine.step(session, token, &Cancel::new()).unwrap())
                .collect();
            let expected: Vec<_> = expected.into_iter().map(|logits| bits(&Logits::All(logits))).collect();
            for (sessions, needed) in [(&mut with_all, all), (&mut with_some, some), (&mut with_mixed, mixed)]
            {
                let found = step(&mut engine, sessions, &tokens, &needed).unwrap();
                for ((found, needed), expected) in found.iter().zip(needed).zip(&expected) {
                    let found = bits(found);
                    match needed {
                        Needed::All => assert_eq!(found, *expected, "{name}"),
                        Needed::Largest(count) => {
                            assert!(found.len() >= count && found.iter().all(|one| expected.contains(one)));
                        }
                    }
                }
            }
        }
        for (session, other) in alone.iter().zip(&with_some) {
            assert_eq!(session.tokens(), other.tokens());
        }
    }
}

/// Choices step by step, with what the sampler needs and with everything.
#[test]
fn what_a_sampler_needs_makes_the_choices_of_all_logits() {
    let tiny = TinyModel::new(TinyOptions::default());
    let plain = Sampling { temperature: 1.5, top_p: 1.0, ..Sampling::default() };
    for name in BACKENDS {
        let mut engine = engine(name, &tiny.model);
        let mut first = open(&mut engine, 5);
        let start = engine.step(&mut first, 3, &Cancel::new()).unwrap();
        for settings in [
            Sampling::greedy(),
            plain,
            Sampling { repeat_penalty: 1.5, ..plain },
            Sampling { top_k: 70, ..plain },
        ] {
            let mut write = |all: bool| {
                let mut session = [engine.fork(&first).unwrap()];
                let mut sampler = Sampler::new(settings).unwrap();
                let mut logits = Logits::All(start.clone());
                let mut chosen = Vec::new();
                for _ in 0..40 {
                    let id = sampler.choose_from(&logits);
                    chosen.push(id);
                    let needed = if all { Needed::All } else { sampler.needed() };
                    logits = step(&mut engine, &mut session, &[id], &[needed]).unwrap().remove(0);
                    assert_eq!(matches!(logits, Logits::All(_)), needed == Needed::All);
                }
                chosen
            };
            assert_eq!(write(false), write(true), "{name}, {settings:?}");
        }
    }
}

/// A tiny model with a weight that is not finite in a row of a matrix of one row a token id.
struct Damaged {
    model: Arc<Model>,
    path: PathBuf,
}

impl Damaged {
    fn new(tensor: &str, row: u32, weight: f32) -> Damaged {
        let options = TinyOptions::default();
        let tiny = TinyModel::new(options);
        let mut bytes = std::fs::read(tiny.path()).unwrap();
        let part = tiny.model.gguf.bytes(tiny.model.gguf.tensor(tensor).unwrap());
        let at = bytes.windows(part.len()).position(|window| window == part).unwrap();
        let at = at + 4 * options.hidden * row as usize;
        bytes[at..at + 4].copy_from_slice(&weight.to_le_bytes());
        let path = tiny.path().with_extension(format!("{row}-{weight}.gguf"));
        std::fs::write(&path, bytes).unwrap();
        Damaged { model: Arc::new(Model::open(&path).unwrap()), path }
    }
}

impl Drop for Damaged {
    fn drop(&mut self) {
        // A file left behind in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_logit_that_is_not_finite_is_found_wherever_it_is_and_whatever_is_needed() {
    for (row, weight) in [(0, f32::NAN), (50, f32::INFINITY), (VOCAB - 1, f32::NEG_INFINITY)] {
        let damaged = Damaged::new("output.weight", row, weight);
        for name in BACKENDS {
            let mut engine = engine(name, &damaged.model);
            let mut session = [open(&mut engine, 7)];
            for needed in [Needed::All, Needed::Largest(1), Needed::Largest(64)] {
                let result = step(&mut engine, &mut session, &[1], &[needed]);
                let found = matches!(result, Err(Error::NonFinite { position: 7 }));
                assert!(found, "{name}: {weight} for {row}, {needed:?}: {result:?}");
                assert_eq!(session[0].len(), 7);
            }
        }
    }
}

#[test]
fn damage_names_its_position_and_changes_no_session() {
    let damaged = Damaged::new("token_embd.weight", 90, f32::NAN);
    for name in BACKENDS {
        let mut engine = engine(name, &damaged.model);
        for needed in [Needed::All, Needed::Largest(20)] {
            let mut sessions = [3, 11, 20].map(|len| open(&mut engine, len));
            let result = step(&mut engine, &mut sessions, &[1, 90, 2], &[needed; 3]);
            assert!(matches!(result, Err(Error::NonFinite { position: 11 })), "{name}: {result:?}");
            assert_eq!(sessions.each_ref().map(Session::len), [3, 11, 20]);
            let after = step(&mut engine, &mut sessions, &[1, 5, 2], &[needed; 3]).unwrap();
            let mut fresh = [3, 11, 20].map(|len| open(&mut engine, len));
            let expected = step(&mut engine, &mut fresh, &[1, 5, 2], &[needed; 3]).unwrap();
            for (after, expected) in after.iter().zip(&expected) {
                assert_eq!(bits(after), bits(expected), "{name}");
            }
        }
    }
}

#[test]
fn a_full_context_takes_no_step() {
    let tiny = TinyModel::new(TinyOptions::default());
    let mut engine = engine("cpu", &tiny.model);
    let mut sessions = [open(&mut engine, 5), open(&mut engine, 100)];
    let result = step(&mut engine, &mut sessions, &[1, 1], &[Needed::Largest(1); 2]);
    assert!(matches!(result, Err(Error::ContextOverflow { needed: 101, context: 100 })));
    assert_eq!(sessions.each_ref().map(Session::len), [5, 100]);
}
