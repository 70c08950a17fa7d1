//! A flag that asks work to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared by whoever works and whoever may want it to stop. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A flag nobody has raised.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Asks the work to stop at its next step.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Lowers the flag, for the next piece of work.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
