//! Arguments of `bench`.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use quant::Type;

use experts::simulate::Likeness;

use crate::args::{BackendArgs, parse_positive, parse_type};
use crate::cache_args::{CacheArgs, parse_size};

/// Arguments of `bench`.
///
/// Token ids are random (uniform, from the seed). Every measurement starts from a sequence of `--depth` tokens and
/// follows one of the same shape that does not count. All rows of a prompt are computed in all layers; logits are
/// those of the last row, as in use.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
pub struct BenchArgs {
    /// Model file, any shard of a split one, or its folder.
    #[arg(required_unless_present_any = ["kernels", "from"])]
    pub model: Option<PathBuf>,
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
    /// Leave out the peaks of this machine and the time of every stage.
    #[arg(long)]
    pub no_profile: bool,
    /// Print one JSON object with every sample.
    #[arg(long)]
    pub json: bool,
    /// Comparing two settings, and drawing.
    #[command(flatten)]
    pub ab: AbArgs,
    /// Kernels alone.
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// Made-up choices of experts.
    #[command(flatten)]
    pub replay: ReplayArgs,
    /// The picture.
    #[command(flatten)]
    pub roofline: RooflineArgs,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Comparing two settings.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Two settings or programs in turn")]
pub struct AbArgs {
    /// Measure with these further options in turn, a process for each, and print the ratio of every pair. Where the
    /// first word is no option, it is the program to run.
    #[arg(long, value_names = ["FLAGS A", "FLAGS B"], num_args = 2, action = ArgAction::Set, allow_hyphen_values = true)]
    pub ab: Option<Vec<String>>,
    /// Seconds of rest before every process of --ab.
    #[arg(long, value_name = "S", default_value_t = 1.0, allow_negative_numbers = true)]
    pub pause: f64,
}

/// Kernels alone.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Kernels alone, on random weights of the 80B's widths [cpu, cuda]")]
pub struct ProbeArgs {
    /// Measure the stages of one layer instead of a model.
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["model", "ab"])]
    pub kernels: Option<Probe>,
    /// Type of the weights.
    #[arg(long = "type", value_name = "TYPE", value_parser = parse_type)]
    pub ty: Option<Type>,
    /// Type of the experts' down matrices [default: as --type].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub down: Option<Type>,
    /// Rows that meet the weights; for experts, of each of them on average [default: experts 40, dense 2048, gemv 1].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub rows: Option<usize>,
    /// Measure also without a part of the work; results are wrong then.
    #[arg(long, value_enum, value_name = "PART")]
    pub ablate: Option<Ablation>,
}

/// Which stages are probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Probe {
    /// Routed experts over a prompt.
    Experts,
    /// Projections of a DeltaNet layer over a prompt.
    Dense,
    /// Both, and the output projection, for single tokens.
    Gemv,
}

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ablation {
    /// Weights are neither read nor decoded (on a GPU: are read, but not decoded): products with something else.
    Decode,
    /// All experts read the bytes of one, which stays in the second cache.
    Loads,
}

/// Drawing.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Picture")]
pub struct RooflineArgs {
    /// Draw stages under the roofs of this machine: rate against operations per byte.
    #[arg(long, value_name = "SVG", conflicts_with_all = ["no_profile", "ab", "kernels"])]
    pub roofline: Option<PathBuf>,
    /// Draw what an earlier bench printed with --json instead of measuring.
    #[arg(long, value_name = "JSON", requires = "roofline", conflicts_with = "model")]
    pub from: Option<PathBuf>,
}

/// Made-up choices of experts.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Experts chosen as in real text, while generating [cpu]")]
pub struct ReplayArgs {
    /// Choose experts such that a cache of the least recently used would find this share of them.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub trace_hits: Option<f64>,
    /// The size of that cache [default: that of --cache].
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "trace_hits")]
    pub trace_cache: Option<u64>,
    /// Share of the experts that the look-ahead foresees.
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.7", requires = "trace_hits")]
    pub trace_recall: f64,
}

impl ReplayArgs {
    /// What a trace should be like, if one is to be replayed, and for which cache.
    pub fn likeness(&self, cache: &CacheArgs, seed: u64) -> Option<(Likeness, Option<u64>)> {
        let hits = self.trace_hits?;
        let margin = cache.look_ahead.0.unwrap_or(0);
        Some((Likeness { hits, recall: self.trace_recall, margin, seed }, self.trace_cache))
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("is a share, from 0 to 1".to_string()),
    }
}
