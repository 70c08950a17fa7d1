//! Stages `delta.project`, `delta.mix`, `delta.out`: the gated DeltaNet mixer.

mod cell;

use std::ops::Range;

use model::state::host::HostState;
use model::{DeltaSpec, DeltaWeights, ResidentMatrix, Run, Spec};

use crate::embed;
use crate::gemm::{self, Input, Product, Then};
use crate::kernels::{Codes, Kernels};
use crate::memory::{Out, Rows};
use crate::open::{Buffers, Open, carve};
use crate::team::{Scratch, Team};
use cell::{Cell, Gates};

type LayerWeights = DeltaWeights<ResidentMatrix, Vec<f32>>;

/// More taps than any model has; the spec refuses more.
const MOST_TAPS: usize = 64;

/// Parts of a block: q | k | v (later the mixed output in place of v), z, raw beta | alpha.
pub(crate) fn parts(spec: &Spec, rows: usize) -> [usize; 3] {
    let delta = &spec.delta;
    [rows * delta.channels(), rows * delta.value_dim(), rows * 2 * delta.value_heads]
}

/// Norm and input projections.
pub(crate) fn project(
    team: &mut Team,
    spec: &Spec,
    (norm_weight, weights): (&[f32], &LayerWeights),
    open: &mut Open,
    rows: Range<usize>,
) {
    let (cols, count, delta) = (spec.hidden, rows.len(), &spec.delta);
    let Buffers { hidden, norm, codes, block, .. } = &mut open.buffers;
    let (norm, codes) = (&mut norm[rows.start * cols..], &mut codes[rows.start * (Codes::per_row(cols))..]);
    let x = Rows::new(&hidden[rows.start * cols..], cols, count);
    embed::norm(team, x, (norm_weight, spec.rms_eps), norm, codes);
    let x =
        Input::with(team, Rows::new(norm, cols, count), Rows::new(codes, Codes::per_row(cols), count), cols);
    let [qkv, z, beta_alpha] = carve(block, parts(spec, count));
    let outs = [
        (&weights.qkv, Out::new(qkv, delta.channels())),
        (&weights.z, Out::new(z, delta.value_dim())),
        (&weights.beta_alpha, Out::new(beta_alpha, 2 * delta.value_heads)),
    ];
    let products = outs.map(|(weights, out)| Product { weights: weights.into(), x, out, then: Then::Store });
    gemm::dense(team, &products);
}

/// Output projection and residual.
pub(crate) fn out(team: &mut Team, spec: &Spec, weights: &LayerWeights, open: &mut Open, rows: Range<usize>) {
    let (count, delta) = (rows.len(), &spec.delta);
    let Buffers { hidden, block, block_codes, .. } = &mut open.buffers;
    let [qkv, ..] = carve(block, parts(spec, count));
    let x = Rows::new(&qkv[2 * delta.key_dim()..], delta.channels(), count);
    let x = Input::round(team, x, delta.value_dim(), block_codes);
    let out = Out::new(&mut hidden[rows.start * spec.hidden..], spec.hidden);
    gemm::dense(team, &[Product { weights: (&weights.out).into(), x, out, then: Then::Add }]);
}

/// The part of a run that lies in a block, and the recurrent state before and after it.
struct Part<'a> {
    run: &'a Run,
    /// Rows of the pass.
    rows: Range<usize>,
    /// What the part starts from, if that is not `to`: `Some(None)` is all zeros.
    from: Option<Option<State<'a>>>,
    /// Where its state goes: window, state.
    to: (Out, Out),
    /// After which rows the state is wanted too, and where.
    snapshots: Vec<(usize, (Out, Out))>,
}

/// A window and a state to read.
type State<'a> = (&'a [f32], &'a [f32]);

fn find_parts<'a>(
    host: &'a mut HostState,
    delta: &DeltaSpec,
    layer: usize,
    open: &'a Open,
    rows: &Range<usize>,
) -> Vec<Part<'a>> {
    let mut targets = Vec::new();
    let mut raw = |slot| {
        let (window, state) = host.recurrent_mut(slot, layer);
        (Out::new(window, delta.channels()), Out::new(state, delta.head_dim * delta.head_dim))
    };
    for (index, part) in open.pass.runs_in(rows.clone()) {
        let opened = &open.state.runs[index];
        let wanted = opened.snapshots.iter().filter(|(row, _)| part.contains(row));
        let snapshots = wanted.map(|&(row, slot)| (row, raw(slot))).collect();
        targets.push((index, part, raw(opened.to), snapshots));
    }
    let host = &*host;
    let part = |(index, rows, to, snapshots): (usize, Range<usize>, _, _)| {
        let (run, opened) = (&open.pass.runs[index], &open.state.runs[index]);
        let first = rows.start == run.rows.start;
        let from = first.then(|| opened.from.map(|slot| host.recurrent(slot, layer)));
        Part { run, rows, from, to, snapshots }
    };
    targets.into_iter().map(part).collect()
}

/// Convolution, delta rule, gated norm. `layer` counts DeltaNet layers, `conv` is [taps][channels].
pub(crate) fn mix(
    team: &mut Team,
    spec: &Spec,
    (weights, conv): (&LayerWeights, &[f32]),
    host: &mut HostState,
    open: &mut Open,
    (layer, rows): (usize, Range<usize>),
) {
    let delta = &spec.delta;
    let mut block = std::mem::take(&mut open.buffers.block);
    let [qkv, z, beta_alpha] = carve(&mut block, parts(spec, rows.len()));
    let parts = find_parts(host, delta, layer, open, &rows);
    let kernels = team.kernels;
    let mixer = Mixer { kernels, spec, weights, conv, first: rows.start, z, beta_alpha };
    let qkv = Out::new(qkv, delta.channels());

    let cost = |part: &Part, units: usize| (units, part.rows.len() as u64);
    let heads = 2 * delta.key_heads + delta.value_heads;
    let costs: Vec<_> = parts.iter().map(|part| cost(part, heads)).collect();
    team.split_costs(&costs, |part, heads, scratch| {
        heads.for_each(|head| mixer.convolve(&parts[part], head, qkv, scratch));
    });
    let costs: Vec<_> = parts.iter().map(|part| cost(part, delta.value_heads)).collect();
    team.split_costs(&costs, |part, heads, scratch| {
        heads.for_each(|head| mixer.delta_rule(&parts[part], head, qkv, scratch));
    });
    open.buffers.block = block;
}

struct Mixer<'a> {
    kernels: &'static Kernels,
    spec: &'a Spec,
    weights: &'a LayerWeights,
    conv: &'a [f32],
    /// The block's first row.
    first: usize,
    z: &'a [f32],
    beta_alpha: &'a [f32],
}

impl Mixer<'_> {
    /// Convolves the channels of one head (a query, key or value head) and normalises queries and keys; in
    /// place, from the last row to the first, so that no row is needed after it was overwritten.
    fn convolve(&self, part: &Part, head: usize, qkv: Out, scratch: &mut Scratch) {
        let (delta, kernels) = (&self.spec.delta, self.kernels);
        let (dim, taps) = (delta.head_dim, delta.taps);
        let before = taps - 1;
        let columns = head * dim..(head + 1) * dim;
        scratch.work.reserve((taps + before) * dim);
        let (window, out) = scratch.work.split_at_mut(before * dim);
        let out = &mut out[..dim];
        for (i, row) in window.chunks_exact_mut(dim).enumerate() {
            match part.from {
                Some(None) => row.fill(0.0),
                Some(Some((from, _))) => {
                    row.copy_from_slice(&from[i * delta.channels()..][columns.clone()]);
                }
                // SAFETY: these channels of the window belong to this head alone.
                None => row.copy_from_slice(unsafe { part.to.0.part(i, columns.start, dim) }),
            }
        }
        let window = &*window;
        // SAFETY: these columns of the part's rows belong to this head alone, and each slice is used up
        // before the row is written.
        let row = |row: usize| unsafe { &*qkv.part(row - self.first, columns.start, dim) };
        // Sample number `i` of the window followed by the rows.
        let sample = |i: usize| match i.checked_sub(before) {
            None => &window[i * dim..][..dim],
            Some(i) => row(part.rows.start + i),
        };
        let keep = |after: usize, to: Out| {
            for i in 0..before {
                // SAFETY: these channels of a window belong to this head alone.
                let to = unsafe { to.part(i, columns.start, dim) };
                to.copy_from_slice(sample(after + 1 - part.rows.start + i));
            }
        };
        part.snapshots.iter().for_each(|&(after, (window, _))| keep(after, window));
        keep(part.rows.end - 1, part.to.0);

        let weights: [&[f32]; MOST_TAPS] = std::array::from_fn(|tap| {
            if tap < taps { &self.conv[tap * delta.channels()..][columns.clone()] } else { &[] }
        });
        for at in part.rows.clone().rev() {
            let rows: [&[f32]; MOST_TAPS] =
                std::array::from_fn(|tap| if tap < taps { sample(at - part.rows.start + tap) } else { &[] });
            (kernels.convolve)(&rows[..taps], &weights[..taps], out);
            if head < delta.key_heads {
                (kernels.l2_norm)(out, self.spec.rms_eps, 1.0 / (dim as f32).sqrt());
            } else if head < 2 * delta.key_heads {
                (kernels.l2_norm)(out, self.spec.rms_eps, 1.0);
            }
            // SAFETY: as above; no slice of this row is in use any more.
            unsafe { qkv.part(at - self.first, columns.start, dim).copy_from_slice(out) };
        }
    }

    /// The delta rule and the gated norm of one value head; the output takes the place of v.
    fn delta_rule(&self, part: &Part, head: usize, qkv: Out, scratch: &mut Scratch) {
        let (delta, kernels) = (&self.spec.delta, self.kernels);
        let dim = delta.head_dim;
        let key_head = head / (delta.value_heads / delta.key_heads);
        let (q, k) = (key_head * dim, delta.key_dim() + key_head * dim);
        let v = 2 * delta.key_dim() + head * dim;
        // SAFETY: this head of the state belongs to this unit alone.
        let state = unsafe { part.to.1.part(head, 0, dim * dim) };
        match part.from {
            Some(None) => state.fill(0.0),
            Some(Some((_, from))) => state.copy_from_slice(&from[head * dim * dim..][..dim * dim]),
            None => {}
        }
        for rows in part.run.cells(part.rows.clone()) {
            let at = |row: usize| row - self.first;
            let mut cell = Cell::new(kernels, dim, &mut scratch.work);
            for row in rows.clone() {
                // SAFETY: queries and keys are only read in this region; this value head belongs to this
                // unit alone.
                let (q, k, v) = unsafe {
                    (qkv.part(at(row), q, dim), qkv.part(at(row), k, dim), qkv.part(at(row), v, dim))
                };
                cell.push((q, k, v), self.gates(at(row), head));
            }
            let wanted = part.snapshots.iter().filter(|(row, _)| rows.contains(row));
            for &(row, (_, to)) in wanted {
                // SAFETY: this head of the snapshot's state belongs to this unit alone.
                let to = unsafe { to.part(head, 0, dim * dim) };
                cell.state_after(row - rows.start, state, to);
            }
            cell.run(state);
            for (i, row) in rows.enumerate() {
                let z = &self.z[at(row) * delta.value_dim() + head * dim..][..dim];
                // SAFETY: as above.
                let out = unsafe { qkv.part(at(row), v, dim) };
                out.copy_from_slice(cell.output(i));
                (kernels.gated_norm)(out, &self.weights.norm, self.spec.rms_eps, z);
            }
        }
    }

    /// Decay and beta of a row of the block.
    fn gates(&self, row: usize, head: usize) -> Gates {
        let heads = self.spec.delta.value_heads;
        let raw = &self.beta_alpha[row * 2 * heads..][..2 * heads];
        let x = raw[heads + head] + self.weights.dt_bias[head];
        // Beyond 20 the logarithm is the number itself to the last bit.
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        Gates { log_decay: self.weights.a[head] * softplus, beta: 1.0 / (1.0 + (-raw[head]).exp()) }
    }
}
