//! The tensors of a `qwen3next` file: which there are, what each is for, how large it is.

use crate::shape::{Layout, Shape};

/// What tensors of a kind share: the choice of a type, a line of the summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// The token embedding.
    Embedding,
    /// The output projection.
    Output,
    /// Projections of attention layers.
    Attention,
    /// Projections of DeltaNet layers, without the small one for beta and alpha.
    Delta,
    /// The projection to beta and alpha, small and sensitive.
    BetaAlpha,
    /// The shared expert's matrices.
    Shared,
    /// Gate and up matrices of the routed experts.
    GateUp,
    /// Down matrices of the routed experts.
    Down,
    /// Any other matrix, such as the MTP block's input projection.
    Other,
    /// Norms, the router, the convolution, single rows: always F32.
    Fixed,
}

impl Class {
    /// Every class, in the order summaries list them.
    pub const ALL: [Class; 10] = [
        Class::Embedding,
        Class::Output,
        Class::Attention,
        Class::Delta,
        Class::BetaAlpha,
        Class::Shared,
        Class::GateUp,
        Class::Down,
        Class::Other,
        Class::Fixed,
    ];

    /// A short name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Class::Embedding => "embedding",
            Class::Output => "output",
            Class::Attention => "attention",
            Class::Delta => "delta",
            Class::BetaAlpha => "beta/alpha",
            Class::Shared => "shared expert",
            Class::GateUp => "experts gate/up",
            Class::Down => "experts down",
            Class::Other => "other",
            Class::Fixed => "norms, router",
        }
    }
}

/// What one tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Embedding,
    OutputNorm,
    Output,
    AttnNorm,
    PostNorm,
    Query,
    Key,
    Value,
    AttnOut,
    QueryNorm,
    KeyNorm,
    Qkv,
    Z,
    Fused,
    BetaAlpha,
    Conv,
    DtBias,
    A,
    StateNorm,
    DeltaOut,
    Router,
    Gate,
    Up,
    Down,
    SharedGate,
    SharedUp,
    SharedDown,
    SharedScale,
    MtpProjection,
    MtpEmbeddingNorm,
    MtpHiddenNorm,
    MtpHeadNorm,
}

impl Role {
    /// The tensor's name in the file, without `blk.N.`.
    fn name(self) -> &'static str {
        match self {
            Role::Embedding => "token_embd.weight",
            Role::OutputNorm => "output_norm.weight",
            Role::Output => "output.weight",
            Role::AttnNorm => "attn_norm.weight",
            Role::PostNorm => "post_attention_norm.weight",
            Role::Query => "attn_q.weight",
            Role::Key => "attn_k.weight",
            Role::Value => "attn_v.weight",
            Role::AttnOut => "attn_output.weight",
            Role::QueryNorm => "attn_q_norm.weight",
            Role::KeyNorm => "attn_k_norm.weight",
            Role::Qkv => "attn_qkv.weight",
            Role::Z => "attn_gate.weight",
            Role::Fused => "ssm_in.weight",
            Role::BetaAlpha => "ssm_ba.weight",
            Role::Conv => "ssm_conv1d.weight",
            Role::DtBias => "ssm_dt.bias",
            Role::A => "ssm_a",
            Role::StateNorm => "ssm_norm.weight",
            Role::DeltaOut => "ssm_out.weight",
            Role::Router => "ffn_gate_inp.weight",
            Role::Gate => "ffn_gate_exps.weight",
            Role::Up => "ffn_up_exps.weight",
            Role::Down => "ffn_down_exps.weight",
            Role::SharedGate => "ffn_gate_shexp.weight",
            Role::SharedUp => "ffn_up_shexp.weight",
            Role::SharedDown => "ffn_down_shexp.weight",
            Role::SharedScale => "ffn_gate_inp_shexp.weight",
            Role::MtpProjection => "nextn.eh_proj.weight",
            Role::MtpEmbeddingNorm => "nextn.enorm.weight",
            Role::MtpHiddenNorm => "nextn.hnorm.weight",
            Role::MtpHeadNorm => "nextn.shared_head_norm.weight",
        }
    }

    /// The class whose type the tensor gets.
    pub(crate) fn class(self) -> Class {
        match self {
            Role::Embedding => Class::Embedding,
            Role::Output => Class::Output,
            Role::Query | Role::Key | Role::Value | Role::AttnOut => Class::Attention,
            Role::Qkv | Role::Z | Role::Fused | Role::DeltaOut => Class::Delta,
            Role::BetaAlpha => Class::BetaAlpha,
            Role::SharedGate | Role::SharedUp | Role::SharedDown => Class::Shared,
            Role::Gate | Role::Up => Class::GateUp,
            Role::Down => Class::Down,
            Role::MtpProjection => Class::Other,
            _ => Class::Fixed,
        }
    }
}

/// One tensor of the file to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) role: Role,
    /// The block it belongs to.
    pub(crate) block: Option<u32>,
    /// Dimensions, fastest first.
    pub(crate) dims: Vec<u64>,
}

impl Tensor {
    /// The full name.
    pub(crate) fn name(&self) -> String {
        match self.block {
            Some(block) => format!("blk.{block}.{}", self.role.name()),
            None => self.role.name().to_owned(),
        }
    }
}

/// Every tensor of a model of this shape, in file order.
pub(crate) fn tensors(shape: &Shape) -> Vec<Tensor> {
    let (hidden, vocab) = (u64::from(shape.hidden), u64::from(shape.vocab));
    let mut list = Vec::new();
    let mut push = |block: Option<u32>, role: Role, dims: &[u64]| {
        list.push(Tensor { role, block, dims: dims.to_vec() });
    };
    push(None, Role::Embedding, &[hidden, vocab]);
    for block in 0..shape.blocks() {
        let mut push = |role: Role, dims: &[u64]| push(Some(block), role, dims);
        push(Role::AttnNorm, &[hidden]);
        if shape.is_attention(block) {
            attention(shape, &mut push);
        } else {
            delta(shape, &mut push);
        }
        push(Role::PostNorm, &[hidden]);
        experts(shape, &mut push);
        if block >= shape.layers {
            push(Role::MtpProjection, &[2 * hidden, hidden]);
            push(Role::MtpEmbeddingNorm, &[hidden]);
            push(Role::MtpHiddenNorm, &[hidden]);
            push(Role::MtpHeadNorm, &[hidden]);
        }
    }
    push(None, Role::OutputNorm, &[hidden]);
    if !shape.tied {
        push(None, Role::Output, &[hidden, vocab]);
    }
    list
}

fn attention(shape: &Shape, push: &mut impl FnMut(Role, &[u64])) {
    let (hidden, head) = (u64::from(shape.hidden), u64::from(shape.head_dim));
    let (queries, keys) = (u64::from(shape.heads) * head, u64::from(shape.kv_heads) * head);
    // A query and a gate per head.
    push(Role::Query, &[hidden, 2 * queries]);
    push(Role::Key, &[hidden, keys]);
    push(Role::Value, &[hidden, keys]);
    push(Role::QueryNorm, &[head]);
    push(Role::KeyNorm, &[head]);
    push(Role::AttnOut, &[queries, hidden]);
}

fn delta(shape: &Shape, push: &mut impl FnMut(Role, &[u64])) {
    let hidden = u64::from(shape.hidden);
    let (key, value, heads) = (shape.key_dim(), shape.value_dim(), u64::from(shape.value_heads));
    match shape.layout {
        Layout::Split => {
            push(Role::Qkv, &[hidden, 2 * key + value]);
            push(Role::Z, &[hidden, value]);
        }
        Layout::Legacy => push(Role::Fused, &[hidden, 2 * key + 2 * value]),
    }
    push(Role::BetaAlpha, &[hidden, 2 * heads]);
    push(Role::Conv, &[u64::from(shape.conv_taps), 2 * key + value]);
    push(Role::DtBias, &[heads]);
    push(Role::A, &[heads]);
    push(Role::StateNorm, &[u64::from(shape.state_dim)]);
    push(Role::DeltaOut, &[value, hidden]);
}

fn experts(shape: &Shape, push: &mut impl FnMut(Role, &[u64])) {
    let (hidden, experts) = (u64::from(shape.hidden), u64::from(shape.experts));
    let (width, shared) = (u64::from(shape.expert_width), u64::from(shape.shared_width));
    push(Role::Router, &[hidden, experts]);
    push(Role::Gate, &[hidden, width, experts]);
    push(Role::Up, &[hidden, width, experts]);
    push(Role::Down, &[width, hidden, experts]);
    push(Role::SharedGate, &[hidden, shared]);
    push(Role::SharedUp, &[hidden, shared]);
    push(Role::SharedDown, &[shared, hidden]);
    push(Role::SharedScale, &[hidden]);
}
