//! Reading a prompt: chunk after chunk, each a state machine that can stop between two stages.

use std::collections::VecDeque;
use std::ops::Range;

use model::{Driver, Observer, Quiet};

use crate::cancel::Cancel;
use crate::chunks::chunks;
use crate::engine::{Engine, Session};
use crate::error::{Error, Result};

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

/// A prompt being read. [`Ingestion::advance`] does one stage of one block, or one wave of experts, so
/// that whoever drives it can look after others in between.
#[derive(Debug)]
pub struct Ingestion {
    tokens: Vec<u32>,
    chunks: VecDeque<Range<usize>>,
    open: Option<(Driver, Range<usize>)>,
    read: usize,
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
        let smallest = engine.backend.capabilities().smallest_chunk;
        let chunks = chunks(session.len(), tokens.len(), engine.chunk_for(many), smallest);
        Ok(Ingestion {
            tokens: tokens.to_vec(),
            chunks: chunks.into(),
            open: None,
            read: 0,
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
        if request.cancel.is_cancelled() {
            self.give_up(engine);
            return Err(Error::Cancelled { read: self.read, total: self.tokens.len() });
        }
        let (mut driver, chunk) = match self.open.take() {
            Some(open) => open,
            None => match self.chunks.pop_front() {
                Some(chunk) => (self.begin(engine, session, &chunk, request)?, chunk),
                None => return Ok(true),
            },
        };
        let mut quiet = Quiet;
        let observer: &mut dyn Observer = match &mut request.observer {
            Some(observer) => *observer,
            None => &mut quiet,
        };
        let progress = match driver.advance(&mut *engine.backend, &mut *engine.experts, observer) {
            Ok(progress) => progress,
            Err(error) => {
                engine.backend.abort(driver.pass());
                return Err(error.into());
            }
        };
        let share = progress.done as f64 / progress.total.max(1) as f64;
        if let Some(hear) = &mut request.on_progress {
            hear(self.read as f64 + share * chunk.len() as f64, self.tokens.len());
        }
        if progress.is_done() {
            self.complete(engine, session, &driver, &chunk, request)?;
        } else {
            self.open = Some((driver, chunk));
        }
        Ok(self.open.is_none() && self.chunks.is_empty())
    }

    /// What the ingestion brought; call when [`Ingestion::advance`] said true.
    pub fn into_result(self) -> Ingested {
        self.result
    }

    /// Gives up the chunk in flight; the session stays as the chunks before it left it.
    pub fn give_up(&mut self, engine: &mut Engine) {
        if let Some((driver, _)) = self.open.take() {
            engine.backend.abort(driver.pass());
        }
        self.chunks.clear();
    }

    fn begin(
        &self,
        engine: &mut Engine,
        session: &Session,
        chunk: &Range<usize>,
        request: &Request,
    ) -> Result<Driver> {
        let mut pass = Engine::pass(session, &self.tokens[chunk.clone()]);
        let wanted = self.wanted(chunk, request);
        pass.logits = wanted.map(|token| token - chunk.start).collect();
        engine.experts.follow(self.chunks.front().map_or(0, Range::len));
        Ok(Driver::begin(&mut *engine.backend, &engine.model.spec, &pass)?)
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
        driver: &Driver,
        chunk: &Range<usize>,
        request: &mut Request,
    ) -> Result<()> {
        if let Err(error) = self.collect(engine, session, driver, chunk, request) {
            engine.backend.abort(driver.pass());
            return Err(error);
        }
        engine.backend.commit(driver.pass())?;
        session.tokens.extend_from_slice(&self.tokens[chunk.clone()]);
        self.read = chunk.end;
        self.result.chunks += 1;
        Ok(())
    }

    /// Waits for the chunk and hands out the logits that were wanted.
    fn collect(
        &mut self,
        engine: &mut Engine,
        session: &Session,
        driver: &Driver,
        chunk: &Range<usize>,
        request: &mut Request,
    ) -> Result<()> {
        let wanted = self.wanted(chunk, request);
        if wanted.is_empty() {
            return Ok(engine.backend.sync()?);
        }
        let logits = engine.backend.logits(driver.pass())?;
        for (row, token) in wanted.enumerate() {
            let logits = logits.row(row);
            if !logits.iter().all(|x| x.is_finite()) {
                let position = session.len() + token - chunk.start;
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
