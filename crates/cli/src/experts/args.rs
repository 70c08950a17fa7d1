//! Arguments of `experts`.

use std::path::PathBuf;

use clap::Args;

use crate::args::{BackendArgs, TextArgs, parse_positive};

/// Arguments of `experts`.
///
/// The text is read as it is, without the chat template: most of it together, as a prompt, its end token by token, as an
/// answer is written. Caches are simulated over that end, filled by what comes before.
#[derive(Debug, Args)]
pub struct ExpertsArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The text.
    #[command(flatten)]
    pub text: TextArgs,
    /// Tokens at its end that are computed one by one; at most half of them.
    #[arg(long, value_name = "N", default_value = "256", value_parser = parse_positive)]
    pub steps: usize,
    /// Draw how often each expert was used, and what caches would find.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print JSON, with the count of every expert.
    #[arg(long)]
    pub json: bool,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}
