//! Arguments of `perplexity`, `logits` and `parity`.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;

use super::{BackendArgs, Kv, TextArgs, parse_positive};

/// Arguments of `perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The text.
    #[command(flatten)]
    pub text: TextArgs,
    /// Tokens read from an empty session at a time; each but the first is scored.
    #[arg(long, value_name = "N", default_value = "1024", value_parser = parse_positive)]
    pub window: usize,
    /// Most tokens of the text to read.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Store the logits, as the base of a later run.
    #[arg(long, value_name = "FILE")]
    pub save_base: Option<PathBuf>,
    /// Compare with the logits of an earlier run.
    #[arg(long, value_name = "FILE", conflicts_with = "save_base")]
    pub base: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Tokens to compute with.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TokensArgs {
    /// A text.
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// A text file; `-` is standard input.
    #[arg(short, long)]
    pub file: Option<PathBuf>,
    /// A file of token ids, separated by white space or a JSON array.
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
}

/// Arguments of `logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The tokens.
    #[command(flatten)]
    pub tokens: TokensArgs,
    /// Positions to write, first..end [default: all].
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    pub rows: Option<Range<usize>>,
    /// An intermediate of a layer instead of logits, such as `delta.mix.3` or `route.ids.0`.
    #[arg(long, value_name = "STAGE.LAYER")]
    pub name: Option<String>,
    /// The .npy file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Arguments of `parity`.
#[derive(Debug, Args)]
pub struct ParityArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The side taken as right: a backend, or an .npy file of logits of the same tokens.
    pub a: String,
    /// The other side: likewise. Stored logits are taken as right when they meet a backend.
    pub b: String,
    /// The tokens.
    #[command(flatten)]
    pub tokens: TokensArgs,
    /// Tokens read at once.
    #[arg(long, value_name = "N", default_value = "512", value_parser = parse_positive)]
    pub chunk: usize,
    /// Most tokens to compare.
    #[arg(long, value_name = "N", default_value = "2048")]
    pub limit: usize,
    /// Largest mean KL divergence that passes, nats.
    #[arg(long, value_name = "X", default_value_t = 1e-4, allow_negative_numbers = true)]
    pub max_kl: f64,
    /// Smallest share of equal most likely tokens that passes.
    #[arg(long, value_name = "X", default_value_t = 0.99, allow_negative_numbers = true)]
    pub min_top1: f64,
    /// Largest relative RMS difference of the logits that passes.
    #[arg(long, value_name = "X", default_value_t = f64::INFINITY, hide_default_value = true, allow_negative_numbers = true)]
    pub max_rms: f64,
    /// How keys and values are stored.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: Kv,
    /// Worker threads.
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub threads: Option<usize>,
    /// Keep activations in single precision where they meet quantised weights [cpu].
    #[arg(long)]
    pub exact: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let (start, end) = text.split_once("..").ok_or("should look like 0..16")?;
    let number = |part: &str| part.parse::<usize>().map_err(|_| format!("`{part}` is not a whole number"));
    let range = number(start)?..number(end)?;
    if range.is_empty() { Err("is empty".to_string()) } else { Ok(range) }
}
