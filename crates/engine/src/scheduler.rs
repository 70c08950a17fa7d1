//! Several requests on one engine: prompts read in slices, answers written together.
//!
//! A [`Scheduler`] is turned by whoever owns the engine. A turn writes one token of every running answer in one pass,
//! then reads prompts for at most [`SchedulerOptions::slice`]: so an answer waits no longer than a slice and one stage
//! for its next token, whatever the length of the prompts beside it. Results are those of each request alone, to the
//! bit.
//!
//! A request that begins like one being read waits for it, and then takes its checkpoint instead of reading the same.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::GRID;
use text::Tokenizer;

use crate::cancel::Cancel;
use crate::engine::{Engine, Session, Step};
use crate::error::Error;
use crate::generation::{Finish, Generation, GenerationOptions, Token};
use crate::ingestion::{Ingestion, Request};
use crate::prefix::common;
use crate::sessions::{Reuse, SessionStats, Sessions};

/// Tokens of a first message that are worth storing by themselves.
const SHARED: usize = 512;

/// What a scheduler may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Requests that run at once.
    pub parallel: usize,
    /// Requests that may wait for their turn.
    pub queue: usize,
    /// Time spent on prompts before running answers go on.
    pub slice: Duration,
}

impl Default for SchedulerOptions {
    fn default() -> SchedulerOptions {
        SchedulerOptions { parallel: 4, queue: 64, slice: Duration::from_millis(50) }
    }
}

/// A request.
pub struct Job {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Where its messages end, in tokens, ascending: checkpoints are made there.
    pub boundaries: Vec<usize>,
    /// What its answer may be.
    pub options: GenerationOptions,
    /// Gives it up, in whatever phase it is.
    pub cancel: Cancel,
    /// Hears what becomes of it. Called on the engine's thread: must not wait.
    pub listener: Box<dyn FnMut(Event) + Send>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// What happens to a request: started, progress, tokens, and one of the last two.
#[derive(Debug)]
pub enum Event {
    /// Its turn has come.
    Started(Reuse),
    /// Tokens of the prompt that are there now, those reused among them; of all.
    Progress {
        /// There now.
        done: usize,
        /// Of so many.
        total: usize,
    },
    /// A step of the answer.
    Token(Token),
    /// The answer has ended.
    Finished(Report),
    /// It failed, or was given up ([`Error::Cancelled`]).
    Failed(Error),
}

/// What a request took.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Why the answer ended.
    pub finish: Finish,
    /// What became of the prompt.
    pub reuse: Reuse,
    /// Tokens written.
    pub written: usize,
    /// From submission to its turn.
    pub waited: Duration,
    /// From its turn to the last token of the prompt, other requests' work included.
    pub reading: Duration,
    /// From there to the end.
    pub writing: Duration,
}

/// A request that cannot be taken.
#[derive(Debug, thiserror::Error)]
#[error("{waiting} requests are waiting already; try again later")]
pub struct QueueFull {
    /// Requests in the queue.
    pub waiting: usize,
}

/// What a request is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading the prompt: tokens there, tokens in all.
    Reading(usize, usize),
    /// Writing: tokens so far.
    Writing(usize),
}

/// What a scheduler is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests that run.
    pub running: Vec<Phase>,
    /// Requests that wait.
    pub waiting: usize,
    /// Prompt tokens taken from checkpoints.
    pub reused: u64,
    /// Prompt tokens read.
    pub read: u64,
    /// Tokens written.
    pub written: u64,
    /// Requests that came to an answer's end.
    pub finished: u64,
    /// Requests given up by who asked.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Checkpoints.
    pub sessions: SessionStats,
}

struct Task {
    job: Job,
    submitted: Instant,
    started: Instant,
    reuse: Reuse,
    session: Session,
    checkpoints: Vec<usize>,
    work: Work,
}

enum Work {
    Reading(Box<Ingestion>),
    Writing { generation: Box<Generation>, began: Instant, written: usize },
}

/// Requests on an engine.
pub struct Scheduler {
    engine: Engine,
    sessions: Sessions,
    tokenizer: Arc<Tokenizer>,
    options: SchedulerOptions,
    queue: VecDeque<(Job, Instant)>,
    /// In the order they started.
    running: Vec<Task>,
    /// Whether the next slice goes to the prompt that started first, not to the one with least to read.
    oldest: bool,
    counts: SchedulerStats,
}

impl Scheduler {
    /// A scheduler with nothing to do. The backend must have room for [`SchedulerOptions::parallel`] contexts and
    /// for the checkpoints ([`Sessions::positions`]).
    pub fn new(
        engine: Engine,
        sessions: Sessions,
        tokenizer: Arc<Tokenizer>,
        options: SchedulerOptions,
    ) -> Scheduler {
        Scheduler {
            engine,
            sessions,
            tokenizer,
            options,
            queue: VecDeque::new(),
            running: Vec::new(),
            oldest: false,
            counts: SchedulerStats::default(),
        }
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`QueueFull`]; its listener hears nothing then.
    pub fn submit(&mut self, mut job: Job) -> Result<(), QueueFull> {
        self.queue.retain(|(job, _)| !job.cancel.is_cancelled());
        if self.queue.len() >= self.options.queue && self.running.len() >= self.options.parallel {
            return Err(QueueFull { waiting: self.queue.len() });
        }
        let needed = job.tokens.len();
        let context = self.engine.options().context;
        let wrong = if job.tokens.is_empty() {
            Some(Error::EmptyPrompt)
        } else if needed > context {
            Some(Error::ContextOverflow { needed, context })
        } else {
            job.options.sampling.check().err()
        };
        match wrong {
            Some(error) => {
                self.counts.failed += 1;
                (job.listener)(Event::Failed(error));
            }
            None => self.queue.push_back((job, Instant::now())),
        }
        Ok(())
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty()
    }

    /// What it is doing and has done.
    pub fn stats(&self) -> SchedulerStats {
        let phase = |task: &Task| match &task.work {
            Work::Reading(_) => Phase::Reading(task.session.len(), task.job.tokens.len()),
            Work::Writing { written, .. } => Phase::Writing(*written),
        };
        SchedulerStats {
            running: self.running.iter().map(phase).collect(),
            waiting: self.queue.len(),
            sessions: self.sessions.stats(),
            ..self.counts.clone()
        }
    }

    /// Gives up what nobody waits for, starts what has its turn, writes a token of each answer, reads a slice.
    pub fn turn(&mut self) {
        self.drop_cancelled();
        self.start_waiting();
        self.write();
        self.read_slice();
    }

    fn drop_cancelled(&mut self) {
        let gone = |job: &Job| job.cancel.is_cancelled();
        for index in (0..self.queue.len()).rev() {
            if gone(&self.queue[index].0)
                && let Some((mut job, _)) = self.queue.remove(index)
            {
                self.counts.cancelled += 1;
                (job.listener)(Event::Failed(Error::Cancelled { read: 0, total: job.tokens.len() }));
            }
        }
        for index in (0..self.running.len()).rev() {
            if gone(&self.running[index].job) {
                let task = self.running.remove(index);
                let (read, total) = (task.session.len(), task.job.tokens.len());
                self.fail(task, Error::Cancelled { read: read.min(total), total });
            }
        }
    }

    /// Ends a task; what one that was given up has read stays as a checkpoint.
    fn fail(&mut self, task: Task, error: Error) {
        let Task { mut job, session, work, .. } = task;
        if let Work::Reading(mut ingestion) = work {
            ingestion.give_up(&mut self.engine);
        }
        match error {
            Error::Cancelled { .. } => {
                self.counts.cancelled += 1;
                self.sessions.keep(&mut self.engine, session);
            }
            _ => {
                self.counts.failed += 1;
                self.engine.close(session);
            }
        }
        (job.listener)(Event::Failed(error));
    }

    fn start_waiting(&mut self) {
        let mut index = 0;
        while self.running.len() < self.options.parallel && index < self.queue.len() {
            if self.should_wait(&self.queue[index].0.tokens) {
                index += 1;
            } else if let Some((job, submitted)) = self.queue.remove(index) {
                self.start(job, submitted);
            }
        }
    }

    /// Whether another request is reading much of this prompt right now.
    fn should_wait(&self, tokens: &[u32]) -> bool {
        let known = self.sessions.look_up(tokens).reused;
        self.running.iter().filter(|task| matches!(task.work, Work::Reading(_))).any(|task| {
            let shared = common(&task.job.tokens, tokens).min(tokens.len() - 1);
            task.checkpoints.iter().any(|&at| at > known && at <= shared)
        })
    }

    fn start(&mut self, mut job: Job, submitted: Instant) {
        let opened = self.sessions.open(&mut self.engine, &job.tokens);
        let (session, reuse) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.counts.failed += 1;
                return (job.listener)(Event::Failed(error));
            }
        };
        let from = session.len();
        match Ingestion::new(&self.engine, &session, &job.tokens[from..], &Request::default()) {
            Ok(ingestion) => {
                (job.listener)(Event::Started(reuse));
                let checkpoints = self.sessions.plan(from, job.tokens.len(), &job.boundaries);
                let (started, work) = (Instant::now(), Work::Reading(Box::new(ingestion)));
                self.running.push(Task { job, submitted, started, reuse, session, checkpoints, work });
            }
            Err(error) => {
                self.engine.close(session);
                self.counts.failed += 1;
                (job.listener)(Event::Failed(error));
            }
        }
    }

    /// One token of every running answer.
    fn write(&mut self) {
        let mut index = 0;
        let mut chosen = Vec::new();
        while index < self.running.len() {
            let task = &mut self.running[index];
            let Work::Writing { generation, written, .. } = &mut task.work else {
                index += 1;
                continue;
            };
            let has_room = self.engine.check_room(&task.session, 1).is_ok();
            let token = match generation.choose(&self.tokenizer, has_room) {
                Ok(Some(token)) => token,
                Ok(None) => {
                    // An answer of no tokens.
                    let task = self.running.remove(index);
                    self.finish(task, Finish::Length);
                    continue;
                }
                Err(error) => {
                    let task = self.running.remove(index);
                    self.fail(task, error);
                    continue;
                }
            };
            *written += 1;
            self.counts.written += 1;
            let (id, finish) = (token.id, token.finish);
            (task.job.listener)(Event::Token(token));
            match finish {
                Some(finish) => {
                    let task = self.running.remove(index);
                    self.finish(task, finish);
                }
                None => {
                    chosen.push((index, id));
                    index += 1;
                }
            }
        }
        self.step(&chosen);
    }

    /// Reads the chosen tokens, of tasks by index, in one pass.
    fn step(&mut self, chosen: &[(usize, u32)]) {
        if chosen.is_empty() {
            return;
        }
        let mut steps: Vec<Step> = Vec::new();
        for (index, task) in self.running.iter_mut().enumerate() {
            if let Some(&(_, id)) = chosen.iter().find(|(at, _)| *at == index)
                && let Work::Writing { generation, .. } = &mut task.work
            {
                steps.push(generation.step(&mut task.session, id));
            }
        }
        match self.engine.step_all(&mut steps) {
            Ok(()) => {}
            // One sequence's damage must not be another's: each is tried alone.
            Err(_) if chosen.len() > 1 => {
                for &(index, id) in chosen.iter().rev() {
                    self.step(&[(index, id)]);
                }
            }
            Err(error) => {
                let task = self.running.remove(chosen[0].0);
                self.fail(task, error);
            }
        }
    }

    fn finish(&mut self, task: Task, finish: Finish) {
        let Task { mut job, submitted, started, reuse, session, work, .. } = task;
        let now = Instant::now();
        let (began, written) = match work {
            Work::Writing { began, written, .. } => (began, written),
            Work::Reading(_) => (now, 0),
        };
        // What cannot be stored is read again some day; the answer is there.
        let _ = self.sessions.save(&mut self.engine, &session);
        self.sessions.keep(&mut self.engine, session);
        self.counts.finished += 1;
        (job.listener)(Event::Finished(Report {
            finish,
            reuse,
            written,
            waited: started - submitted,
            reading: began - started,
            writing: now - began,
        }));
    }

    /// Reads prompts for the time of a slice.
    fn read_slice(&mut self) {
        let began = Instant::now();
        // There is memory for one large chunk at a time.
        let small = self.engine.small_rows();
        let in_large = |task: &Task| matches!(&task.work, Work::Reading(prompt) if prompt.is_in_large(small));
        let taken = self.running.iter().any(in_large);
        let reading = |(index, task): (usize, &Task)| match &task.work {
            Work::Reading(prompt) if !(taken && prompt.begins_large(small)) => {
                Some((index, task.job.tokens.len() - task.session.len()))
            }
            _ => None,
        };
        let prompts: Vec<(usize, usize)> = self.running.iter().enumerate().filter_map(reading).collect();
        // Short prompts overtake long ones, but not every time.
        let shortest = prompts.iter().min_by_key(|(_, left)| *left);
        let next = if self.oldest { prompts.first() } else { shortest };
        let Some(&(index, _)) = next else { return };
        self.oldest = !self.oldest;
        while self.read_step(index) && began.elapsed() < self.options.slice {}
    }

    /// One step of a prompt; whether there are more.
    fn read_step(&mut self, index: usize) -> bool {
        let task = &mut self.running[index];
        let Work::Reading(ingestion) = &mut task.work else { return false };
        if task.job.cancel.is_cancelled() {
            // Its end comes with the next turn.
            return false;
        }
        let before = task.session.len();
        let (reused, total) = (task.reuse.reused, task.job.tokens.len());
        let mut made = Vec::new();
        let mut take = |checkpoint| made.push(checkpoint);
        let listener = &mut task.job.listener;
        let mut last = usize::MAX;
        let mut progress = |done: f64, _: usize| {
            let done = reused + done as usize;
            if done != last {
                last = done;
                listener(Event::Progress { done: done.min(total), total });
            }
        };
        let mut request = Request {
            checkpoints: task.checkpoints.iter().map(|&at| at - reused).collect(),
            on_checkpoint: Some(&mut take),
            on_progress: Some(&mut progress),
            ..Request::default()
        };
        let advanced = ingestion.advance(&mut self.engine, &mut task.session, &mut request);
        self.counts.read += (task.session.len() - before) as u64;
        let shared = task.job.boundaries.first().map(|&end| end / GRID * GRID);
        for checkpoint in made {
            // What many conversations begin with is worth having after a restart.
            if Some(checkpoint.len()) == shared && checkpoint.len() >= SHARED {
                let _ = self.sessions.save(&mut self.engine, &checkpoint);
            }
            self.sessions.keep(&mut self.engine, checkpoint);
        }
        match advanced {
            Ok(false) => true,
            Ok(true) => {
                self.begin_writing(index);
                false
            }
            Err(error) => {
                let task = self.running.remove(index);
                self.fail(task, error);
                false
            }
        }
    }

    fn begin_writing(&mut self, index: usize) {
        let task = &mut self.running[index];
        let Work::Reading(ingestion) = &mut task.work else { return };
        self.counts.reused += task.reuse.reused as u64;
        match Generation::new(&self.tokenizer, ingestion.take_logits(), &task.job.options) {
            Ok(generation) => {
                let generation = Box::new(generation);
                task.work = Work::Writing { generation, began: Instant::now(), written: 0 };
            }
            Err(error) => {
                let task = self.running.remove(index);
                self.fail(task, error);
            }
        }
    }
}
