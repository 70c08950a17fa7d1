//! The shape of a model, read from metadata and checked once, so that nothing behind it has to ask.

use gguf::{Array, Metadata, Value};

use crate::error::{Error, Result, label};

/// The kind of a layer's mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet: a recurrent state of fixed size.
    Delta,
    /// Gated softmax attention over a KV cache.
    Attention,
}

/// The shape of the attention layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; query head h reads key/value head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Numbers in a head's query, key and value.
    pub head_dim: usize,
    /// Leading dimensions of a head that are rotated, pair (i, i + rope_dims / 2).
    pub rope_dims: usize,
    /// Base of the rotation's frequencies.
    pub rope_base: f64,
}

impl AttentionSpec {
    /// Columns of the queries of a row.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of the keys (or values) of a row.
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// The shape of the DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Key heads (also query heads).
    pub key_heads: usize,
    /// Value heads; value head h uses key head h / (value_heads / key_heads).
    pub value_heads: usize,
    /// Numbers in a head's key and in its value.
    pub head_dim: usize,
    /// Taps of the causal convolution; the last one meets the current token.
    pub taps: usize,
}

impl DeltaSpec {
    /// Epsilon of the L2 norms of queries and keys, x / sqrt(Σx² + eps): a constant of the architecture, as in
    /// Transformers, not a key of the file.
    pub const L2_EPS: f32 = 1e-6;

    /// Columns of all queries (or keys) of a row.
    pub fn key_dim(&self) -> usize {
        self.key_heads * self.head_dim
    }

    /// Columns of all values of a row.
    pub fn value_dim(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Channels of the convolution: q | k | v.
    pub fn channels(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }
}

/// The shape of the mixture of experts in every layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeSpec {
    /// Routed experts in a layer.
    pub experts: usize,
    /// Experts a token uses.
    pub used: usize,
    /// Inner width of a routed expert, for each layer.
    pub widths: Vec<usize>,
    /// Inner width of the shared expert.
    pub shared_width: usize,
}

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// `general.name`, or the architecture.
    pub name: String,
    /// Layers of the trunk, without MTP blocks.
    pub layers: Vec<LayerKind>,
    /// Blocks behind the trunk that predict further tokens (declared by `nextn_predict_layers`).
    pub mtp_blocks: usize,
    /// Columns of a hidden row.
    pub hidden: usize,
    /// Token ids.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Attention layers.
    pub attention: AttentionSpec,
    /// DeltaNet layers.
    pub delta: DeltaSpec,
    /// Experts.
    pub moe: MoeSpec,
}

impl Spec {
    /// The architecture this crate reads.
    pub const ARCHITECTURE: &'static str = "qwen3next";

    /// Reads the shape; `vocab` is the number of rows of the token embedding.
    ///
    /// # Errors
    /// [`Error::Architecture`], [`Error::MissingKey`] and [`Error::BadKey`], naming the key.
    pub fn from_metadata(metadata: &Metadata, vocab: usize) -> Result<Spec> {
        let found = metadata.str("general.architecture")?.unwrap_or("(none)");
        if found != Spec::ARCHITECTURE {
            return Err(Error::Architecture { found: found.to_string() });
        }
        let keys = Keys { metadata };
        let blocks = keys.count("block_count", "how many blocks there are")?;
        let mtp_blocks = keys.optional("nextn_predict_layers")?.unwrap_or(0);
        if blocks > MOST_BLOCKS {
            return keys.bad("block_count", blocks, format!("at most {MOST_BLOCKS} blocks"));
        }
        if mtp_blocks >= blocks {
            return keys.bad("nextn_predict_layers", mtp_blocks, format!("fewer than the {blocks} blocks"));
        }
        let layers = keys.layer_kinds(blocks, blocks - mtp_blocks)?;
        keys.refuse_rope_scaling()?;
        keys.refuse_other_routing()?;
        let spec = Spec {
            name: metadata.str("general.name")?.unwrap_or(found).to_string(),
            mtp_blocks,
            hidden: keys.count("embedding_length", "the width of a hidden row")?,
            vocab,
            context: keys.count("context_length", "how many positions the model was made for")?,
            rms_eps: keys.epsilon()?,
            attention: keys.attention()?,
            delta: keys.delta()?,
            moe: keys.moe(blocks, layers.len())?,
            layers,
        };
        Ok(spec)
    }

    /// DeltaNet layers of the trunk.
    pub fn delta_layers(&self) -> usize {
        self.layers.iter().filter(|kind| **kind == LayerKind::Delta).count()
    }

    /// Attention layers of the trunk.
    pub fn attention_layers(&self) -> usize {
        self.layers.len() - self.delta_layers()
    }

    /// The number of layer `layer` among those of its kind.
    pub fn ordinal(&self, layer: usize) -> usize {
        self.layers[..layer].iter().filter(|kind| **kind == self.layers[layer]).count()
    }
}

/// Metadata under the architecture's prefix.
struct Keys<'a> {
    metadata: &'a Metadata,
}

/// No dimension of a real model comes near this; products of two stay far from overflow.
const LARGEST: usize = 1 << 28;

/// Lists of one entry a block are made before the tensors are seen.
const MOST_BLOCKS: usize = 4096;

impl Keys<'_> {
    fn name(key: &str) -> String {
        format!("{}.{key}", Spec::ARCHITECTURE)
    }

    fn bad<T>(&self, key: &str, found: impl ToString, expected: impl ToString) -> Result<T> {
        let (key, found, expected) = (Keys::name(key), found.to_string(), expected.to_string());
        Err(Error::BadKey { key, found, expected })
    }

    fn optional(&self, key: &str) -> Result<Option<usize>> {
        let value = self.metadata.u64(&Keys::name(key))?;
        match value {
            Some(v) if v > LARGEST as u64 => self.bad(key, v, format!("at most {LARGEST}")),
            other => Ok(other.map(|v| v as usize)),
        }
    }

    /// A number that must be there and be positive.
    fn count(&self, key: &str, meaning: &'static str) -> Result<usize> {
        match self.optional(key)? {
            None => Err(Error::MissingKey { key: Keys::name(key), meaning }),
            Some(0) => self.bad(key, 0, "a positive number"),
            Some(n) => Ok(n),
        }
    }

    fn epsilon(&self) -> Result<f32> {
        let key = "attention.layer_norm_rms_epsilon";
        match self.metadata.f32(&Keys::name(key))? {
            None => Err(Error::MissingKey { key: Keys::name(key), meaning: "the epsilon of its norms" }),
            Some(eps) if eps.is_finite() && eps > 0.0 => Ok(eps),
            Some(eps) => self.bad(key, eps, "a small positive number"),
        }
    }

    /// From the explicit list (a flag for each block, or the numbers of the recurrent ones), else every
    /// `full_attention_interval`-th layer attends.
    fn layer_kinds(&self, blocks: usize, trunk: usize) -> Result<Vec<LayerKind>> {
        let kind = |recurrent: bool| if recurrent { LayerKind::Delta } else { LayerKind::Attention };
        let key = "attention.recurrent_layers";
        if self.metadata.contains(&Keys::name(key)) {
            let recurrent = self.recurrent_layers(key, blocks, trunk)?;
            return Ok(recurrent[..trunk].iter().map(|&recurrent| kind(recurrent)).collect());
        }
        let interval = match self.optional("full_attention_interval")? {
            None => 4,
            Some(0) => return self.bad("full_attention_interval", 0, "a positive number"),
            Some(n) => n,
        };
        Ok((0..trunk).map(|i| kind(!(i + 1).is_multiple_of(interval))).collect())
    }

    /// A flag for each block: from flags for all blocks or those of the trunk, or from ascending layer numbers.
    /// Numbers that are all 0 or 1 are flags if there are as many of them as flags.
    fn recurrent_layers(&self, key: &str, blocks: usize, trunk: usize) -> Result<Vec<bool>> {
        let (list, bools) = match self.metadata.get(&Keys::name(key)) {
            Some(Value::Array(Array::Bool(flags))) => (flags.iter().map(|&f| f.into()).collect(), true),
            _ => (self.metadata.ints(&Keys::name(key))?.unwrap_or_default(), false),
        };
        let complete = list.len() == blocks || list.len() == trunk;
        if bools && !complete {
            return self.bad(key, format!("{} flags", list.len()), format!("{blocks} flags"));
        }
        if complete && list.iter().all(|&f| f == 0 || f == 1) {
            return Ok(list.iter().map(|&f| f == 1).collect());
        }
        if let Some(bad) = list.iter().find(|&&i| i < 0 || i >= blocks as i64) {
            return self.bad(key, format!("a list with {bad}"), format!("layer numbers below {blocks}"));
        }
        if !list.is_sorted_by(|a, b| a < b) {
            return self.bad(key, "neither a flag for each block nor ascending", "one of the two");
        }
        let mut flags = vec![false; blocks];
        list.iter().for_each(|&i| flags[i as usize] = true);
        Ok(flags)
    }

    fn attention(&self) -> Result<AttentionSpec> {
        let heads = self.count("attention.head_count", "the number of query heads")?;
        let kv_heads = self.kv_heads()?;
        let head_dim = self.count("attention.key_length", "the size of a head")?;
        let value_dim = self.optional("attention.value_length")?.unwrap_or(head_dim);
        if !heads.is_multiple_of(kv_heads) {
            return self.bad("attention.head_count", heads, format!("a multiple of the {kv_heads} KV heads"));
        }
        if value_dim != head_dim {
            return self.bad("attention.value_length", value_dim, format!("{head_dim}, as the key length"));
        }
        let rope_dims = self.optional("rope.dimension_count")?.unwrap_or(head_dim);
        if rope_dims == 0 || rope_dims > head_dim || rope_dims % 2 == 1 {
            return self.bad(
                "rope.dimension_count",
                rope_dims,
                format!("an even number from 2 to {head_dim}"),
            );
        }
        let base = self.metadata.f32(&Keys::name("rope.freq_base"))?.unwrap_or(10_000.0);
        if !(base.is_finite() && base > 1.0) {
            return self.bad("rope.freq_base", base, "a number above 1");
        }
        Ok(AttentionSpec { heads, kv_heads, head_dim, rope_dims, rope_base: f64::from(base) })
    }

    /// A number, or an array with a number for each block in which recurrent ones may be 0.
    fn kv_heads(&self) -> Result<usize> {
        let key = "attention.head_count_kv";
        let Some(Value::Array(_)) = self.metadata.get(&Keys::name(key)) else {
            return self.count(key, "the number of KV heads");
        };
        let list = self.metadata.ints(&Keys::name(key))?.unwrap_or_default();
        let mut set = list.iter().filter(|&&n| n != 0);
        match set.next() {
            Some(&n) if n > 0 && n <= LARGEST as i64 && set.all(|&m| m == n) => Ok(n as usize),
            _ => {
                let found = format!("an array of {} numbers", list.len());
                self.bad(key, found, "the same positive number in every attention layer")
            }
        }
    }

    fn delta(&self) -> Result<DeltaSpec> {
        let key_heads = self.count("ssm.group_count", "the number of DeltaNet key heads")?;
        let value_heads = self.count("ssm.time_step_rank", "the number of DeltaNet value heads")?;
        let head_dim = self.count("ssm.state_size", "the size of a DeltaNet head")?;
        let inner = self.count("ssm.inner_size", "the width of all DeltaNet values")?;
        let taps = self.count("ssm.conv_kernel", "the taps of the convolution")?;
        if !value_heads.is_multiple_of(key_heads) {
            return self.bad(
                "ssm.time_step_rank",
                value_heads,
                format!("a multiple of {key_heads} key heads"),
            );
        }
        if value_heads.checked_mul(head_dim) != Some(inner) {
            return self.bad("ssm.inner_size", inner, format!("{value_heads} heads of {head_dim}"));
        }
        if taps > 64 {
            return self.bad("ssm.conv_kernel", taps, "at most 64 taps");
        }
        Ok(DeltaSpec { key_heads, value_heads, head_dim, taps })
    }

    fn moe(&self, blocks: usize, trunk: usize) -> Result<MoeSpec> {
        let experts = self.count("expert_count", "the number of experts")?;
        let used = self.count("expert_used_count", "how many experts a token uses")?;
        if used > experts {
            return self.bad("expert_used_count", used, format!("at most the {experts} experts"));
        }
        let key = "expert_feed_forward_length";
        let widths = match self.metadata.get(&Keys::name(key)) {
            Some(Value::Array(_)) => {
                let list = self.metadata.ints(&Keys::name(key))?.unwrap_or_default();
                if list.len() != blocks && list.len() != trunk {
                    return self.bad(key, format!("{} widths", list.len()), format!("{blocks} widths"));
                }
                if let Some(bad) = list.iter().find(|&&w| w <= 0 || w > LARGEST as i64) {
                    return self.bad(key, bad, "positive widths");
                }
                list[..trunk].iter().map(|&w| w as usize).collect()
            }
            _ => vec![self.count(key, "the width of an expert")?; trunk],
        };
        let shared_width =
            self.count("expert_shared_feed_forward_length", "the width of the shared expert")?;
        Ok(MoeSpec { experts, used, widths, shared_width })
    }

    /// A factor without a type scales linearly, as in other readers; the type `none` makes the factor void.
    fn refuse_rope_scaling(&self) -> Result<()> {
        let kind = self.metadata.str(&Keys::name("rope.scaling.type"))?.unwrap_or("linear");
        if kind == "none" {
            return Ok(());
        }
        if kind != "linear" && kind != "yarn" {
            return self.bad("rope.scaling.type", format!("`{}`", label(kind)), "no scaling");
        }
        // Of these types, factors of 1 (or 0: not set) change nothing.
        for key in ["rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear"] {
            let factor = self.metadata.f32(&Keys::name(key))?.unwrap_or(1.0);
            if factor != 1.0 && factor != 0.0 {
                return self.bad(key, format!("{factor} (scaling `{kind}`)"), "no scaling");
            }
        }
        Ok(())
    }

    /// The router is a softmax over all experts whose chosen weights are renormalised to sum 1.
    fn refuse_other_routing(&self) -> Result<()> {
        let key = "expert_gating_func";
        if let Some(function) = self.optional(key)?.filter(|&f| f > 1) {
            return self.bad(key, function, "1 (softmax)");
        }
        let key = "expert_group_count";
        if let Some(groups) = self.optional(key)?.filter(|&groups| groups > 1) {
            return self.bad(key, groups, "1: the router chooses among all experts");
        }
        if self.metadata.bool(&Keys::name("expert_weights_norm"))? == Some(false) {
            return self.bad("expert_weights_norm", false, "true");
        }
        match self.metadata.f32(&Keys::name("expert_weights_scale"))? {
            Some(scale) if scale != 1.0 && scale != 0.0 => self.bad("expert_weights_scale", scale, "1"),
            _ => Ok(()),
        }
    }
}
