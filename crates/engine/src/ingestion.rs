//! Reading a prompt: chunk after chunk, each a state machine that can stop between two stages.

use std::collections::VecDeque;
use std::ops::Range;

use model::state::PAGE;
use model::{Driver, Observer, Quiet, SequenceId, SnapshotRequest};

use crate::cancel::Cancel;
use crate::engine::{Engine, Session};
use crate::error::{Error, Result};
use crate::logits::are_finite;

/// Rows of a prompt whose logits are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LogitRows {
    /// The last one: what generation needs.
    #[default]
    Last,
    /// None: the state is all that is wanted.
    None,
    /// These (indices into the tokens of the request), handed to [`Request::on_logits`]; the last one's are
    /// also returned if it is among them.
    Range(Range<usize>),
}

/// Hears the logits of a row: index into the tokens of the request, vocabulary numbers.
pub type OnLogits<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// Hears how far reading is, in tokens (a fraction of the current chunk counts): done, total.
pub type OnProgress<'a> = dyn FnMut(f64, usize) + 'a;

/// Takes a session as it was in the middle of a prompt. It is the listener's to close.
pub type OnCheckpoint<'a> = dyn FnMut(Session) + 'a;

/// What is wanted of an ingestion, and who listens.
#[derive(Default)]
pub struct Request<'a> {
    /// Whose logits.
    pub logits: LogitRows,
    /// Hears each wanted row.
    pub on_logits: Option<&'a mut OnLogits<'a>>,
    /// Hears the progress.
    pub on_progress: Option<&'a mut OnProgress<'a>>,
    /// Watches every stage.
    pub observer: Option<&'a mut dyn Observer>,
    /// Where checkpoints are wanted: after so many tokens of the request, ascending.
    pub checkpoints: Vec<usize>,
    /// Takes them as soon as their chunk is complete; without a listener none are made.
    pub on_checkpoint: Option<&'a mut OnCheckpoint<'a>>,
    /// Stops the work at its next step.
    pub cancel: Cancel,
}

/// What an ingestion brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ingested {
    /// Logits of the last token: vocabulary numbers; empty if they were not asked for.
    pub logits: Vec<f32>,
    /// Passes it took.
    pub chunks: usize,
}

/// A chunk in flight.
#[derive(Debug)]
struct Chunk {
    driver: Driver,
    /// Tokens of the request.
    tokens: Range<usize>,
    /// Checkpoints it makes: tokens of the request before each, and the state they become.
    checkpoints: Vec<(usize, SequenceId)>,
}

impl Chunk {
    fn abort(self, engine: &mut Engine) {
        engine.backend.abort(self.driver.pass());
        self.checkpoints.iter().for_each(|&(_, into)| engine.backend.free(into));
    }
}

/// A prompt being read. [`Ingestion::advance`] does one stage of one block, or one wave of experts, so
/// that whoever drives it can look after others in between.
#[derive(Debug)]
pub struct Ingestion {
    tokens: Vec<u32>,
    chunks: VecDeque<Range<usize>>,
    open: Option<Chunk>,
    read: usize,
    /// Whether it has passes that need the memory of large ones.
    large: bool,
    result: Ingested,
}

impl Ingestion {
    /// Prepares to read `tokens` into `session`; nothing is read yet.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::ContextOverflow`].
    pub fn new(engine: &Engine, session: &Session, tokens: &[u32], request: &Request) -> Result<Ingestion> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        engine.check_room(session, tokens.len())?;
        let many = matches!(request.logits, LogitRows::Range(_));
        let chunks = engine.chunks(session.len(), tokens.len(), many);
        Ok(Ingestion {
            tokens: tokens.to_vec(),
            chunks: chunks.into(),
            open: None,
            read: 0,
            large: false,
            result: Ingested::default(),
        })
    }

    /// Does the next step; true when everything is read.
    ///
    /// # Errors
    /// [`Error::Cancelled`], [`Error::NonFinite`], those of the backend. The session then holds the
    /// chunks that were complete.
    pub fn advance(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        request: &mut Request,
    ) -> Result<bool> {
        let advanced = self.step(engine, session, request);
        if !matches!(advanced, Ok(false)) {
            self.end_large(engine);
        }
        advanced
    }

    fn step(&mut self, engine: &mut Engine, session: &mut Session, request: &mut Request) -> Result<bool> {
        if request.cancel.is_cancelled() {
            self.give_up(engine);
            return Err(Error::Cancelled { read: self.read, total: self.tokens.len() });
        }
        let mut chunk = match self.open.take() {
            Some(open) => open,
            None => match self.chunks.pop_front() {
                Some(tokens) => self.begin(engine, session, tokens, request)?,
                None => return Ok(true),
            },
        };
        let mut quiet = Quiet;
        let observer: &mut dyn Observer = match &mut request.observer {
            Some(observer) => *observer,
            None => &mut quiet,
        };
        let progress = match chunk.driver.advance(&mut *engine.backend, &mut *engine.experts, observer) {
            Ok(progress) => progress,
            Err(error) => {
                chunk.abort(engine);
                return Err(error.into());
            }
        };
        let share = progress.done as f64 / progress.total.max(1) as f64;
        if let Some(hear) = &mut request.on_progress {
            hear(self.read as f64 + share * chunk.tokens.len() as f64, self.tokens.len());
        }
        if progress.is_done() {
            self.complete(engine, session, chunk, request)?;
        } else {
            self.open = Some(chunk);
        }
        Ok(self.open.is_none() && self.chunks.is_empty())
    }

    /// What the ingestion brought; call when [`Ingestion::advance`] said true.
    pub fn into_result(self) -> Ingested {
        self.result
    }

    /// The logits of the last token, once; call when [`Ingestion::advance`] said true.
    pub(crate) fn take_logits(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.result.logits)
    }

    /// Gives up the chunk in flight; the session stays as the chunks before it left it.
    pub fn give_up(&mut self, engine: &mut Engine) {
        if let Some(chunk) = self.open.take() {
            chunk.abort(engine);
        }
        self.chunks.clear();
        self.end_large(engine);
    }

    /// Whether it is in the middle of a chunk of more than `rows` rows.
    pub(crate) fn is_in_large(&self, rows: usize) -> bool {
        self.open.as_ref().is_some_and(|chunk| chunk.tokens.len() > rows)
    }

    /// Whether it begins such a chunk next.
    pub(crate) fn begins_large(&self, rows: usize) -> bool {
        self.open.is_none() && self.chunks.front().is_some_and(|chunk| chunk.len() > rows)
    }

    /// Its passes need the memory of large ones no more.
    fn end_large(&mut self, engine: &mut Engine) {
        if std::mem::take(&mut self.large) {
            engine.end_large();
        }
    }

    fn begin(
        &mut self,
        engine: &mut Engine,
        session: &Session,
        tokens: Range<usize>,
        request: &Request,
    ) -> Result<Chunk> {
        if tokens.len() <= engine.small_rows() {
            engine.begin_small()?;
        } else if !self.large {
            engine.begin_large()?;
            self.large = true;
        }
        let mut pass = Engine::pass(session, &self.tokens[tokens.clone()]);
        pass.logits = self.wanted(&tokens, request).map(|token| token - tokens.start).collect();
        let heard = request.on_checkpoint.is_some();
        let inside = |&&at: &&usize| heard && at > tokens.start && at <= tokens.end;
        let checkpoints: Vec<(usize, SequenceId)> =
            (request.checkpoints.iter().filter(inside)).map(|&at| (at, engine.backend.create())).collect();
        pass.snapshots = (checkpoints.iter())
            .map(|&(at, into)| SnapshotRequest { row: at - 1 - tokens.start, into })
            .collect();
        match Driver::begin(&mut *engine.backend, &engine.model.spec, &pass) {
            Ok(driver) => {
                let driver = driver.followed_by(self.chunks.front().map_or(0, Range::len));
                Ok(Chunk { driver, tokens, checkpoints })
            }
            Err(error) => {
                checkpoints.iter().for_each(|&(_, into)| engine.backend.free(into));
                Err(error.into())
            }
        }
    }

    /// Tokens of `chunk` whose logits are wanted.
    fn wanted(&self, chunk: &Range<usize>, request: &Request) -> Range<usize> {
        let rows = match &request.logits {
            LogitRows::None => return chunk.start..chunk.start,
            LogitRows::Last => self.tokens.len() - 1..self.tokens.len(),
            LogitRows::Range(rows) => rows.clone(),
        };
        let start = rows.start.clamp(chunk.start, chunk.end);
        start..rows.end.clamp(start, chunk.end)
    }

    fn complete(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        chunk: Chunk,
        request: &mut Request,
    ) -> Result<()> {
        if let Err(error) = self.collect(engine, session, &chunk, request) {
            chunk.abort(engine);
            return Err(error);
        }
        engine.backend.commit(chunk.driver.pass())?;
        let start = session.len();
        engine.extend(session, &self.tokens[chunk.tokens.clone()]);
        self.read = chunk.tokens.end;
        self.result.chunks += 1;
        for (at, sequence) in chunk.checkpoints {
            let len = start + at - chunk.tokens.start;
            let tokens = session.tokens[..len].to_vec();
            let checkpoint =
                Session { sequence, tokens, pages: session.pages[..len.div_ceil(PAGE)].to_vec() };
            match &mut request.on_checkpoint {
                Some(take) => take(checkpoint),
                None => engine.close(checkpoint),
            }
        }
        Ok(())
    }

    /// Waits for the chunk, or for one before it if nothing is wanted of this one, and hands out the logits that were wanted.
    fn collect(
        &mut self,
        engine: &mut Engine,
        session: &Session,
        chunk: &Chunk,
        request: &mut Request,
    ) -> Result<()> {
        let wanted = self.wanted(&chunk.tokens, request);
        if wanted.is_empty() {
            return Ok(engine.backend.keep_pace()?);
        }
        let logits = engine.backend.logits(chunk.driver.pass())?;
        for (row, token) in wanted.enumerate() {
            let logits = logits.row(row);
            if !are_finite(logits) {
                let position = session.len() + token - chunk.tokens.start;
                return Err(Error::NonFinite { position });
            }
            if let Some(hear) = &mut request.on_logits {
                hear(token, logits);
            }
            if token + 1 == self.tokens.len() {
                self.result.logits = logits.to_vec();
            }
        }
        Ok(())
    }
}
