//! How the backend computes where there is a choice.

use std::fmt;

/// What happens to the inputs of linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Nothing: they stay `f32`.
    #[default]
    None,
    /// They are rounded as llama.cpp's CPU kernels do before a dot product with weights of that type; see
    /// [`quant::activation`].
    LlamaCpp,
}

/// The form of the delta rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeltaForm {
    /// Blocks on the absolute grid of 64 positions, one update of the state for each.
    #[default]
    Chunked,
    /// Token by token.
    Sequential,
}

/// Choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// What happens to the inputs of linear layers.
    pub rounding: Rounding,
    /// The form of the delta rule.
    pub delta: DeltaForm,
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.delta {
            DeltaForm::Chunked => "chunked",
            DeltaForm::Sequential => "sequential",
        })?;
        match self.rounding {
            Rounding::None => Ok(()),
            Rounding::LlamaCpp => f.write_str(", llama.cpp rounding"),
        }
    }
}
