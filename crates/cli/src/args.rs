//! Command-line arguments, as clap derives them.

use std::ops::Range;
use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use quant::Type;

use crate::cache_args::{CacheArgs, DoctorArgs, PlanArgs};

use crate::bench::args::BenchArgs;
use crate::serve::args::ServeArgs;

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
    /// Serve a model over HTTP, as agents and OpenAI's clients speak it.
    Serve(ServeArgs),
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
    /// Measure speed: tokens per second, the time of every stage, and how far from this machine's peak it is.
    Bench(BenchArgs),
}

/// Which backend computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Multi-threaded SIMD.
    Cpu,
    /// One NVIDIA GPU that holds the whole model.
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
    /// Tokens ingested together.
    #[arg(long, value_name = "N", default_value = "2048", value_parser = parse_positive)]
    pub chunk: usize,
    /// Keep activations in single precision where they meet quantised weights; slower [cpu].
    #[arg(long)]
    pub exact: bool,
    /// Experts in bounded memory.
    #[command(flatten)]
    pub cache: CacheArgs,
}

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
    /// Print where the time went, stage by stage.
    #[arg(long)]
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

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Folder with config.json, tokenizer.json and safetensors files.
    pub source: PathBuf,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Type of all matrices.
    #[arg(long = "type", value_name = "TYPE", value_parser = parse_type, default_value = "BF16")]
    pub ty: Type,
    /// Context length to record instead of the checkpoint's.
    #[arg(long, value_name = "N")]
    pub context_length: Option<u32>,
    /// Name to record [default: the folder's].
    #[arg(long)]
    pub name: Option<String>,
    /// Fused DeltaNet projections (`ssm_in`), as older files have them.
    #[arg(long)]
    pub legacy_layout: bool,
    /// Keep the MTP block.
    #[arg(long)]
    pub mtp: bool,
    /// How to work and report.
    #[command(flatten)]
    pub work: WorkArgs,
    /// Types of classes of tensors, where they differ.
    #[command(flatten)]
    pub mix: MixArgs,
}

/// Arguments of `quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// The file to read.
    pub input: PathBuf,
    /// The file to write.
    pub output: PathBuf,
    /// How to work and report.
    #[command(flatten)]
    pub work: WorkArgs,
    /// Types of classes of tensors; a class without one keeps its types.
    #[command(flatten)]
    pub mix: MixArgs,
}

/// Weight types by class of tensor.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Types")]
pub struct MixArgs {
    /// Routed experts.
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub experts: Option<Type>,
    /// Down matrices of routed experts [default: as --experts].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub down: Option<Type>,
    /// Routed experts of some layers, such as `40-47=IQ2_XS`, `down:3=Q4_K` or `gate_up:0-7=IQ3_XXS`; repeatable.
    #[arg(long, value_name = "RULE", value_parser = parse_layers)]
    pub layer_types: Vec<forge::LayerType>,
    /// All other matrices.
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub dense: Option<Type>,
    /// Token embedding [default: as --dense].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub embedding: Option<Type>,
    /// Output projection [default: as --dense].
    #[arg(long = "output-type", value_name = "TYPE", value_parser = parse_type)]
    pub output_matrix: Option<Type>,
    /// Attention projections [default: as --dense].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub attention: Option<Type>,
    /// DeltaNet projections [default: as --dense].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub delta: Option<Type>,
    /// DeltaNet beta and alpha projections [default: as --delta].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub beta_alpha: Option<Type>,
    /// Shared experts [default: as --dense].
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    pub shared: Option<Type>,
}

impl MixArgs {
    /// The mix, over `base` where nothing is said.
    pub fn over(&self, base: forge::Mix) -> forge::Mix {
        let mut layers = base.layers;
        layers.extend(self.layer_types.iter().copied());
        forge::Mix {
            gate_up: self.experts.or(base.gate_up),
            down: self.down.or(self.experts).or(base.down),
            layers,
            dense: self.dense.or(base.dense),
            embedding: self.embedding.or(base.embedding),
            output: self.output_matrix.or(base.output),
            attention: self.attention.or(base.attention),
            delta: self.delta.or(base.delta),
            beta_alpha: self.beta_alpha.or(base.beta_alpha),
            shared: self.shared.or(base.shared),
        }
    }
}

/// How commands that make files work and report.
#[derive(Clone, Debug, Args)]
pub struct WorkArgs {
    /// Worker threads [default: the processors this program may use].
    #[arg(long, value_name = "N", value_parser = parse_positive)]
    pub threads: Option<usize>,
    /// Print the summary as JSON.
    #[arg(long)]
    pub json: bool,
    /// No progress.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Arguments of `synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// The file to write.
    pub output: PathBuf,
    /// A mix of types people use; the type options change it.
    #[arg(long, value_enum, default_value = "iq2xxs")]
    pub recipe: RecipeName,
    /// Type of all matrices, instead of a recipe.
    #[arg(long = "type", value_name = "TYPE", value_parser = parse_type, conflicts_with = "recipe")]
    pub ty: Option<Type>,
    /// Same seed, same file.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// How unevenly experts are used: 0 is uniform.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub skew: f32,
    /// How to work and report.
    #[command(flatten)]
    pub work: WorkArgs,
    /// Types of classes of tensors, where they differ.
    #[command(flatten)]
    pub mix: MixArgs,
    /// Shape [default: that of Qwen3-Next-80B-A3B].
    #[command(flatten)]
    pub shape: ShapeArgs,
}

/// Named mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecipeName {
    /// IQ2_XXS experts, Q5_K dense, Q6_K output, Q8_0 shared experts: 21.8 GB.
    Iq2xxs,
    /// IQ1_M experts, IQ2_XS in the last 8 layers, Q4_K dense: 19.3 GB.
    F2,
    /// IQ3_XXS experts (down IQ3_S), Q5_K dense: 32.6 GB.
    Iq3xxs,
    /// Everything F32.
    F32,
}

/// Numbers of a synthetic model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Shape")]
pub struct ShapeArgs {
    /// Layers of the trunk.
    #[arg(long, value_name = "N")]
    pub layers: Option<u32>,
    /// Columns of a hidden row.
    #[arg(long, value_name = "N")]
    pub hidden: Option<u32>,
    /// Token ids.
    #[arg(long, value_name = "N")]
    pub vocab: Option<u32>,
    /// Context length.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Query heads.
    #[arg(long, value_name = "N")]
    pub heads: Option<u32>,
    /// Key/value heads.
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<u32>,
    /// Numbers in an attention head.
    #[arg(long, value_name = "N")]
    pub head_dim: Option<u32>,
    /// Rotated dimensions of an attention head.
    #[arg(long, value_name = "N")]
    pub rope_dims: Option<u32>,
    /// Every N-th layer attends.
    #[arg(long, value_name = "N")]
    pub attention_interval: Option<u32>,
    /// DeltaNet key heads.
    #[arg(long, value_name = "N")]
    pub key_heads: Option<u32>,
    /// DeltaNet value heads.
    #[arg(long, value_name = "N")]
    pub value_heads: Option<u32>,
    /// Numbers in a DeltaNet head.
    #[arg(long, value_name = "N")]
    pub state_dim: Option<u32>,
    /// Routed experts in a layer.
    #[arg(long = "expert-count", value_name = "N")]
    pub expert_count: Option<u32>,
    /// Experts a token uses.
    #[arg(long = "experts-used", value_name = "N")]
    pub experts_used: Option<u32>,
    /// Inner width of a routed expert.
    #[arg(long, value_name = "N")]
    pub expert_width: Option<u32>,
    /// Inner width of the shared expert.
    #[arg(long, value_name = "N")]
    pub shared_width: Option<u32>,
    /// Output projection tied to the embedding.
    #[arg(long)]
    pub tied: bool,
    /// Fused DeltaNet projections, as older files have them.
    #[arg(long)]
    pub legacy_layout: bool,
    /// Add an MTP block.
    #[arg(long)]
    pub mtp: bool,
}

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

fn parse_layers(text: &str) -> Result<forge::LayerType, String> {
    text.parse().map_err(|error: forge::Error| error.to_string())
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let (start, end) = text.split_once("..").ok_or("should look like 0..16")?;
    let number = |part: &str| part.parse::<usize>().map_err(|_| format!("`{part}` is not a whole number"));
    let range = number(start)?..number(end)?;
    if range.is_empty() { Err("is empty".to_string()) } else { Ok(range) }
}
