//! Stages: the units of computation, of the profile and of parity.

use std::fmt;
use std::ops::Range;

/// One kind of work of the model. A backend implements each; a profile has a row for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Token ids to hidden rows.
    Embed,
    /// Norm; q, k, v, z, beta, alpha projections of a DeltaNet layer.
    DeltaProject,
    /// Causal convolution + SiLU, L2 norms, gated delta rule, gated RMSNorm.
    DeltaMix,
    /// Output projection of a DeltaNet layer + residual.
    DeltaOut,
    /// Norm; q + gate, k, v projections, q/k norms, partial RoPE, KV write.
    AttnProject,
    /// Causal attention over the cache, times sigmoid(gate).
    AttnMix,
    /// Output projection of an attention layer + residual.
    AttnOut,
    /// Norm; router logits, softmax, top-k, renormalisation; grouping of (expert, token) pairs.
    Route,
    /// Shared expert, sigmoid-gated.
    Shared,
    /// Routed experts over the grouped pairs; weighted sum + residual.
    Experts,
    /// Final norm + output projection, for the rows that need logits.
    Head,
}

impl Stage {
    /// Every stage, in the order of the profile.
    pub const ALL: [Stage; 11] = [
        Stage::Embed,
        Stage::DeltaProject,
        Stage::DeltaMix,
        Stage::DeltaOut,
        Stage::AttnProject,
        Stage::AttnMix,
        Stage::AttnOut,
        Stage::Route,
        Stage::Shared,
        Stage::Experts,
        Stage::Head,
    ];

    /// The name users see, such as `delta.mix`.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embed => "embed",
            Stage::DeltaProject => "delta.project",
            Stage::DeltaMix => "delta.mix",
            Stage::DeltaOut => "delta.out",
            Stage::AttnProject => "attn.project",
            Stage::AttnMix => "attn.mix",
            Stage::AttnOut => "attn.out",
            Stage::Route => "route",
            Stage::Shared => "shared",
            Stage::Experts => "experts",
            Stage::Head => "head",
        }
    }

    /// The intermediates that can be read right after this stage.
    pub fn intermediates(self) -> &'static [Intermediate] {
        use Intermediate as I;
        match self {
            Stage::Embed => &[I::Embedded],
            Stage::DeltaProject => &[I::DeltaQkv, I::DeltaZ, I::DeltaBetaAlpha],
            Stage::DeltaMix => &[I::DeltaMixed],
            Stage::DeltaOut => &[I::DeltaHidden],
            Stage::AttnProject => &[I::AttnQuery, I::AttnGate, I::AttnKey, I::AttnValue],
            Stage::AttnMix => &[I::AttnMixed],
            Stage::AttnOut => &[I::AttnHidden],
            Stage::Route => &[I::RouteNorm, I::RouteIds, I::RouteWeights],
            Stage::Shared => &[I::SharedOut],
            Stage::Experts => &[I::ExpertsHidden],
            Stage::Head => &[I::Logits],
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A named value between stages, readable for dumps and parity. Shapes are [rows of the step, columns].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Intermediate {
    /// Hidden rows after `embed`: hidden columns.
    Embedded,
    /// q | k | v before the convolution: 2·key + value columns.
    DeltaQkv,
    /// z: value columns.
    DeltaZ,
    /// Raw beta of every value head, then raw alpha of every value head.
    DeltaBetaAlpha,
    /// Output of the mixer before `ssm_out`: value columns.
    DeltaMixed,
    /// Hidden rows after a DeltaNet mixer: hidden columns.
    DeltaHidden,
    /// Normed and rotated queries: heads · head_dim columns.
    AttnQuery,
    /// Raw gates: heads · head_dim columns.
    AttnGate,
    /// Normed and rotated keys before rounding to the KV type: kv_heads · head_dim columns.
    AttnKey,
    /// Values before rounding to the KV type: kv_heads · head_dim columns.
    AttnValue,
    /// Gated attention output before `attn_output`: heads · head_dim columns.
    AttnMixed,
    /// Hidden rows after an attention mixer: hidden columns.
    AttnHidden,
    /// Post-attention norm, the input of router and experts: hidden columns.
    RouteNorm,
    /// Chosen experts, by falling weight: `used` columns.
    RouteIds,
    /// Their renormalised weights: `used` columns.
    RouteWeights,
    /// Gated output of the shared expert: hidden columns.
    SharedOut,
    /// Hidden rows at the end of a layer: hidden columns, all rows of the pass.
    ExpertsHidden,
    /// Logits: one row for each row that wanted them, vocabulary columns.
    Logits,
}

impl Intermediate {
    /// Every intermediate.
    pub fn all() -> impl Iterator<Item = Intermediate> {
        Stage::ALL.into_iter().flat_map(|stage| stage.intermediates().iter().copied())
    }

    /// The name users type: the stage, and a suffix where a stage has several.
    pub fn name(self) -> &'static str {
        use Intermediate as I;
        match self {
            I::Embedded => "embed",
            I::DeltaQkv => "delta.project.qkv",
            I::DeltaZ => "delta.project.z",
            I::DeltaBetaAlpha => "delta.project.ba",
            I::DeltaMixed => "delta.mix",
            I::DeltaHidden => "delta.out",
            I::AttnQuery => "attn.project.q",
            I::AttnGate => "attn.project.gate",
            I::AttnKey => "attn.project.k",
            I::AttnValue => "attn.project.v",
            I::AttnMixed => "attn.mix",
            I::AttnHidden => "attn.out",
            I::RouteNorm => "route.norm",
            I::RouteIds => "route.ids",
            I::RouteWeights => "route.weights",
            I::SharedOut => "shared",
            I::ExpertsHidden => "experts",
            I::Logits => "head",
        }
    }

    /// The intermediate called `name`.
    pub fn from_name(name: &str) -> Option<Intermediate> {
        Intermediate::all().find(|i| i.name() == name)
    }
}

impl fmt::Display for Intermediate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One stage of one layer over some rows of a pass: what the [`Driver`](crate::Driver) does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The stage.
    pub stage: Stage,
    /// The layer, 0-based; 0 for `embed`, the number of layers for `head`.
    pub layer: usize,
    /// Rows of the pass.
    pub rows: Range<usize>,
}
