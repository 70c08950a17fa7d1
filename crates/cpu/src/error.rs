//! Why the backend could not start.

use crate::Variant;

/// Why the backend could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Kernels this machine cannot run.
    #[error("this processor cannot run the `{variant}` kernels; leave the choice to the program")]
    VariantUnavailable {
        /// The kernels asked for.
        variant: Variant,
    },
    /// The environment asks for kernels that do not exist.
    #[error("REDLITE_CPU_VARIANT is `{found}`; expected one of {}", Variant::ALL.map(Variant::name).join(", "))]
    UnknownVariant {
        /// The value of the variable.
        found: String,
    },
    /// No thread at all, or more than make sense.
    #[error("{found} threads asked for; expected 1 to {most}")]
    ThreadCount {
        /// The number asked for.
        found: usize,
        /// The largest sensible number.
        most: usize,
    },
    /// The system refused to start threads.
    #[error("cannot start {count} threads: {source}; ask for fewer")]
    Threads {
        /// How many.
        count: usize,
        /// What the system said.
        source: std::io::Error,
    },
}
