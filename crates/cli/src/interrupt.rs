//! Ctrl-C: the first asks the work to stop at its next step, a later one ends the program. Or, in a conversation, each
//! stops what is being done, and only one at rest ends the program.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::Cancel;

use crate::failure::Failure;

/// A signal this much later than the first is a second one.
const AGAIN: Duration = Duration::from_millis(500);

/// A flag raised by Ctrl-C.
///
/// # Errors
/// [`Failure::Usage`] if the system refuses a handler.
pub fn on_ctrl_c() -> Result<Cancel, Failure> {
    on_ctrl_c_then(|| ())
}

/// As [`on_ctrl_c`]; `wake` is called once the flag is raised, for work that waits for something else.
///
/// # Errors
/// [`Failure::Usage`] if the system refuses a handler.
pub fn on_ctrl_c_then(wake: impl Fn() + Send + 'static) -> Result<Cancel, Failure> {
    let cancel = Cancel::new();
    let raised = cancel.clone();
    let first: Mutex<Option<Instant>> = Mutex::new(None);
    let handler = move || {
        let mut first = first.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Some senders signal both the program and its group: that is still one wish.
        if first.is_some_and(|at| at.elapsed() > AGAIN) {
            std::process::exit(130);
        }
        first.get_or_insert_with(Instant::now);
        raised.cancel();
        wake();
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Failure::Usage(format!("cannot listen for Ctrl-C: {error}")))?;
    Ok(cancel)
}

/// What Ctrl-C stops in a conversation.
#[derive(Clone)]
pub struct Stop(Arc<Mutex<Doing>>);

/// What a conversation is doing.
enum Doing {
    /// Work that this stops.
    Work(Cancel),
    /// Nothing since then.
    Rest(Instant),
    /// What nobody minds to lose.
    Start,
}

impl Stop {
    /// Listens for Ctrl-C. One that comes just when the work has ended was meant for the work, if a person sends it
    /// from a terminal.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the system refuses a handler.
    pub fn listen(terminal: bool) -> Result<Stop, Failure> {
        let stop = Stop(Arc::new(Mutex::new(Doing::Start)));
        let heard = stop.clone();
        let handler = move || match &*heard.doing() {
            Doing::Work(cancel) => cancel.cancel(),
            Doing::Rest(since) if terminal && since.elapsed() < AGAIN => {}
            Doing::Rest(_) | Doing::Start => std::process::exit(130),
        };
        ctrlc::set_handler(handler)
            .map_err(|error| Failure::Usage(format!("cannot listen for Ctrl-C: {error}")))?;
        Ok(stop)
    }

    /// Does something that Ctrl-C stops.
    pub fn during<T>(&self, work: impl FnOnce(&Cancel) -> T) -> T {
        let cancel = Cancel::new();
        *self.doing() = Doing::Work(cancel.clone());
        let done = work(&cancel);
        *self.doing() = Doing::Rest(Instant::now());
        done
    }

    fn doing(&self) -> MutexGuard<'_, Doing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
