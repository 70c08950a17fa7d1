//! Ctrl-C: the first asks the work to stop at its next step, the second ends the program.

use engine::Cancel;

use crate::failure::Failure;

/// A flag raised by Ctrl-C.
///
/// # Errors
/// [`Failure::Usage`] if the system refuses a handler.
pub fn on_ctrl_c() -> Result<Cancel, Failure> {
    let cancel = Cancel::new();
    let raised = cancel.clone();
    let handler = move || {
        if raised.is_cancelled() {
            std::process::exit(130);
        }
        raised.cancel();
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Failure::Usage(format!("cannot listen for Ctrl-C: {error}")))?;
    Ok(cancel)
}
