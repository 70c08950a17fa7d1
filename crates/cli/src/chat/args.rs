//! Arguments of `chat`.

use std::path::PathBuf;

use clap::Args;

use crate::args::{BackendArgs, SamplingArgs};

/// Arguments of `chat`.
#[derive(Clone, Debug, Args)]
pub struct ChatArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// System message of the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Use the chat template in this file (Jinja) instead of the model's own.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Most tokens of an answer.
    #[arg(short = 'n', long, value_name = "N", default_value = "4096")]
    pub max_tokens: usize,
    /// Ask the model not to think first, where its template knows how.
    #[arg(long)]
    pub no_think: bool,
    /// Go on with a conversation that `/save` has written.
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
    /// Neither read nor write the history of what was typed.
    #[arg(long)]
    pub no_history: bool,
    /// Memory for what has been read before, in MiB [default: a whole context and six states].
    #[arg(long, value_name = "MIB")]
    pub session_cache: Option<u64>,
    /// Folder for what has been read, so that a loaded conversation is not read again [default: none].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Most disk space for each model in it, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 16_384)]
    pub state_size: u64,
    /// No progress.
    #[arg(short, long)]
    pub quiet: bool,
    /// Sampling.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}
