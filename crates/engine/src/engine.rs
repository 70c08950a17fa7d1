//! The engine: a backend, its experts, and the sessions on them.

use std::sync::Arc;

use model::{Backend, ExpertSource, Model, Pass, SequenceId};

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::ingestion::{Ingested, Ingestion, Request};

/// What an engine may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Most tokens ingested together.
    pub chunk: usize,
    /// Most tokens of a session.
    pub context: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { chunk: 2048, context: 4096 }
    }
}

/// A conversation: its tokens, and the state behind them in the backend.
///
/// Handed back to [`Engine::close`] when it ends; dropping it keeps the state alive for as long as the
/// engine lives.
#[derive(Debug)]
pub struct Session {
    pub(crate) sequence: SequenceId,
    pub(crate) tokens: Vec<u32>,
}

impl Session {
    /// Every token read or generated, except a generated one that was never read back.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// A model on a backend, ready to read and write.
pub struct Engine {
    pub(crate) model: Arc<Model>,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) experts: Box<dyn ExpertSource + Send>,
    pub(crate) options: Options,
}

impl Engine {
    /// An engine for `model`, computed by `backend` with experts from `experts`.
    pub fn new(
        model: Arc<Model>,
        backend: Box<dyn Backend>,
        experts: Box<dyn ExpertSource + Send>,
        options: Options,
    ) -> Engine {
        Engine { model, backend, experts, options }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The backend, for what the engine has no words for.
    pub fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// A new, empty session.
    pub fn open(&mut self) -> Session {
        Session { sequence: self.backend.create(), tokens: Vec::new() }
    }

    /// A session that continues from where `session` is, sharing its state.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn fork(&mut self, session: &Session) -> Result<Session> {
        let sequence = self.backend.fork(session.sequence)?;
        Ok(Session { sequence, tokens: session.tokens.clone() })
    }

    /// Ends a session and frees its state.
    pub fn close(&mut self, session: Session) {
        self.backend.free(session.sequence);
    }

    /// Reads `tokens` into `session`, chunk by chunk, and returns the logits of the last one if the
    /// request asked for them.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::ContextOverflow`]; [`Error::Cancelled`], after which the session
    /// holds the chunks that were complete; those of the backend.
    pub fn ingest(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        request: &mut Request,
    ) -> Result<Ingested> {
        let mut ingestion = Ingestion::new(self, session, tokens, request)?;
        while !ingestion.advance(self, session, request)? {}
        Ok(ingestion.into_result())
    }

    /// Appends one token to `session` and returns the logits behind it.
    ///
    /// # Errors
    /// As [`Engine::ingest`].
    pub fn step(&mut self, session: &mut Session, token: u32, cancel: &Cancel) -> Result<Vec<f32>> {
        let mut request = Request { cancel: cancel.clone(), ..Request::default() };
        Ok(self.ingest(session, &[token], &mut request)?.logits)
    }

    /// Checks that `more` tokens fit behind those of `session`.
    pub(crate) fn check_room(&self, session: &Session, more: usize) -> Result<()> {
        let (needed, context) = (session.len() + more, self.options.context);
        if needed > context { Err(Error::ContextOverflow { needed, context }) } else { Ok(()) }
    }

    /// Rows of a pass for which logits of every row are wanted: their memory is bounded.
    pub(crate) fn chunk_for(&self, all_logits: bool) -> usize {
        const LOGIT_BYTES: usize = 256 << 20;
        let most = LOGIT_BYTES / (4 * self.model.spec.vocab.max(1));
        if all_logits { self.options.chunk.min(most) } else { self.options.chunk }
    }

    /// A pass that appends `tokens` to `session`.
    pub(crate) fn pass(session: &Session, tokens: &[u32]) -> Pass {
        let mut pass = Pass::new();
        pass.push(session.sequence, session.len(), tokens);
        pass
    }
}
