//! Stages `route`, `shared`, `experts`: the mixture of experts.
//!
//! Pairs (expert, row) are grouped by expert; an expert's matrices are decoded once for all its rows. The
//! weighted outputs are added to the row's sum in ascending expert id: threads own columns of the sum and go
//! through the experts in order.

use std::ops::Range;

use model::{ExpertLayout, HostSlots, Model, MoeWeights, ResidentMatrix, Result, Spec, Wave};

use crate::embed;
use crate::gemm::{self, Down, GateUp, Input, Product, Then, Weights};
use crate::kernels::{Codes, GROUP, is_integer};
use crate::memory::{Aligned, Out, Rows, carve, reserve};
use crate::open::{Buffers, Open, Pairs};
use crate::team::Team;

/// Pairs whose inner rows are in memory at the same time: 8 MiB for experts of width 512.
const PAIRS: usize = 4096;

type LayerWeights = MoeWeights<ResidentMatrix, Vec<f32>>;

/// Parts of a block between norm and choice: router logits.
pub(crate) fn router_parts(spec: &Spec, rows: usize) -> [usize; 1] {
    [rows * spec.moe.experts]
}

/// Parts of a block of the shared expert: its inner rows, the factor of each row.
pub(crate) fn shared_parts(spec: &Spec, rows: usize) -> [usize; 2] {
    [rows * spec.moe.shared_width, rows]
}

/// Norm, router, choice of experts.
pub(crate) fn route(
    team: &mut Team,
    spec: &Spec,
    (weights, bias): (&LayerWeights, &[f32]),
    open: &mut Open,
    rows: Range<usize>,
) {
    let (cols, count) = (spec.hidden, rows.len());
    let Buffers { hidden, norm, whole_norm, codes, block, ids, weights: chosen, pairs, .. } =
        &mut open.buffers;
    pairs.valid = false;
    let norm = Buffers::block_norm(norm, *whole_norm, rows.start, cols);
    let codes = &mut codes[rows.start * Codes::per_row(cols)..];
    let x = Rows::new(&hidden[rows.start * cols..], cols, count);
    embed::norm(team, x, (&weights.norm, spec.rms_eps), norm, codes);

    let experts = spec.moe.experts;
    let [logits] = carve(block, router_parts(spec, count));
    let out = Out::new(logits, experts);
    // In single precision: a choice turned by rounding changes whole experts.
    let x = Input::exact(Rows::new(norm, cols, count));
    gemm::dense(team, &[Product { weights: (&weights.router).into(), x, out, then: Then::Store }]);

    let used = spec.moe.used;
    let (ids, chosen) = (Out::new(ids, used), Out::new(chosen, used));
    let kernels = team.kernels;
    team.split(count, |part, _| {
        for row in part {
            // SAFETY: each row belongs to one member.
            let (probabilities, ids, chosen) = unsafe {
                let to = rows.start + row;
                (out.part(row, 0, experts), ids.part(to, 0, used), chosen.part(to, 0, used))
            };
            let preferred = (!bias.is_empty()).then(|| preferred(probabilities, bias, used));
            let (_, _, sum) = (kernels.softmax_block)(probabilities, 1.0, f32::NEG_INFINITY);
            probabilities.iter_mut().for_each(|p| *p /= sum);
            if let Some(preferred) = preferred {
                // Below every probability, so that nobody else is chosen.
                let others = probabilities.iter_mut().zip(preferred).filter(|(_, preferred)| !preferred);
                others.for_each(|(p, _)| *p = -2.0);
            }
            choose(probabilities, ids, chosen);
        }
    });
}

/// Which experts have the `used` largest sums of logit and bias, ties to the lower index.
fn preferred(logits: &[f32], bias: &[f32], used: usize) -> Vec<bool> {
    let sum = |expert: u32| logits[expert as usize] + bias[expert as usize];
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_sum = |&a: &u32, &b: &u32| sum(b).total_cmp(&sum(a)).then(a.cmp(&b));
    if used < order.len() {
        order.select_nth_unstable_by(used, by_sum);
    }
    let mut preferred = vec![false; logits.len()];
    order.iter().take(used).for_each(|&expert| preferred[expert as usize] = true);
    preferred
}

/// The largest probabilities, by falling value, ties to the lower index, scaled to the sum 1.
fn choose(probabilities: &[f32], ids: &mut [f32], weights: &mut [f32]) {
    // Below every probability, so that the first ones fill the list.
    weights.fill(-1.0);
    let last = weights.len() - 1;
    for (expert, &p) in probabilities.iter().enumerate() {
        if p > weights[last] {
            let mut at = last;
            while at > 0 && p > weights[at - 1] {
                (weights[at], ids[at]) = (weights[at - 1], ids[at - 1]);
                at -= 1;
            }
            (weights[at], ids[at]) = (p, expert as f32);
        }
    }
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// The shared expert: starts the sum.
pub(crate) fn shared(
    team: &mut Team,
    spec: &Spec,
    weights: &LayerWeights,
    open: &mut Open,
    rows: Range<usize>,
) {
    let (cols, count, width) = (spec.hidden, rows.len(), spec.moe.shared_width);
    let Buffers { norm, whole_norm, codes, block_codes, sum, block, .. } = &mut open.buffers;
    let numbers = Rows::new(Buffers::block_norm(norm, *whole_norm, rows.start, cols), cols, count);
    let codes = Rows::new(&codes[rows.start * (Codes::per_row(cols))..], Codes::per_row(cols), count);
    let x = Input::with(team, numbers, codes, cols);
    let [inner, factors] = carve(block, shared_parts(spec, count));
    let group = GateUp { gate: (&weights.shared_gate).into(), up: (&weights.shared_up).into(), x, first: 0 };
    let rounded = gemm::rounds(team, width) && is_integer(weights.shared_down.ty);
    if rounded {
        gemm::gate_up(team, &[group], gemm::Inner::Codes(Out::new(block_codes, Codes::per_row(width))));
    } else {
        gemm::gate_up(team, &[group], gemm::Inner::Numbers(Out::new(inner, width)));
    }

    let (kernels, out) = (team.kernels, Out::new(factors, 1));
    team.split(count, |part, _| {
        for row in part {
            let logit = (kernels.dot)(numbers.row(row, cols), &weights.shared_router);
            // SAFETY: each row belongs to one member.
            unsafe { out.part(row, 0, 1)[0] = 1.0 / (1.0 + (-logit).exp()) };
        }
    });
    let out = Out::new(&mut sum[rows.start * cols..], cols);
    let x = if rounded {
        Input::rounded(Rows::new(block_codes, Codes::per_row(width), count))
    } else {
        Input::exact(Rows::new(inner, width, count))
    };
    let then = Then::Scale(factors);
    gemm::dense(team, &[Product { weights: (&weights.shared_down).into(), x, out, then }]);
}

/// Groups the pairs of the layer routed last, unless that has been done.
pub(crate) fn group(spec: &Spec, rows: usize, buffers: &mut Buffers) {
    let (used, experts) = (spec.moe.used, spec.moe.experts);
    let Buffers { ids, weights, pairs, .. } = buffers;
    if pairs.valid {
        return;
    }
    let Pairs { valid, starts, rows: pair_rows, weights: pair_weights } = pairs;
    let ids = &ids[..rows * used];
    starts.clear();
    starts.resize(experts + 1, 0);
    // Counting sort: counts first, one place further on, so that the sums are the starts.
    ids.iter().for_each(|&id| starts[id as usize + 1] += 1);
    for expert in 0..experts {
        starts[expert + 1] += starts[expert];
    }
    pair_rows.resize(ids.len(), 0);
    pair_weights.resize(ids.len(), 0.0);
    let mut next = starts.clone();
    for (pair, (&id, &weight)) in ids.iter().zip(weights.iter()).enumerate() {
        let at = &mut next[id as usize];
        pair_rows[*at] = (pair / used) as u32;
        pair_weights[*at] = weight;
        *at += 1;
    }
    *valid = true;
}

/// Experts with at least one pair, ascending.
pub(crate) fn used(pairs: &Pairs) -> Vec<u32> {
    (0..pairs.starts.len() - 1).filter(|&e| pairs.starts[e] < pairs.starts[e + 1]).map(|e| e as u32).collect()
}

/// Whether experts want rows in single precision: if inputs are not rounded, or do not meet integers.
pub(crate) fn wants_numbers(model: &Model, exact: bool) -> bool {
    let integers = |layer: &ExpertLayout| is_integer(layer.gate.ty) && is_integer(layer.up.ty);
    exact || !model.spec.hidden.is_multiple_of(GROUP) || !model.experts.iter().all(integers)
}

/// Bytes of [`Inner`] for passes of `rows` rows, in the longer of the two forms.
pub(crate) fn inner_bytes(spec: &Spec, rows: usize) -> usize {
    let widest = spec.moe.widths.iter().copied().max().unwrap_or(0);
    let codes = Codes::per_row(widest) * size_of::<Codes>();
    PAIRS.min(rows * spec.moe.used) * codes.max(widest * size_of::<f32>())
}

/// What the first halves of experts make: rows of pairs, in the form that the second halves want.
#[derive(Default)]
pub(crate) struct Inner {
    numbers: Aligned,
    codes: Vec<Codes>,
}

impl Inner {
    /// Gives up what passes of `rows` rows do not need.
    pub(crate) fn shrink(&mut self, spec: &Spec, rows: usize) {
        let bytes = self.numbers.capacity() * size_of::<f32>() + self.codes.len() * size_of::<Codes>();
        if bytes > inner_bytes(spec, rows) {
            *self = Inner::default();
        }
    }
}

/// Some pairs of one expert, and its weights.
struct Piece<'a> {
    gate: Weights<'a>,
    up: Weights<'a>,
    down: Weights<'a>,
    pairs: Range<usize>,
}

/// Adds the experts of a wave to the sums, and the sums to the residual stream after the last wave.
pub(crate) fn experts(
    team: &mut Team,
    (model, slots): (&Model, &HostSlots),
    inner: &mut Inner,
    open: &mut Open,
    layer: usize,
    wave: &Wave,
) -> Result<()> {
    let spec = &model.spec;
    let (cols, rows, width) = (spec.hidden, open.pass.rows(), spec.moe.widths[layer]);
    group(spec, rows, &mut open.buffers);
    let Buffers { hidden, norm, whole_norm, codes, sum, pairs, .. } = &mut open.buffers;
    let numbers = whole_norm.then_some(&norm[..]);
    let (hidden, sum) = (Out::new(hidden, cols), Out::new(sum, cols));
    let mut pieces = pieces((model, slots), layer, wave, pairs)?.into_iter().peekable();
    loop {
        let mut turn = Vec::new();
        let mut count = 0;
        while let Some(piece) = pieces.next_if(|piece| count + piece.pairs.len() <= PAIRS) {
            count += piece.pairs.len();
            turn.push(piece);
        }
        let done = pieces.peek().is_none();
        turn_of_experts(team, &turn, (numbers, codes), pairs, inner, (width, cols), sum, {
            (done && wave.last).then_some((hidden, rows))
        });
        if done {
            return Ok(());
        }
    }
}

/// The pieces of a wave, ascending, none with more than [`PAIRS`] pairs.
fn pieces<'a>(
    (model, slots): (&Model, &'a HostSlots),
    layer: usize,
    wave: &Wave,
    pairs: &Pairs,
) -> Result<Vec<Piece<'a>>> {
    let layout = &model.experts[layer];
    let mut pieces = Vec::new();
    for placed in wave.experts.iter() {
        let expert = placed.expert as usize;
        let slot = placed.slot;
        let matrix = |tensor: &model::ExpertTensor, at: u64| {
            let bytes = slots.bytes(slot.arena, at, tensor.bytes()).ok_or_else(|| {
                let message = format!("expert {expert} lies in arena {} at {at}: no such slot", slot.arena);
                model::Error::Backend { backend: "cpu", stage: "experts", layer, message }
            })?;
            Ok::<_, model::Error>(Weights { ty: tensor.ty, rows: tensor.rows, cols: tensor.cols, bytes })
        };
        let matrices = (
            matrix(&layout.gate, slot.gate)?,
            matrix(&layout.up, slot.up)?,
            matrix(&layout.down, slot.down)?,
        );
        let end = pairs.starts[expert + 1];
        for first in (pairs.starts[expert]..end).step_by(PAIRS) {
            let (gate, up, down) = matrices;
            pieces.push(Piece { gate, up, down, pairs: first..end.min(first + PAIRS) });
        }
    }
    Ok(pieces)
}

/// Both halves of some experts.
#[allow(clippy::too_many_arguments)] // the parts of one borrowed structure
fn turn_of_experts(
    team: &mut Team,
    turn: &[Piece],
    (norm, codes): (Option<&[f32]>, &[Codes]),
    pairs: &Pairs,
    inner: &mut Inner,
    (width, cols): (usize, usize),
    sum: Out,
    residual: Option<(Out, usize)>,
) {
    let mut first = 0;
    let mut firsts = Vec::with_capacity(turn.len());
    for piece in turn {
        firsts.push(first);
        first += piece.pairs.len();
    }
    let groups: Vec<GateUp> = turn
        .iter()
        .zip(&firsts)
        .map(|(piece, &first)| GateUp {
            gate: piece.gate,
            up: piece.up,
            x: {
                let index = &pairs.rows[piece.pairs.clone()];
                let codes = Rows::gather(codes, Codes::per_row(cols), index);
                match norm {
                    Some(norm) => Input::with(team, Rows::gather(norm, cols, index), codes, cols),
                    None => Input::rounded(codes),
                }
            },
            first,
        })
        .collect();
    let (count, most, per_row) = (first, PAIRS.min(pairs.rows.len()), Codes::per_row(width));
    let all = if gemm::rounds(team, width) && turn.iter().all(|piece| is_integer(piece.down.ty)) {
        reserve(&mut inner.codes, most * per_row, Codes::ZERO);
        gemm::gate_up(team, &groups, gemm::Inner::Codes(Out::new(&mut inner.codes, per_row)));
        Input::rounded(Rows::new(&inner.codes, per_row, count))
    } else {
        inner.numbers.reserve(most * width);
        gemm::gate_up(team, &groups, gemm::Inner::Numbers(Out::new(&mut inner.numbers, width)));
        Input::exact(Rows::new(&inner.numbers, width, count))
    };
    let groups: Vec<Down> = turn
        .iter()
        .zip(&firsts)
        .map(|(piece, &first)| Down {
            weights: piece.down,
            x: all.part(first..first + piece.pairs.len()),
            rows: &pairs.rows[piece.pairs.clone()],
            factors: &pairs.weights[piece.pairs.clone()],
        })
        .collect();
    gemm::down(team, &groups, cols, sum, residual);
}
