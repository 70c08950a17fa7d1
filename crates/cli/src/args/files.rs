//! Arguments of the commands that make model files: `convert`, `quantize`, `synth`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use quant::Type;

use super::{parse_positive, parse_type};

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

fn parse_layers(text: &str) -> Result<forge::LayerType, String> {
    text.parse().map_err(|error: forge::Error| error.to_string())
}
