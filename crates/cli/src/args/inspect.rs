//! Arguments of `info` and `tokenize`.

use std::path::PathBuf;

use clap::Args;

use super::{Kv, parse_positive};

/// Arguments of `info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// Context to plan for [default: 4096, or the model's if that is less].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub context: Option<usize>,
    /// How keys and values are stored.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: Kv,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// A text to read tokens from.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TextArgs {
    /// The text.
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// Read it from a file; `-` is standard input.
    #[arg(short, long)]
    pub file: Option<PathBuf>,
}

/// Arguments of `tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The text.
    #[command(flatten)]
    pub text: TextArgs,
    /// Read `<|im_start|>` and its like as control tokens.
    #[arg(long)]
    pub special: bool,
    /// Print only how many there are.
    #[arg(long)]
    pub count: bool,
    /// Print JSON: an array of ids.
    #[arg(long)]
    pub json: bool,
}
