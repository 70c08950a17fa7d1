//! From logits to text, one token at a time.

use text::{Decoder, StopMatcher, Tokenizer};

use crate::cancel::Cancel;
use crate::constraint::Constraint;
use crate::engine::{Engine, Session, Step};
use crate::error::{Error, Result};
use crate::logits::{Logits, Needed};
use crate::sampler::{Sampler, Sampling};

/// What an answer may be.
#[derive(Clone, Debug)]
pub struct GenerationOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Goes on past the model's own end of the answer; not where a constraint ends it.
    pub ignore_eos: bool,
    /// Wants the probability of each token, and those of this many of the most likely ones.
    pub logprobs: Option<usize>,
    /// What the answer has to look like, token by token.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Default for GenerationOptions {
    fn default() -> GenerationOptions {
        GenerationOptions {
            sampling: Sampling::default(),
            max_tokens: 512,
            stop: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            constraint: None,
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Stop,
    /// A stop text came; its index among [`GenerationOptions::stop`].
    StopText(usize),
    /// It has as many tokens as were allowed.
    Length,
    /// The context is full.
    Context,
}

/// One step of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token chosen.
    pub id: u32,
    /// Text that is now certain: complete characters that are no part of a stop text.
    pub text: String,
    /// Probabilities at this place, if they were asked for.
    pub logprobs: Option<Logprobs>,
    /// Set with the last token.
    pub finish: Option<Finish>,
}

/// Natural logarithms of the model's probabilities at one place, before constraint, penalties, filters and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token chosen.
    pub chosen: f32,
    /// The most likely tokens, by falling probability.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Those of `logits`, with the `count` most likely tokens.
    pub fn new(logits: &[f32], chosen: u32, count: usize) -> Logprobs {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
        let log = |id: u32| (f64::from(logits[id as usize] - most) - sum.ln()) as f32;
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let count = count.min(ids.len());
        if count < ids.len() {
            ids.select_nth_unstable_by(count, order);
            ids.truncate(count);
        }
        ids.sort_unstable_by(order);
        Logprobs { chosen: log(chosen), top: ids.into_iter().map(|id| (id, log(id))).collect() }
    }
}

/// An answer being written.
pub struct Generation {
    sampler: Sampler,
    decoder: Decoder,
    stop: StopMatcher,
    stop_tokens: Vec<u32>,
    logits: Logits,
    left: usize,
    logprobs: Option<usize>,
    constraint: Option<Box<dyn Constraint>>,
    finish: Option<Finish>,
}

impl Generation {
    /// Starts an answer at `logits`, those of the last prompt token.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn new(tokenizer: &Tokenizer, logits: Vec<f32>, options: &GenerationOptions) -> Result<Generation> {
        let endless = options.ignore_eos && options.constraint.is_none();
        let stop_tokens = if endless { Vec::new() } else { tokenizer.stop_tokens() };
        Ok(Generation {
            sampler: Sampler::new(options.sampling)?,
            decoder: Decoder::new(),
            stop: StopMatcher::new(&options.stop),
            stop_tokens,
            logits: Logits::All(logits),
            left: options.max_tokens,
            logprobs: options.logprobs,
            constraint: options.constraint.clone(),
            finish: (options.max_tokens == 0).then_some(Finish::Length),
        })
    }

    /// Chooses the next token, and reads it into `session` unless the answer ends with it: then the
    /// session still lacks it, and a following turn's template brings its own end marker.
    /// `None` when the answer has ended.
    ///
    /// # Errors
    /// [`Error::Cancelled`] before a token is chosen; those of [`Generation::choose`] and [`Engine::step_all`].
    pub fn next(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        tokenizer: &Tokenizer,
        cancel: &Cancel,
    ) -> Result<Option<Token>> {
        if cancel.is_cancelled() && self.finish.is_none() {
            return Err(Error::Cancelled { read: 0, total: 1 });
        }
        let has_room = engine.check_room(session, 1).is_ok();
        let Some(token) = self.choose(tokenizer, has_room)? else { return Ok(None) };
        if token.finish.is_none() {
            // The token has been chosen and shown: reading it is one step, not worth interrupting.
            engine.step_all(&mut [self.step(session, token.id)])?;
        }
        Ok(Some(token))
    }

    /// Chooses the next token; `None` when the answer has ended. Unless it ends with this one, somebody has to read
    /// it ([`Generation::step`]); `has_room` says whether the context has room for it.
    ///
    /// # Errors
    /// [`Error::Constraint`].
    pub fn choose(&mut self, tokenizer: &Tokenizer, has_room: bool) -> Result<Option<Token>> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let id = self.choose_id()?;
        let logprobs = self.logprobs.map(|top| Logprobs::new(self.logits.all(), id, top));
        self.left -= 1;
        if self.stop_tokens.contains(&id) {
            return Ok(Some(Token { logprobs, ..self.end(id, String::new(), Finish::Stop) }));
        }
        let text = self.stop.push(&self.decoder.push(tokenizer, id));
        let ended = match self.stop.matched() {
            Some(index) => Some(Finish::StopText(index)),
            None if self.left == 0 => Some(Finish::Length),
            None if !has_room => Some(Finish::Context),
            None => None,
        };
        Ok(Some(match ended {
            Some(finish) => Token { logprobs, ..self.end(id, text, finish) },
            None => Token { id, text, logprobs, finish: None },
        }))
    }

    fn choose_id(&mut self) -> Result<u32> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(self.sampler.choose_from(&self.logits));
        };
        let fail = |reason| Error::Constraint { reason };
        let mask = constraint.mask().map_err(fail)?;
        let id = self.sampler.choose_among(self.logits.all(), &mask);
        let id = id.ok_or_else(|| fail("no token satisfies it".to_owned()))?;
        constraint.commit(id).map_err(fail)?;
        Ok(id)
    }

    /// The step that reads `token`, chosen last, into `session`, and after which the answer goes on.
    pub fn step<'a>(&'a mut self, session: &'a mut Session, token: u32) -> Step<'a> {
        let all = self.logprobs.is_some() || self.constraint.is_some();
        let needed = if all { Needed::All } else { self.sampler.needed() };
        Step { session, token, needed, logits: &mut self.logits }
    }

    /// Text held back when an answer is given up; nothing after [`Generation::next`] set a finish.
    pub fn rest(&mut self) -> String {
        let tail = self.decoder.finish();
        self.stop.push(&tail) + &self.stop.finish()
    }

    fn end(&mut self, id: u32, mut text: String, finish: Finish) -> Token {
        self.finish = Some(finish);
        if !matches!(finish, Finish::StopText(_)) {
            text += &self.rest();
        }
        Token { id, text, logprobs: None, finish: Some(finish) }
    }
}
