//! Open passes and the memory they work in.

use std::ops::Range;

use model::state::OpenPass;
use model::{Pass, Spec, Stage};

use crate::kernels::Codes;
use crate::memory::{Aligned, reserve};

/// A pass between begin and commit.
pub(crate) struct Open {
    pub(crate) pass: Pass,
    pub(crate) state: OpenPass,
    /// The stage called last and its rows.
    pub(crate) last: Option<(Stage, Range<usize>)>,
    pub(crate) buffers: Buffers,
}

/// Memory of a pass, reused by later ones. Never smaller than what the pass needs; leading parts are used.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The residual stream: [rows, hidden].
    pub(crate) hidden: Aligned,
    /// Normed rows, input of whatever follows a norm: [rows, hidden].
    pub(crate) norm: Aligned,
    /// `norm` as integers: [rows, blocks of hidden].
    pub(crate) codes: Vec<Codes>,
    /// Other inputs of products as integers.
    pub(crate) block_codes: Vec<Codes>,
    /// Sum of shared and routed experts: [rows, hidden].
    pub(crate) sum: Aligned,
    /// What lives between the stages of a block of rows; see [`carve`].
    pub(crate) block: Aligned,
    /// Chosen experts of each row, by falling weight: [rows, used]. Small integers, exact as numbers.
    pub(crate) ids: Aligned,
    /// Their weights: [rows, used].
    pub(crate) weights: Aligned,
    /// Cosines, then sines of each row's rotation: [rows, rope_dims].
    pub(crate) rope: Aligned,
    /// The pairs of the layer routed last, by expert.
    pub(crate) pairs: Pairs,
    /// Final hidden states of the rows that want logits or hidden states.
    pub(crate) last: Vec<f32>,
    /// The same as integers.
    pub(crate) last_codes: Vec<Codes>,
    /// Those rows.
    pub(crate) last_rows: Vec<usize>,
    /// Logits of the rows that want them.
    pub(crate) logits: Vec<f32>,
}

/// Pairs (expert, row), grouped by ascending expert, rows ascending in each.
#[derive(Default)]
pub(crate) struct Pairs {
    /// Whether they belong to the layer routed last.
    pub(crate) valid: bool,
    /// Expert e's pairs are `starts[e] .. starts[e + 1]`.
    pub(crate) starts: Vec<usize>,
    /// Row of each pair.
    pub(crate) rows: Vec<u32>,
    /// Weight of each pair.
    pub(crate) weights: Vec<f32>,
}

impl Buffers {
    /// Makes room for a pass of `rows` rows in blocks of at most `block_rows`.
    pub(crate) fn reserve(&mut self, spec: &Spec, rows: usize, block_rows: usize) {
        for buffer in [&mut self.hidden, &mut self.norm, &mut self.sum] {
            buffer.reserve(rows * spec.hidden);
        }
        reserve(&mut self.codes, rows * Codes::per_row(spec.hidden), Codes::ZERO);
        for buffer in [&mut self.ids, &mut self.weights] {
            buffer.reserve(rows * spec.moe.used);
        }
        self.rope.reserve(rows * spec.attention.rope_dims);
        let block = rows.min(block_rows);
        let lens = [
            &crate::delta::parts(spec, block)[..],
            &crate::attention::parts(spec, block)[..],
            &crate::moe::router_parts(spec, block)[..],
            &crate::moe::shared_parts(spec, block)[..],
        ];
        let most = lens.into_iter().map(carved_len).max();
        self.block.reserve(most.unwrap_or(0));
        let widest = [spec.delta.value_dim(), spec.attention.query_dim(), spec.moe.shared_width];
        let widest = widest.into_iter().max().unwrap_or(0);
        reserve(&mut self.block_codes, block * Codes::per_row(widest), Codes::ZERO);
        self.pairs.valid = false;
    }
}

/// Numbers that parts of these lengths take in a block.
fn carved_len(lens: &[usize]) -> usize {
    lens.iter().map(|len| len.next_multiple_of(16)).sum()
}

/// Cuts a block into parts of these lengths, each on a cache line boundary.
pub(crate) fn carve<const N: usize>(block: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    let mut rest = block;
    lens.map(|len| {
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
        rest = behind;
        &mut part[..len]
    })
}
