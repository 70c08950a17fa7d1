//! A Hugging Face checkpoint of `Qwen3NextForCausalLM` becomes a GGUF file.
//!
//! Tensors are streamed: whatever the size of the model, memory holds the headers and a few rows.

use std::collections::HashSet;
use std::path::Path;

use gguf::Metadata;
use quant::Type;
use text::Vocabulary;

use crate::checkpoint::{Checkpoint, Stored};
use crate::config::Config;
use crate::error::{Error, some_of};
use crate::gather::{Gather, Map};
use crate::mix::Mix;
use crate::output::{Output, Planned, with_threads};
use crate::progress::OnProgress;
use crate::shape::{ARCHITECTURE, Layout, Shape};
use crate::summary::Summary;
use crate::tensors::{Role, Tensor, tensors};
use crate::vocabulary::describe_vocabulary;

/// How to convert.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// Types by tensor class; what is not chosen is BF16.
    pub mix: Mix,
    /// How the DeltaNet input projections are stored.
    pub layout: Layout,
    /// `context_length` instead of the checkpoint's `max_position_embeddings`.
    pub context_length: Option<u32>,
    /// Include the multi-token prediction block, if the checkpoint has one, as block after the last layer.
    pub mtp: bool,
    /// `general.name`; the directory's name if `None`.
    pub name: Option<String>,
    /// Threads that encode; 0 for the ambient rayon pool.
    pub threads: usize,
}

/// Converts the checkpoint in directory `dir` to the file `out`, which appears only when it is complete.
///
/// `dir` holds `config.json`, `tokenizer.json`, usually `tokenizer_config.json` and `chat_template.jinja`, and
/// the weights as `model.safetensors` or as the shards of `model.safetensors.index.json`. Experts may be stored
/// one by one or fused. MTP tensors (`mtp.*`) are left out, unless asked for, and reported in [`Summary::skipped`].
///
/// # Errors
///
/// Anything in the configuration, the tokenizer or the tensor list that cannot be expressed, by name; a damaged
/// file; a failed write; [`Error::Cancelled`].
pub fn convert(
    dir: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut OnProgress<'_>,
) -> Result<Summary, Error> {
    options.mix.check_encodable()?;
    let config = Config::open(dir)?;
    let mut shape = config.shape(options.layout)?;
    if let Some(context) = options.context_length {
        shape.context = context;
        shape.check()?;
    }
    let checkpoint = Checkpoint::open(dir)?;
    if options.mtp {
        shape.mtp_layers = u32::from(checkpoint.get("mtp.fc.weight").is_some());
    }
    options.mix.check_layers(shape.blocks())?;
    let (sources, skipped) = Sources::resolve(&checkpoint, &shape)?;

    let mut metadata = Metadata::new();
    metadata.set("general.architecture", ARCHITECTURE);
    metadata.set("general.type", "model");
    metadata.set("general.name", options.name.clone().unwrap_or_else(|| directory_name(dir)));
    shape.describe(&mut metadata);
    config.describe_rope_scaling(&mut metadata)?;
    describe_vocabulary(&vocabulary(dir, &config, &shape)?, &mut metadata);

    let plan: Vec<Planned> = sources
        .iter()
        .map(|(tensor, _)| {
            let class = tensor.role.class();
            let ty = options.mix.choose(class, tensor.block).unwrap_or(Type::BF16);
            Planned::new(tensor.name(), class, tensor.dims.clone(), ty)
        })
        .collect();
    with_threads(options.threads, || {
        let mut output = Output::create(out, metadata, &plan, progress)?;
        for (planned, (_, gather)) in plan.iter().zip(&sources) {
            output.encode(planned, |first, rows| gather.read(&checkpoint, first, rows))?;
        }
        Ok(Summary { skipped, ..output.finish()? })
    })
}

/// The tokenizer, one token per row of the embedding.
fn vocabulary(dir: &Path, config: &Config, shape: &Shape) -> Result<Vocabulary, Error> {
    let failed = |source| Error::Tokenizer { path: dir.join("tokenizer.json"), source };
    let mut vocabulary = Vocabulary::from_hf_folder(dir).map_err(failed)?;
    vocabulary.bos = vocabulary.bos.or(config.token_id("bos_token_id"));
    vocabulary.eos = vocabulary.eos.or(config.token_id("eos_token_id"));
    vocabulary.pad = vocabulary.pad.or(config.token_id("pad_token_id"));
    if vocabulary.tokens.len() > shape.vocab as usize {
        return Err(Error::Config {
            path: dir.join("config.json"),
            key: "vocab_size".into(),
            what: format!("is {}, but the tokenizer has {} tokens", shape.vocab, vocabulary.tokens.len()),
        });
    }
    vocabulary.pad_to(shape.vocab as usize);
    // What this build could not read again must not be written.
    text::Tokenizer::new(vocabulary.clone()).map_err(failed)?;
    Ok(vocabulary)
}

fn directory_name(dir: &Path) -> String {
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    full.file_name().map_or_else(|| ARCHITECTURE.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Finds the stored tensors that the file's tensors are made of.
struct Sources<'a> {
    checkpoint: &'a Checkpoint,
    shape: &'a Shape,
    used: HashSet<&'a str>,
    missing: Vec<String>,
}

type Resolved<'a> = (Vec<(Tensor, Gather<'a>)>, Vec<String>);

impl<'a> Sources<'a> {
    /// Every tensor of the file with its rows, and the names of those left out on purpose.
    fn resolve(checkpoint: &'a Checkpoint, shape: &'a Shape) -> Result<Resolved<'a>, Error> {
        let mut sources = Sources { checkpoint, shape, used: HashSet::new(), missing: Vec::new() };
        let mut resolved = Vec::new();
        for tensor in tensors(shape) {
            if let Some(gather) = sources.gather(&tensor)? {
                debug_assert_eq!(gather.rows(), tensor.dims[1..].iter().product::<u64>());
                gather.check_dtypes(checkpoint)?;
                resolved.push((tensor, gather));
            }
        }
        if !sources.missing.is_empty() {
            return Err(Error::MissingTensors {
                count: sources.missing.len(),
                names: some_of(&sources.missing),
            });
        }
        let mut rest: Vec<String> = checkpoint
            .tensors()
            .map(|stored| &stored.name)
            .filter(|name| !sources.used.contains(name.as_str()))
            .cloned()
            .collect();
        rest.sort_unstable();
        let (skipped, unknown): (Vec<_>, Vec<_>) = rest
            .into_iter()
            .partition(|name| name.starts_with("mtp.") || (shape.tied && name == "lm_head.weight"));
        if !unknown.is_empty() {
            return Err(Error::UnknownTensors { count: unknown.len(), names: some_of(&unknown) });
        }
        Ok((resolved, skipped))
    }

    /// The rows of one tensor, or `None` if a source is missing (which is noted).
    fn gather(&mut self, tensor: &Tensor) -> Result<Option<Gather<'a>>, Error> {
        match tensor.role {
            Role::Qkv => self.de_interleaved(tensor, 0..3),
            Role::Z => self.de_interleaved(tensor, 3..4),
            Role::Gate => self.experts(tensor, Some(0)),
            Role::Up => self.experts(tensor, Some(1)),
            Role::Down => self.experts(tensor, None),
            _ => self.whole(tensor),
        }
    }

    /// A tensor that is one stored tensor, element for element.
    fn whole(&mut self, tensor: &Tensor) -> Result<Option<Gather<'a>>, Error> {
        let (name, map) = stored_name(tensor.role);
        let name = self.full_name(tensor.block, name);
        let mut shape: Vec<u64> = tensor.dims.iter().rev().copied().collect();
        match tensor.role {
            Role::Conv => shape.insert(1, 1),
            Role::SharedScale => shape.insert(0, 1),
            _ => {}
        }
        let Some(stored) = self.take(&name, &shape)? else { return Ok(None) };
        let mut gather = Gather::new(tensor.dims[0], map);
        gather.push(stored, 0, tensor.dims[1..].iter().product());
        Ok(Some(gather))
    }

    /// Parts (0 = q, 1 = k, 2 = v, 3 = z) of the fused projection, whose rows lie per key head as q k v z: each part
    /// of all heads, then the next part.
    fn de_interleaved(
        &mut self,
        tensor: &Tensor,
        parts: std::ops::Range<usize>,
    ) -> Result<Option<Gather<'a>>, Error> {
        let (heads, dim) = (u64::from(self.shape.key_heads), u64::from(self.shape.state_dim));
        let values = u64::from(self.shape.value_heads / self.shape.key_heads) * dim;
        let lengths = [dim, dim, values, values];
        let starts = [0, dim, 2 * dim, 2 * dim + values];
        let stride = 2 * dim + 2 * values;

        let name = self.full_name(tensor.block, stored_name(Role::Fused).0);
        let hidden = u64::from(self.shape.hidden);
        let Some(stored) = self.take(&name, &[heads * stride, hidden])? else { return Ok(None) };
        let mut gather = Gather::new(hidden, Map::Keep);
        for part in parts {
            for head in 0..heads {
                gather.push(stored, head * stride + starts[part], lengths[part]);
            }
        }
        Ok(Some(gather))
    }

    /// All experts' matrices, expert after expert. Fused storage is `down_proj` [experts, hidden, width] and
    /// `gate_up_proj` [experts, 2·width, hidden], of which `half` 0 is gate and 1 is up.
    fn experts(&mut self, tensor: &Tensor, half: Option<u64>) -> Result<Option<Gather<'a>>, Error> {
        let &[columns, rows, experts] = tensor.dims.as_slice() else {
            unreachable!("experts have three dimensions")
        };
        let (projection, map) = stored_name(tensor.role);
        let mut gather = Gather::new(columns, map);
        let prefix = self.full_name(tensor.block, "mlp.experts.");
        let (fused, halves) = match half {
            Some(_) => (format!("{prefix}gate_up_proj"), 2),
            None => (format!("{prefix}down_proj"), 1),
        };
        if self.checkpoint.get(&fused).is_some() {
            let Some(stored) = self.take(&fused, &[experts, halves * rows, columns])? else {
                return Ok(None);
            };
            for expert in 0..experts {
                gather.push(stored, (expert * halves + half.unwrap_or(0)) * rows, rows);
            }
            return Ok(Some(gather));
        }
        for expert in 0..experts {
            if let Some(stored) = self.take(&format!("{prefix}{expert}.{projection}"), &[rows, columns])? {
                gather.push(stored, 0, rows);
            }
        }
        Ok((gather.rows() == rows * experts).then_some(gather))
    }

    /// The checkpoint's name of a tensor of a block. MTP blocks are numbered on their own; what only they have lies
    /// outside their layer.
    fn full_name(&self, block: Option<u32>, name: &str) -> String {
        match block {
            None => name.to_owned(),
            Some(_) if name.starts_with("mtp.") => name.to_owned(),
            Some(block) if block >= self.shape.layers => {
                format!("mtp.layers.{}.{name}", block - self.shape.layers)
            }
            Some(block) => format!("model.layers.{block}.{name}"),
        }
    }

    /// The stored tensor called `name`, which must have this shape (slowest first); a missing one is noted.
    fn take(&mut self, name: &str, shape: &[u64]) -> Result<Option<&'a Stored>, Error> {
        let Some(stored) = self.checkpoint.get(name) else {
            self.missing.push(name.to_owned());
            return Ok(None);
        };
        if stored.shape != shape {
            return Err(Error::Shape {
                name: name.to_owned(),
                found: stored.shape.clone(),
                expected: shape.to_vec(),
            });
        }
        self.used.insert(&stored.name);
        Ok(Some(stored))
    }
}

/// The checkpoint's name of a tensor (without the prefix of its layer), and what is done to its elements.
fn stored_name(role: Role) -> (&'static str, Map) {
    match role {
        Role::Embedding => ("model.embed_tokens.weight", Map::Keep),
        Role::OutputNorm => ("model.norm.weight", Map::PlusOne),
        Role::Output => ("lm_head.weight", Map::Keep),
        Role::AttnNorm => ("input_layernorm.weight", Map::PlusOne),
        Role::PostNorm => ("post_attention_layernorm.weight", Map::PlusOne),
        Role::Query => ("self_attn.q_proj.weight", Map::Keep),
        Role::Key => ("self_attn.k_proj.weight", Map::Keep),
        Role::Value => ("self_attn.v_proj.weight", Map::Keep),
        Role::AttnOut => ("self_attn.o_proj.weight", Map::Keep),
        Role::QueryNorm => ("self_attn.q_norm.weight", Map::PlusOne),
        Role::KeyNorm => ("self_attn.k_norm.weight", Map::PlusOne),
        Role::Qkv | Role::Z | Role::Fused => ("linear_attn.in_proj_qkvz.weight", Map::Keep),
        Role::BetaAlpha => ("linear_attn.in_proj_ba.weight", Map::Keep),
        Role::Conv => ("linear_attn.conv1d.weight", Map::Keep),
        Role::DtBias => ("linear_attn.dt_bias", Map::Keep),
        Role::A => ("linear_attn.A_log", Map::NegExp),
        // The gated norm's weights are plain, not zero-centred.
        Role::StateNorm => ("linear_attn.norm.weight", Map::Keep),
        Role::DeltaOut => ("linear_attn.out_proj.weight", Map::Keep),
        Role::Router => ("mlp.gate.weight", Map::Keep),
        // One matrix per expert, below `mlp.experts.E.`.
        Role::Gate => ("gate_proj.weight", Map::Keep),
        Role::Up => ("up_proj.weight", Map::Keep),
        Role::Down => ("down_proj.weight", Map::Keep),
        Role::SharedGate => ("mlp.shared_expert.gate_proj.weight", Map::Keep),
        Role::SharedUp => ("mlp.shared_expert.up_proj.weight", Map::Keep),
        Role::SharedDown => ("mlp.shared_expert.down_proj.weight", Map::Keep),
        Role::SharedScale => ("mlp.shared_expert_gate.weight", Map::Keep),
        Role::MtpProjection => ("mtp.fc.weight", Map::Keep),
        Role::MtpEmbeddingNorm => ("mtp.pre_fc_norm_embedding.weight", Map::PlusOne),
        Role::MtpHiddenNorm => ("mtp.pre_fc_norm_hidden.weight", Map::PlusOne),
        Role::MtpHeadNorm => ("mtp.norm.weight", Map::PlusOne),
    }
}
