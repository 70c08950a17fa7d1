//! A model being served: one thread owns the engine.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use engine::{Cancel, Event, GenerationOptions, Job, Scheduler, SchedulerStats};
use text::{CallFormat, ChatTemplate, Tokenizer};
use tokio::sync::{mpsc, oneshot};

use crate::error::ApiError;
use crate::grammar::Grammars;

/// What is served.
#[derive(Debug)]
pub struct Served {
    /// Its name in requests and lists.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template as the file has it, and compiled.
    pub template: Option<(String, ChatTemplate)>,
    /// Most tokens of a session.
    pub context: usize,
    /// The context the model was trained for.
    pub trained_context: usize,
    /// Requests that run at once.
    pub parallel: usize,
    /// Since when, in seconds since 1970.
    pub since: u64,
}

impl Served {
    /// How the model writes tool calls; `None` if its template knows none.
    pub fn calls(&self) -> Option<CallFormat> {
        self.template.as_ref().and_then(|(source, _)| CallFormat::of_template(source))
    }
}

/// How a service behaves.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Write a line for each request to standard error. Never a prompt or an answer.
    pub log: bool,
}

/// What the engine's thread is asked.
pub(crate) enum Command {
    Submit(Job, oneshot::Sender<Result<(), usize>>),
    Stats(oneshot::Sender<SchedulerStats>),
}

/// A model being served.
#[derive(Debug)]
pub struct Service {
    /// What is served.
    pub served: Served,
    /// How.
    pub config: Config,
    commands: Sender<Command>,
    /// Made when the first request needs it.
    grammars: OnceLock<Result<Grammars, String>>,
}

/// Requests in progress; dropping it gives up those that have not ended.
#[derive(Debug)]
pub struct Running {
    /// What happens to each, by its number.
    pub events: mpsc::UnboundedReceiver<(usize, Event)>,
    cancel: Cancel,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

impl Running {
    /// Requests whose events come from elsewhere.
    #[cfg(test)]
    pub(crate) fn with(events: mpsc::UnboundedReceiver<(usize, Event)>, cancel: Cancel) -> Running {
        Running { events, cancel }
    }
}

impl Service {
    /// A service whose engine is somebody else's.
    #[cfg(test)]
    pub(crate) fn with(served: Served, config: Config, commands: Sender<Command>) -> Service {
        Service { served, config, commands, grammars: OnceLock::new() }
    }

    /// Starts the engine's thread. It ends when the service is dropped and all requests have ended.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn start(
        scheduler: Scheduler,
        served: Served,
        config: Config,
    ) -> std::io::Result<(Arc<Service>, JoinHandle<()>)> {
        let (commands, inbox) = channel();
        let thread =
            std::thread::Builder::new().name("engine".to_owned()).spawn(move || run(scheduler, &inbox))?;
        let service = Service { served, config, commands, grammars: OnceLock::new() };
        Ok((Arc::new(service), thread))
    }

    /// What compiles grammars for the model. Blocks the first time.
    ///
    /// # Errors
    /// What the model lacks.
    pub(crate) fn grammars(&self) -> Result<&Grammars, String> {
        self.grammars.get_or_init(|| Grammars::new(&self.served.tokenizer)).as_ref().map_err(Clone::clone)
    }

    /// Hands prompts to the engine: tokens and how to answer. They are given up together.
    ///
    /// # Errors
    /// 429 if too many requests wait, 503 if the engine has stopped.
    pub async fn submit(&self, prompts: Vec<(Arc<[u32]>, GenerationOptions)>) -> Result<Running, ApiError> {
        let (sender, events) = mpsc::unbounded_channel();
        let running = Running { events, cancel: Cancel::new() };
        let ends = self.served.tokenizer.stop_tokens();
        for (index, (tokens, options)) in prompts.into_iter().enumerate() {
            let sender = sender.clone();
            let job = Job {
                // The template ends each message with the token that ends an answer.
                boundaries: (1..)
                    .zip(&*tokens)
                    .filter(|(_, id)| ends.contains(id))
                    .map(|(at, _)| at)
                    .collect(),
                tokens: tokens.to_vec(),
                options,
                cancel: running.cancel.clone(),
                // Nobody may listen any more: then the request is given up already.
                listener: Box::new(move |event| drop(sender.send((index, event)))),
            };
            let (reply, accepted) = oneshot::channel();
            self.commands.send(Command::Submit(job, reply)).map_err(|_| ApiError::stopped())?;
            accepted.await.map_err(|_| ApiError::stopped())?.map_err(ApiError::busy)?;
        }
        Ok(running)
    }

    /// What the engine is doing.
    ///
    /// # Errors
    /// 503 if it has stopped.
    pub async fn stats(&self) -> Result<SchedulerStats, ApiError> {
        let (reply, stats) = oneshot::channel();
        self.commands.send(Command::Stats(reply)).map_err(|_| ApiError::stopped())?;
        stats.await.map_err(|_| ApiError::stopped())
    }

    /// Writes a line about a request, if that is wanted.
    pub(crate) fn log(&self, line: std::fmt::Arguments) {
        if self.config.log {
            use std::io::Write;
            // Nobody may be reading: that is no reason to stop.
            let _ = writeln!(std::io::stderr().lock(), "{line}");
        }
    }
}

fn run(mut scheduler: Scheduler, inbox: &Receiver<Command>) {
    loop {
        if scheduler.is_idle() {
            match inbox.recv() {
                Ok(command) => obey(&mut scheduler, command),
                Err(_) => return,
            }
        }
        while let Ok(command) = inbox.try_recv() {
            obey(&mut scheduler, command);
        }
        scheduler.turn();
    }
}

fn obey(scheduler: &mut Scheduler, command: Command) {
    match command {
        Command::Submit(job, reply) => drop(reply.send(scheduler.submit(job).map_err(|full| full.waiting))),
        Command::Stats(reply) => drop(reply.send(scheduler.stats())),
    }
}
