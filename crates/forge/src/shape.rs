//! The numbers that fix a `qwen3next` model, and the metadata that states them.

use gguf::{Array, Metadata, Value};

use crate::error::Error;

/// The architecture's name in `general.architecture`, and the prefix of its keys.
pub const ARCHITECTURE: &str = "qwen3next";

/// How the DeltaNet input projections are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `attn_qkv` (q | k | v) and `attn_gate` (z): what converters write today.
    #[default]
    Split,
    /// One fused `ssm_in` of q, k, v, z per key head, as early files have it.
    Legacy,
}

/// The shape of a `qwen3next` model. [`Shape::default`] is the 80B.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Layers of the trunk, without MTP blocks.
    pub layers: u32,
    /// MTP blocks after the trunk (`nextn_predict_layers`).
    pub mtp_layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Tokens in the vocabulary.
    pub vocab: u32,
    /// Positions the model claims to support.
    pub context: u32,
    /// Query heads of an attention layer.
    pub heads: u32,
    /// Key/value heads of an attention layer.
    pub kv_heads: u32,
    /// Width of one attention head.
    pub head_dim: u32,
    /// Leading dimensions of a head that are rotated.
    pub rope_dims: u32,
    /// Base of the rotation frequencies.
    pub rope_base: f32,
    /// Every n-th layer of the trunk is an attention layer.
    pub attention_interval: u32,
    /// Which trunk layers are attention layers, where no interval says so.
    pub attention_layers: Option<Vec<bool>>,
    /// Key heads of a DeltaNet layer.
    pub key_heads: u32,
    /// Value heads of a DeltaNet layer, a multiple of the key heads.
    pub value_heads: u32,
    /// Width of a DeltaNet head, keys and values alike.
    pub state_dim: u32,
    /// Taps of the causal convolution.
    pub conv_taps: u32,
    /// Routed experts of a layer.
    pub experts: u32,
    /// Routed experts a token uses.
    pub experts_used: u32,
    /// Inner width of a routed expert.
    pub expert_width: u32,
    /// Inner width of the shared expert.
    pub shared_width: u32,
    /// Epsilon of every RMS norm.
    pub eps: f32,
    /// Whether the embedding serves as output projection too.
    pub tied: bool,
    /// How DeltaNet input projections are stored.
    pub layout: Layout,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            layers: 48,
            mtp_layers: 0,
            hidden: 2048,
            vocab: 151_936,
            context: 262_144,
            heads: 16,
            kv_heads: 2,
            head_dim: 256,
            rope_dims: 64,
            rope_base: 1e7,
            attention_interval: 4,
            attention_layers: None,
            key_heads: 16,
            value_heads: 32,
            state_dim: 128,
            conv_taps: 4,
            experts: 512,
            experts_used: 10,
            expert_width: 512,
            shared_width: 512,
            eps: 1e-6,
            tied: false,
            layout: Layout::Split,
        }
    }
}

impl Shape {
    /// Channels of all DeltaNet keys (or queries).
    pub(crate) fn key_dim(&self) -> u64 {
        u64::from(self.key_heads) * u64::from(self.state_dim)
    }

    /// Channels of all DeltaNet values.
    pub(crate) fn value_dim(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.state_dim)
    }

    /// Trunk and MTP blocks together, as `block_count` has it.
    pub fn blocks(&self) -> u32 {
        self.layers + self.mtp_layers
    }

    /// Whether block `block` mixes by attention; MTP blocks do.
    pub fn is_attention(&self, block: u32) -> bool {
        if block >= self.layers {
            return true;
        }
        match &self.attention_layers {
            Some(list) => list[block as usize],
            None => (block + 1).is_multiple_of(self.attention_interval),
        }
    }

    /// Refuses shapes that make no model, naming the number at fault.
    pub fn check(&self) -> Result<(), Error> {
        let numbers = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("vocab", self.vocab),
            ("context", self.context),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("attention-interval", self.attention_interval),
            ("key-heads", self.key_heads),
            ("value-heads", self.value_heads),
            ("state-dim", self.state_dim),
            ("conv-taps", self.conv_taps),
            ("experts", self.experts),
            ("experts-used", self.experts_used),
            ("expert-width", self.expert_width),
            ("shared-width", self.shared_width),
        ];
        for (name, number) in numbers {
            if number == 0 {
                return Err(Error::option(name, "0 makes no model"));
            }
        }
        // Bounds keep the tensor list in memory, and every product of the layout inside its integer.
        let bounds = [
            ("layers", u64::from(self.layers), 4096),
            ("mtp-layers", u64::from(self.mtp_layers), 16),
            ("hidden", u64::from(self.hidden), 1 << 20),
            ("vocab", u64::from(self.vocab), 1 << 24),
            ("heads × head-dim", u64::from(self.heads) * u64::from(self.head_dim), 1 << 20),
            ("key-heads × state-dim", self.key_dim(), 1 << 20),
            ("value-heads × state-dim", self.value_dim(), 1 << 20),
            ("conv-taps", u64::from(self.conv_taps), 1 << 10),
            ("experts", u64::from(self.experts), 1 << 16),
            ("expert-width", u64::from(self.expert_width), 1 << 20),
            ("shared-width", u64::from(self.shared_width), 1 << 20),
        ];
        for (name, number, limit) in bounds {
            if number > limit {
                return Err(Error::option(name, format!("{number} is more than {limit}")));
            }
        }
        let divides = [
            ("heads", self.heads, "kv-heads", self.kv_heads),
            ("value-heads", self.value_heads, "key-heads", self.key_heads),
            ("rope-dims", self.rope_dims, "2", 2),
        ];
        for (name, number, of, by) in divides {
            if !number.is_multiple_of(by) {
                return Err(Error::option(name, format!("{number} is not a multiple of {of} ({by})")));
            }
        }
        let within = [
            ("experts-used", self.experts_used, "experts", self.experts),
            ("rope-dims", self.rope_dims, "head-dim", self.head_dim),
        ];
        for (name, number, of, limit) in within {
            if number > limit {
                return Err(Error::option(name, format!("{number} is more than {of} ({limit})")));
            }
        }
        if let Some(list) = &self.attention_layers
            && list.len() != self.layers as usize
        {
            let what = format!("{} entries for {} layers", list.len(), self.layers);
            return Err(Error::option("attention-layers", what));
        }
        Ok(())
    }

    /// Writes the shape down under the keys of the architecture.
    pub(crate) fn describe(&self, metadata: &mut Metadata) {
        let mut set = |key: &str, value: Value| metadata.set(format!("{ARCHITECTURE}.{key}"), value);
        let numbers = [
            ("block_count", self.blocks()),
            ("context_length", self.context),
            ("embedding_length", self.hidden),
            ("vocab_size", self.vocab),
            // No layer has a plain feed-forward part; readers that ask for its width get the shared one's.
            ("feed_forward_length", self.shared_width),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.rope_dims),
            ("ssm.conv_kernel", self.conv_taps),
            ("ssm.state_size", self.state_dim),
            ("ssm.group_count", self.key_heads),
            ("ssm.time_step_rank", self.value_heads),
            ("ssm.inner_size", self.value_heads * self.state_dim),
            ("expert_count", self.experts),
            ("expert_used_count", self.experts_used),
            ("expert_feed_forward_length", self.expert_width),
            ("expert_shared_feed_forward_length", self.shared_width),
        ];
        for (key, number) in numbers {
            set(key, Value::U32(number));
        }
        set("rope.freq_base", Value::F32(self.rope_base));
        set("attention.layer_norm_rms_epsilon", Value::F32(self.eps));
        match &self.attention_layers {
            Some(_) => {
                let recurrent = (0..self.blocks()).map(|block| !self.is_attention(block)).collect();
                set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
            }
            None => set("full_attention_interval", Value::U32(self.attention_interval)),
        }
        if self.mtp_layers > 0 {
            set("nextn_predict_layers", Value::U32(self.mtp_layers));
        }
    }
}
