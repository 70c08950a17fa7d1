//! Grammars: what an answer has to look like, as masks over the model's tokens.
//!
//! Compiling one takes milliseconds, or seconds where a client is hostile: one thread of its own does it, with fuel,
//! and nobody waits for it longer than [`PATIENCE`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};
use std::{sync::Arc, thread};

use engine::{Constraint, TokenMask};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use text::{TokenKind, Tokenizer};

/// Most bytes of a grammar: several times the tools of the largest agent.
const BYTES: usize = 1 << 20;
/// Most references in it: they are followed by recursion.
const REFERENCES: usize = 2048;
/// Stack of the thread that follows them.
const STACK: usize = 256 << 20;
/// Longest wait for a grammar.
const PATIENCE: Duration = Duration::from_secs(10);
/// Work on the lexer before the first token, about 50,000 a millisecond.
const LEXER_FUEL: u64 = 4_000_000;

/// A grammar to compile, and who waits for it.
struct Task {
    grammar: String,
    deadline: Instant,
    reply: SyncSender<Result<Grammar, String>>,
}

/// Compiles grammars for a model.
#[derive(Clone, Debug)]
pub struct Grammars {
    tasks: Sender<Task>,
}

impl Grammars {
    /// Prepares the vocabulary, which takes a moment.
    ///
    /// # Errors
    /// What is missing.
    pub fn new(tokenizer: &Tokenizer) -> Result<Grammars, String> {
        let factory = factory(tokenizer)?;
        let (tasks, inbox) = channel();
        let builder = thread::Builder::new().name("grammars".to_owned()).stack_size(STACK);
        builder.spawn(move || work(&factory, &inbox)).map_err(|error| error.to_string())?;
        Ok(Grammars { tasks })
    }

    /// Compiles a grammar in llguidance's dialect of Lark. Blocks.
    ///
    /// # Errors
    /// Why it cannot be followed.
    pub fn compile(&self, grammar: String) -> Result<Box<dyn Constraint>, String> {
        if grammar.len() > BYTES {
            return Err(format!("it is too large: {} bytes of grammar, at most {BYTES}", grammar.len()));
        }
        let references = grammar.matches("\"$ref\"").count();
        if references > REFERENCES {
            return Err(format!("it has {references} references; at most {REFERENCES} are followed"));
        }
        let (reply, answer) = sync_channel(1);
        let task = Task { grammar, deadline: Instant::now() + PATIENCE, reply };
        let stopped = || "the thread that compiles grammars has stopped".to_owned();
        self.tasks.send(task).map_err(|_| stopped())?;
        match answer.recv_timeout(PATIENCE) {
            Ok(compiled) => compiled.map(|grammar| Box::new(grammar) as Box<dyn Constraint>),
            Err(RecvTimeoutError::Timeout) => Err("it takes too long to compile".to_owned()),
            Err(RecvTimeoutError::Disconnected) => Err(stopped()),
        }
    }
}

fn work(factory: &ParserFactory, inbox: &Receiver<Task>) {
    for task in inbox {
        if Instant::now() < task.deadline {
            let compiled = catch_unwind(AssertUnwindSafe(|| compile(factory, task.grammar)));
            // Whoever asked may have gone.
            let _ = task.reply.send(compiled.unwrap_or_else(|_| Err("it cannot be understood".to_owned())));
        }
    }
}

/// The vocabulary in the order in which grammars look through it. Control tokens are no text; the others are, also those
/// that a model has for tags.
fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let ends = tokenizer.stop_tokens();
    let first = *ends.first().ok_or("the model has no token that ends an answer")?;
    let word = |id: u32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match tokenizer.kind(id) {
            Some(TokenKind::Normal | TokenKind::Byte | TokenKind::UserDefined) => bytes.to_vec(),
            _ => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        }
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.len() as u32).map(word).collect();
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(&ends);
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.initial_lexer_fuel = LEXER_FUEL;
    // Errors are told to clients: they must not hold the answer.
    limits.verbose_errors = false;
    Ok(factory)
}

fn compile(factory: &ParserFactory, grammar: String) -> Result<Grammar, String> {
    let parser = factory.create_parser(TopLevelGrammar::from_lark(grammar));
    let parser = parser.map_err(|error| said(&error.to_string()))?;
    let mut grammar = Grammar(Matcher::new(Ok(parser)));
    // What can never begin is better known now.
    grammar.mask()?;
    Ok(grammar)
}

/// A message on one line of bounded length, without traces of the library's inside.
fn said(message: &str) -> String {
    let message = message.split("<backtrace>").next().unwrap_or_default();
    let line = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    line.chars().take(400).collect()
}

/// A place in a grammar.
struct Grammar(Matcher);

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("stopped", &self.0.is_stopped()).finish_non_exhaustive()
    }
}

impl Constraint for Grammar {
    fn mask(&mut self) -> Result<TokenMask, String> {
        let mask = self.0.compute_mask_or_eos().map_err(|error| said(&error.to_string()))?;
        if !self.0.stop_reason().is_ok() {
            return Err(format!("the grammar has become too complex ({})", self.0.stop_reason()));
        }
        Ok(TokenMask::from_words(mask.as_slice().to_vec()))
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        if self.0.is_stopped() && self.0.stop_reason().is_ok() {
            // The grammar has come to its end: the token is one of those that end the answer.
            return Ok(());
        }
        self.0.consume_token(token).map_err(|error| said(&error.to_string()))
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Grammar(self.0.deep_clone()))
    }
}
