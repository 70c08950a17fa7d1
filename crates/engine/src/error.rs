//! Errors of sessions and generation.

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a prompt was not read or an answer not given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model or its backend.
    #[error(transparent)]
    Model(#[from] model::Error),

    /// Nothing to read.
    #[error("the prompt is empty: there is nothing to continue")]
    EmptyPrompt,

    /// The session would outgrow its context. Nothing was read.
    #[error(
        "the request needs {needed} tokens of context but only {context} are available; \
         shorten it or start with a larger context"
    )]
    ContextOverflow {
        /// Tokens the session would have.
        needed: usize,
        /// Tokens it may have.
        context: usize,
    },

    /// Somebody asked to stop. The session holds what was read until then, whole chunks.
    #[error("stopped after {read} of {total} tokens")]
    Cancelled {
        /// Tokens of this request that are in the session now.
        read: usize,
        /// Tokens of this request.
        total: usize,
    },

    /// The model's output is not a number: damaged weights.
    #[error("the logits at position {position} are not finite; the weights are probably damaged")]
    NonFinite {
        /// Absolute position of the token whose logits are bad.
        position: usize,
    },

    /// No token satisfies what was demanded of the answer, or nobody can say which.
    #[error("the answer cannot go on in the form that was demanded: {reason}")]
    Constraint {
        /// Why not.
        reason: String,
    },

    /// A setting outside its range.
    #[error("{name} is {found}; expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: String,
        /// What would be accepted.
        expected: &'static str,
    },
}
