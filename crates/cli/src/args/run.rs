//! Arguments of `run`, and how tokens are chosen.

use std::path::PathBuf;

use clap::Args;

use super::BackendArgs;

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// The prompt [default: standard input].
    #[arg(short, long, conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file; `-` is standard input.
    #[arg(short, long)]
    pub file: Option<PathBuf>,
    /// System message of the conversation.
    #[arg(long, conflicts_with = "raw")]
    pub system: Option<String>,
    /// Use the chat template in this file (Jinja) instead of the model's own.
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub chat_template: Option<PathBuf>,
    /// Continue the text itself, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// In a raw prompt, read `<|im_start|>` and its like as control tokens.
    #[arg(long, requires = "raw")]
    pub special: bool,
    /// Most tokens of the answer.
    #[arg(short = 'n', long, value_name = "N", default_value = "512")]
    pub max_tokens: usize,
    /// Stop at this text (may be repeated).
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on past the model's own end of the answer.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print where the time and the memory went: stage by stage, what was loaded, the peak of each phase.
    #[arg(long, visible_alias = "profile")]
    pub stats: bool,
    /// Write when every stage was computed and every expert read, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// No progress, no summary.
    #[arg(short, long)]
    pub quiet: bool,
    /// Sampling.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// How tokens are chosen: penalties, top-k, top-p, min-p, temperature, in this order.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the most likely token.
    #[arg(long, value_name = "X", default_value_t = engine::Sampling::default().temperature, allow_negative_numbers = true)]
    pub temp: f32,
    /// Keep the K most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K", default_value_t = engine::Sampling::default().top_k)]
    pub top_k: usize,
    /// Keep the most likely tokens whose probabilities sum to this.
    #[arg(long, value_name = "X", default_value_t = engine::Sampling::default().top_p, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Lower the logit of every token generated before.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Lower it for each time the token was generated.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Divide it; 1 does nothing.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub repeat_penalty: f32,
    /// Same seed, same answer.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl From<&SamplingArgs> for engine::Sampling {
    fn from(args: &SamplingArgs) -> engine::Sampling {
        engine::Sampling {
            temperature: args.temp,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            repeat_penalty: args.repeat_penalty,
            seed: args.seed,
        }
    }
}
