//! Answers of a lone session under a constraint.

mod common;

use std::sync::{Arc, Mutex};

use common::{engine, pocket, repository};
use engine::{
    Cancel, Constraint, Engine, Error, Finish, Generation, GenerationOptions, Options, Request, Sampling,
    Session, TokenMask,
};
use text::Tokenizer;

/// Allows one set of tokens after the other, then only the end; remembers what was chosen.
#[derive(Debug, Clone)]
struct Script {
    sets: Vec<Vec<u32>>,
    at: usize,
    chosen: Arc<Mutex<Vec<u32>>>,
}

impl Script {
    fn new(sets: Vec<Vec<u32>>) -> Script {
        Script { sets, at: 0, chosen: Arc::default() }
    }
}

impl Constraint for Script {
    fn mask(&mut self) -> Result<TokenMask, String> {
        let set = self.sets.get(self.at).ok_or("it is over")?;
        Ok(TokenMask::of(set.iter().copied()))
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        assert!(self.sets[self.at].contains(&token), "{token} was not allowed");
        self.at += 1;
        self.chosen.lock().unwrap().push(token);
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn tokenizer() -> Tokenizer {
    let model = model::Model::open(&repository("models/pocket.gguf")).unwrap();
    Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap()
}

fn read(engine: &mut Engine, tokens: &[u32]) -> (Session, Vec<f32>) {
    let mut session = engine.open();
    let logits = engine.ingest(&mut session, tokens, &mut Request::default()).unwrap().logits;
    (session, logits)
}

fn best_of(logits: &[f32], set: &[u32]) -> u32 {
    *set.iter().max_by(|&&a, &&b| logits[a as usize].total_cmp(&logits[b as usize])).unwrap()
}

#[test]
fn each_token_is_the_most_likely_one_that_is_allowed() {
    let tokenizer = tokenizer();
    let end = tokenizer.stop_tokens()[0];
    let mut engine = engine("reference", &pocket(), Options { chunk: 256, context: 256 });
    let prompt = tokenizer.encode_text("def is_sorted(values):\n");
    // Sets at the edges of a mask's words, of one token, of many; then nothing but the end.
    let sets = vec![vec![31, 32, 63, 64], vec![1000], (100..4000).step_by(7).collect(), vec![end]];
    let script = Script::new(sets.clone());
    let options = GenerationOptions {
        constraint: Some(script.fork()),
        // The end that a constraint demands is one all the same.
        ignore_eos: true,
        logprobs: Some(1),
        sampling: Sampling::greedy(),
        ..GenerationOptions::default()
    };
    let (mut session, mut logits) = read(&mut engine, &prompt);
    let mut generation = Generation::new(&tokenizer, logits.clone(), &options).unwrap();
    let mut tokens = Vec::new();
    while let Some(token) = generation.next(&mut engine, &mut session, &tokenizer, &Cancel::new()).unwrap() {
        assert_eq!(token.id, best_of(&logits, &sets[tokens.len()]), "token {}", tokens.len());
        // Probabilities are the model's own, whatever is allowed.
        let free = (0..logits.len() as u32).collect::<Vec<_>>();
        assert_eq!(token.logprobs.unwrap().top[0].0, best_of(&logits, &free), "token {}", tokens.len());
        tokens.push(token.id);
        if token.finish.is_none() {
            let (fresh, next) = read(&mut engine, &[&prompt[..], &tokens[..]].concat());
            engine.close(fresh);
            logits = next;
        } else {
            assert_eq!(token.finish, Some(Finish::Stop));
        }
    }
    assert_eq!(tokens.len(), sets.len());
    assert_eq!(*script.chosen.lock().unwrap(), tokens);
    // The options have not moved: another answer begins where the first one did.
    let (mut session, logits) = read(&mut engine, &prompt);
    let mut again = Generation::new(&tokenizer, logits, &options).unwrap();
    let first = again.next(&mut engine, &mut session, &tokenizer, &Cancel::new()).unwrap().unwrap();
    assert_eq!(first.id, tokens[0]);
}

#[test]
fn what_a_constraint_cannot_say_is_an_error() {
    let tokenizer = tokenizer();
    let mut engine = engine("reference", &pocket(), Options { chunk: 256, context: 256 });
    let (mut session, logits) = read(&mut engine, &tokenizer.encode_text("def"));
    for (sets, words) in [(vec![], "it is over"), (vec![vec![]], "no token")] {
        let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Script::new(sets)));
        let options = GenerationOptions { constraint, ..GenerationOptions::default() };
        let mut generation = Generation::new(&tokenizer, logits.clone(), &options).unwrap();
        let error = generation.next(&mut engine, &mut session, &tokenizer, &Cancel::new()).unwrap_err();
        assert!(matches!(&error, Error::Constraint { reason } if reason.contains(words)), "{error}");
    }
}
