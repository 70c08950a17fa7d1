//! From logits to text, one token at a time.

use text::{Decoder, StopMatcher, Tokenizer};

use crate::cancel::Cancel;
use crate::engine::{Engine, Session};
use crate::error::{Error, Result};
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
    /// Goes on past the model's own end of the answer.
    pub ignore_eos: bool,
}

impl Default for GenerationOptions {
    fn default() -> GenerationOptions {
        GenerationOptions {
            sampling: Sampling::default(),
            max_tokens: 512,
            stop: Vec::new(),
            ignore_eos: false,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The token chosen.
    pub id: u32,
    /// Text that is now certain: complete characters that are no part of a stop text.
    pub text: String,
    /// Set with the last token.
    pub finish: Option<Finish>,
}

/// An answer being written.
pub struct Generation {
    sampler: Sampler,
    decoder: Decoder,
    stop: StopMatcher,
    stop_tokens: Vec<u32>,
    logits: Vec<f32>,
    left: usize,
    finish: Option<Finish>,
}

impl Generation {
    /// Starts an answer at `logits`, those of the last prompt token.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn new(tokenizer: &Tokenizer, logits: Vec<f32>, options: &GenerationOptions) -> Result<Generation> {
        let stop_tokens = if options.ignore_eos { Vec::new() } else { tokenizer.stop_tokens() };
        Ok(Generation {
            sampler: Sampler::new(options.sampling)?,
            decoder: Decoder::new(),
            stop: StopMatcher::new(&options.stop),
            stop_tokens,
            logits,
            left: options.max_tokens,
            finish: (options.max_tokens == 0).then_some(Finish::Length),
        })
    }

    /// Chooses the next token, and reads it into `session` unless the answer ends with it: then the
    /// session still lacks it, and a following turn's template brings its own end marker.
    /// `None` when the answer has ended.
    ///
    /// # Errors
    /// [`Error::Cancelled`] before a token is chosen; those of [`Engine::step`].
    pub fn next(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        tokenizer: &Tokenizer,
        cancel: &Cancel,
    ) -> Result<Option<Token>> {
        if self.finish.is_some() {
            return Ok(None);
        }
        if cancel.is_cancelled() {
            return Err(Error::Cancelled { read: 0, total: 1 });
        }
        let id = self.sampler.choose(&self.logits);
        self.left -= 1;
        if self.stop_tokens.contains(&id) {
            return Ok(Some(self.end(id, String::new(), Finish::Stop)));
        }
        let text = self.stop.push(&self.decoder.push(tokenizer, id));
        let ended = match self.stop.matched() {
            Some(index) => Some(Finish::StopText(index)),
            None if self.left == 0 => Some(Finish::Length),
            None if engine.check_room(session, 1).is_err() => Some(Finish::Context),
            None => None,
        };
        if let Some(finish) = ended {
            return Ok(Some(self.end(id, text, finish)));
        }
        // The token has been chosen and shown: reading it is one step, not worth interrupting.
        self.logits = engine.step(session, id, &Cancel::new())?;
        Ok(Some(Token { id, text, finish: None }))
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
        Token { id, text, finish: Some(finish) }
    }
}
