//! Ctrl-C: the first asks the work to stop at its next step, a later one ends the program.

use std::sync::Mutex;
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
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Failure::Usage(format!("cannot listen for Ctrl-C: {error}")))?;
    Ok(cancel)
}
