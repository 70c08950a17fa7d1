//! Arguments of `bench`.

use std::path::PathBuf;

use clap::{ArgAction, Args};

use crate::args::{BackendArgs, parse_positive};

/// Arguments of `bench`.
///
/// Token ids are random (uniform, from the seed). Every measurement starts from a sequence of `--depth` tokens and
/// follows one of the same shape that does not count. All rows of a prompt are computed in all layers; logits are
/// those of the last row, as in use.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct BenchArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// Prompt lengths; 0 measures generation only.
    #[arg(long, value_name = "N,…", value_delimiter = ',', action = ArgAction::Set, default_value = "512,2048")]
    pub prompt: Vec<usize>,
    /// Tokens generated one by one; 0 measures prompts only.
    #[arg(long = "gen", value_name = "N", default_value_t = 64)]
    pub generate: usize,
    /// Tokens in the sequence before the measurement begins.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub depth: usize,
    /// Measurements of each kind; their median counts.
    #[arg(long, value_name = "N", default_value = "5", value_parser = parse_positive)]
    pub repeat: usize,
    /// Seed of the token ids.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Let threads wander between cores instead of pinning each to one [cpu].
    #[arg(long)]
    pub no_pin: bool,
    /// Leave out the peaks of this machine and the time of every stage.
    #[arg(long)]
    pub no_profile: bool,
    /// Print one JSON object with every sample.
    #[arg(long)]
    pub json: bool,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}
