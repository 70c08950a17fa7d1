//! Command-line arguments, as clap derives them.

mod files;
mod inspect;
mod measure;
mod run;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use quant::Type;

use crate::bench::args::BenchArgs;
use crate::cache_args::{CacheArgs, DoctorArgs, PlanArgs};
use crate::chat::args::ChatArgs;
use crate::experts::args::ExpertsArgs;
use crate::pull::args::PullArgs;
use crate::serve::args::ServeArgs;

pub use files::{ConvertArgs, QuantizeArgs, RecipeName, ShapeArgs, SynthArgs, WorkArgs};
pub use inspect::{InfoArgs, TextArgs, TokenizeArgs};
pub use measure::{LogitsArgs, ParityArgs, PerplexityArgs, TokensArgs};
pub use run::{RunArgs, SamplingArgs};

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Runs sparse mixture-of-experts models (Qwen3-Next family, GGUF) that are larger than the machine's memory.
///
/// Exit codes: 0 success, 1 the answer is no (parity), 2 error, 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "redlite", version, styles = STYLES, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Read a prompt and answer or continue it.
    Run(RunArgs),
    /// Hold a conversation at the terminal.
    Chat(ChatArgs),
    /// Serve a model over HTTP, as agents and OpenAI's clients speak it.
    Serve(ServeArgs),
    /// Download a model from Hugging Face, or from anywhere.
    Pull(PullArgs),
    /// Show which memory a run would take, and why, without loading anything.
    Plan(PlanArgs),
    /// Show what this machine has for running models, and how fast it reads a model file.
    Doctor(DoctorArgs),
    /// Show what is in a model file and what running it takes.
    Info(InfoArgs),
    /// Show the tokens of a text.
    Tokenize(TokenizeArgs),
    /// Make a GGUF file from a Hugging Face directory (Qwen3NextForCausalLM).
    Convert(ConvertArgs),
    /// Rewrite a GGUF file with other weight types.
    Quantize(QuantizeArgs),
    /// Make a model of random weights, of any size: 20 GiB in the shape of the 80B unless told otherwise.
    Synth(SynthArgs),
    /// Measure how well a model predicts a text.
    Perplexity(PerplexityArgs),
    /// Write logits or any named intermediate as .npy.
    Logits(LogitsArgs),
    /// Compare two backends stage by stage, or a backend with stored logits.
    Parity(ParityArgs),
    /// Show which experts a text uses, and what caches of different sizes would find.
    Experts(ExpertsArgs),
    /// Measure speed: tokens per second, the time of every stage, and how far from this machine's peak it is.
    Bench(BenchArgs),
}

/// Which backend computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Multi-threaded SIMD.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// Plain and slow, in double precision where it matters: the measure of the others.
    Reference,
    /// The reference, rounding activations as llama.cpp's kernels do.
    ReferenceLlama,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

impl From<Kv> for model::KvType {
    fn from(kv: Kv) -> model::KvType {
        match kv {
            Kv::F16 => model::KvType::F16,
            Kv::F32 => model::KvType::F32,
        }
    }
}

/// How a model is run.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Backend")]
pub struct BackendArgs {
    /// What computes.
    #[arg(long, value_enum, default_value = "cpu")]
    pub backend: BackendName,
    /// Worker threads [default: the processors this program may use].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub threads: Option<usize>,
    /// Positions of context to make room for [default: what is needed].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub context: Option<usize>,
    /// How keys and values are stored.
    #[arg(long, value_enum, default_value = "f16")]
    pub kv: Kv,
    /// Most tokens ingested together [default: so many that reading experts is hidden, if memory allows].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub chunk: Option<usize>,
    /// Keep activations in single precision where they meet quantised weights; slower [cpu].
    #[arg(long)]
    pub exact: bool,
    /// GPUs that share the layers: so many, `all`, or their numbers (`0,1`; `1,` is the second one alone)
    /// [default: one; all where one cannot hold the model, but all can] [cuda].
    #[arg(long, value_name = "N|all|LIST", value_parser = parse_gpus)]
    pub gpus: Option<Gpus>,
    /// Experts in bounded memory.
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// GPUs to compute with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpus {
    /// Every one there is.
    All,
    /// The first ones.
    First(usize),
    /// These.
    These(Vec<i32>),
}

fn parse_gpus(text: &str) -> Result<Gpus, String> {
    let number =
        |text: &str| text.trim().parse::<u8>().map_err(|_| format!("`{text}` is no number of a GPU"));
    if text == "all" {
        return Ok(Gpus::All);
    }
    if !text.contains(',') {
        return parse_positive(text).map(Gpus::First);
    }
    let list = text.strip_suffix(',').unwrap_or(text).split(',');
    Ok(Gpus::These(list.map(|text| number(text).map(i32::from)).collect::<Result<_, _>>()?))
}

/// A whole number from 1 up.
pub fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_string()),
        Ok(n) => Ok(n),
        Err(_) => Err("is not a whole number".to_string()),
    }
}

/// A weight type by its name.
pub fn parse_type(text: &str) -> Result<Type, String> {
    Type::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Type::all().map(Type::name).collect();
        format!("is not a weight type; known are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted_or_named() {
        assert_eq!(parse_gpus("all"), Ok(Gpus::All));
        assert_eq!(parse_gpus("2"), Ok(Gpus::First(2)));
        assert_eq!(parse_gpus("0,1"), Ok(Gpus::These(vec![0, 1])));
        assert_eq!(parse_gpus("1,"), Ok(Gpus::These(vec![1])));
        for wrong in ["", "0", "-1", ",", "0,,1", "0,x", "0,-1", "every", "0,300"] {
            assert!(parse_gpus(wrong).is_err(), "{wrong}");
        }
    }
}
