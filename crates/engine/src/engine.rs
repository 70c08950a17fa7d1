//! The engine: a backend, its experts, and the sessions on them.

use std::ops::Range;
use std::sync::Arc;

use model::state::PAGE;
use model::{Backend, Driver, ExpertSource, MatrixView, Model, Pass, PassId, SequenceId, Snapshot};

use crate::cancel::Cancel;
use crate::chunks::{Flow, chunks};
use crate::error::{Error, Result};
use crate::ingestion::{Ingested, Ingestion, Request};
use crate::logits::{Logits, Needed};

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
    /// Names of its KV pages: sessions that share a page have it under one name, and no two pages have the same.
    pub(crate) pages: Vec<u64>,
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

/// A token to be appended to a session, and what is wanted of the logits behind it.
#[derive(Debug)]
pub struct Step<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// The token.
    pub token: u32,
    /// What of the logits is wanted.
    pub needed: Needed,
    /// Where they go. What is there is overwritten.
    pub logits: &'a mut Logits,
}

/// A model on a backend, ready to read and write.
pub struct Engine {
    pub(crate) model: Arc<Model>,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) experts: Box<dyn ExpertSource + Send>,
    pub(crate) options: Options,
    /// How chunks flow through several devices, if they do.
    flow: Option<Flow>,
    /// Names given to KV pages so far.
    pages: u64,
    /// Prompts being read that need memory for large passes.
    large: usize,
    /// Whether experts have lent theirs.
    lent: bool,
}

impl Engine {
    /// An engine for `model`, computed by `backend` with experts from `experts`.
    pub fn new(
        model: Arc<Model>,
        backend: Box<dyn Backend>,
        experts: Box<dyn ExpertSource + Send>,
        options: Options,
    ) -> Engine {
        Engine { model, backend, experts, options, flow: None, pages: 0, large: 0, lent: false }
    }

    /// The same engine, whose chunks are cut so that they flow well through several devices.
    #[must_use]
    pub fn flowing(self, flow: Option<Flow>) -> Engine {
        Engine { flow, ..self }
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
        Session { sequence: self.backend.create(), tokens: Vec::new(), pages: Vec::new() }
    }

    /// A session that continues from where `session` is, sharing its state.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn fork(&mut self, session: &Session) -> Result<Session> {
        let sequence = self.backend.fork(session.sequence)?;
        Ok(Session { sequence, tokens: session.tokens.clone(), pages: session.pages.clone() })
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

    /// Appends one token to each of several sessions in one pass, and fills in the logits behind each.
    ///
    /// # Errors
    /// [`Error::ContextOverflow`], [`Error::NonFinite`], those of the backend. No session has changed then; logits may have.
    pub fn step_all(&mut self, steps: &mut [Step]) -> Result<()> {
        let mut pass = Pass::new();
        for step in steps.iter() {
            self.check_room(step.session, 1)?;
            let rows = pass.push(step.session.sequence, step.session.len(), &[step.token]);
            pass.logits.extend(rows);
        }
        self.begin_small()?;
        let pass = Driver::run(&mut *self.backend, &mut *self.experts, &self.model.spec, &pass)?;
        if let Err(error) = self.take_logits(pass, steps) {
            self.backend.abort(pass);
            return Err(error);
        }
        self.backend.commit(pass)?;
        steps.iter_mut().for_each(|step| self.extend(step.session, &[step.token]));
        Ok(())
    }

    /// Waits for a pass of one row a step, and hands out what each needs of its logits.
    fn take_logits(&mut self, pass: PassId, steps: &mut [Step]) -> Result<()> {
        let count = |step: &Step| match step.needed {
            Needed::Largest(count) => count,
            Needed::All => 0,
        };
        let counts: Vec<usize> = steps.iter().map(count).collect();
        let picked = self.backend.largest(pass, &counts)?;
        let whole_rows = picked.iter().any(Option::is_none);
        let rows = if whole_rows { self.backend.logits(pass)? } else { MatrixView::default() };
        for (index, (step, candidates)) in steps.iter_mut().zip(picked).enumerate() {
            let finite = match candidates {
                Some(candidates) => step.logits.take_candidates(candidates),
                None => step.logits.take(rows.row(index), step.needed),
            };
            if !finite {
                return Err(Error::NonFinite { position: step.session.len() });
            }
        }
        Ok(())
    }

    /// A session in a state that was copied to the host before, that of `tokens`.
    pub(crate) fn adopt(&mut self, snapshot: &Snapshot, tokens: &[u32]) -> Result<Session> {
        let sequence = self.backend.restore(snapshot)?;
        let mut session = Session { sequence, tokens: Vec::new(), pages: Vec::new() };
        self.extend(&mut session, tokens);
        Ok(session)
    }

    /// Rows up to which a pass leaves experts all of their memory.
    pub(crate) fn small_rows(&self) -> usize {
        self.experts.small_rows()
    }

    /// A prompt with passes of more rows begins: experts lend memory, until all such prompts have ended.
    ///
    /// # Errors
    /// Those of the source of experts.
    pub(crate) fn begin_large(&mut self) -> Result<()> {
        if !self.lent {
            self.experts.lend(true)?;
            self.lent = true;
        }
        self.large += 1;
        Ok(())
    }

    /// Such a prompt has ended. The memory stays where it is until somebody else needs it.
    pub(crate) fn end_large(&mut self) {
        self.large -= 1;
    }

    /// A pass of few rows begins: unless a large one is under way, experts take their memory back.
    ///
    /// # Errors
    /// Those of the source of experts.
    pub(crate) fn begin_small(&mut self) -> Result<()> {
        if self.lent && self.large == 0 {
            self.backend.shrink(self.experts.small_rows());
            self.experts.lend(false)?;
            self.lent = false;
        }
        Ok(())
    }

    /// Notes that the backend has appended `tokens` to `session`.
    pub(crate) fn extend(&mut self, session: &mut Session, tokens: &[u32]) {
        // A page that was partly filled may have been copied: it counts as a new one.
        session.pages.truncate(session.len() / PAGE);
        session.tokens.extend_from_slice(tokens);
        while session.pages.len() < session.len().div_ceil(PAGE) {
            session.pages.push(self.pages);
            self.pages += 1;
        }
    }

    /// Checks that `more` tokens fit behind those of `session`.
    pub(crate) fn check_room(&self, session: &Session, more: usize) -> Result<()> {
        let (needed, context) = (session.len() + more, self.options.context);
        if needed > context { Err(Error::ContextOverflow { needed, context }) } else { Ok(()) }
    }

    /// The passes that read `len` tokens behind `start` others. If logits of every row are wanted, they have fewer rows: memory
    /// of logits is bounded.
    pub(crate) fn chunks(&self, start: usize, len: usize, all_logits: bool) -> Vec<Range<usize>> {
        const LOGIT_BYTES: usize = 256 << 20;
        let most = LOGIT_BYTES / (4 * self.model.spec.vocab.max(1));
        let chunk = if all_logits { self.options.chunk.min(most) } else { self.options.chunk };
        let smallest = self.backend.capabilities().smallest_chunk;
        match &self.flow {
            Some(flow) => flow.chunks(start, len, chunk, smallest),
            None => chunks(start, len, chunk, smallest),
        }
    }

    /// A pass that appends `tokens` to `session`.
    pub(crate) fn pass(session: &Session, tokens: &[u32]) -> Pass {
        let mut pass = Pass::new();
        pass.push(session.sequence, session.len(), tokens);
        pass
    }
}
