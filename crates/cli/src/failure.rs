//! How a command ends.

use std::path::PathBuf;

/// How a command that ran to its end ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 0.
    Success,
    /// It ran, and the answer is no: exit code 1.
    Negative,
}

/// Why a command did not run to its end: exit code 2, or 130 if somebody interrupted it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// The model file, or its backend.
    #[error("{}", naming(path, &source.to_string()))]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: model::Error,
    },
    /// The chat template.
    #[error("chat template: {0}; `--raw` continues the prompt without it")]
    Template(#[from] text::TemplateError),
    /// Sessions and generation.
    #[error(transparent)]
    Engine(engine::Error),
    /// Starting the CPU backend.
    #[error(transparent)]
    Cpu(#[from] cpu::Error),
    /// Starting the CUDA backend.
    #[error(transparent)]
    Cuda(#[from] cuda::Error),
    /// Making room for experts.
    #[error(transparent)]
    Experts(#[from] experts::Error),
    /// Planning memory.
    #[error(transparent)]
    Plan(#[from] engine::plan::NotEnough),
    /// Downloading.
    #[error(transparent)]
    Pull(crate::pull::Error),
    /// Making files.
    #[error(transparent)]
    Forge(forge::Error),
    /// Matrix files.
    #[error(transparent)]
    Npy(#[from] engine::npy::Error),
    /// A file of the user's.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Our own output.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
    /// Arguments that do not fit together.
    #[error("{0}")]
    Usage(String),
}

/// `message` with the file it is about, unless it begins with it.
fn naming(path: &std::path::Path, message: &str) -> String {
    let path = path.display().to_string();
    if message.starts_with(&path) { message.to_string() } else { format!("{path}: {message}") }
}

impl From<engine::Error> for Failure {
    fn from(error: engine::Error) -> Failure {
        match error {
            engine::Error::Cancelled { .. } => Failure::Interrupted,
            other => Failure::Engine(other),
        }
    }
}

impl From<crate::pull::Error> for Failure {
    fn from(error: crate::pull::Error) -> Failure {
        match error {
            crate::pull::Error::Cancelled => Failure::Interrupted,
            other => Failure::Pull(other),
        }
    }
}

impl From<forge::Error> for Failure {
    fn from(error: forge::Error) -> Failure {
        match error {
            forge::Error::Cancelled => Failure::Interrupted,
            other => Failure::Forge(other),
        }
    }
}

impl From<model::Error> for Failure {
    fn from(error: model::Error) -> Failure {
        Failure::Engine(engine::Error::Model(error))
    }
}
