//! Stages `delta.project`, `delta.mix`, `delta.out`: the gated DeltaNet mixer.

use std::ops::Range;

use model::state::host::HostState;
use model::{DeltaSpec, DeltaWeights, GRID, ResidentMatrix, Run, Spec};

use crate::embed;
use crate::gemm::{self, Input, Product, Then};
use crate::kernels::{Cell, Codes, Convolution, Kernels, Step, cell_room};
use crate::memory::{Aligned, Out, Rows, carve};
use crate::open::{Buffers, Open};
use crate::team::Team;

type LayerWeights = DeltaWeights<ResidentMatrix, Vec<f32>>;

/// Rows whose products with keys are computed together, up to the last of them.
const SCORE_ROWS: usize = 16;

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
    let Buffers { hidden, norm, whole_norm, codes, block, .. } = &mut open.buffers;
    let norm = Buffers::block_norm(norm, *whole_norm, rows.start, cols);
    let codes = &mut codes[rows.start * Codes::per_row(cols)..];
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
    let (kernels, qkv) = (team.kernels, Out::new(qkv, delta.channels()));
    let mixer = Mixer { kernels, spec, weights, conv, first: rows.start, qkv, z, beta_alpha };
    let costs: Vec<_> = parts.iter().map(|part| (delta.key_heads, part.rows.len() as u64)).collect();
    team.split_costs(&costs, 1, |part, heads, scratch| {
        heads.for_each(|head| mixer.mix(&parts[part], head, &mut scratch.work));
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
    qkv: Out,
    z: &'a [f32],
    beta_alpha: &'a [f32],
}

/// What a thread works in on one key head and its value heads.
struct Room<'a> {
    /// The samples before the cell, of query, key and value heads: [2 + heads][taps − 1][dim].
    windows: &'a mut [f32],
    /// [GRID][dim] each.
    q: &'a mut [f32],
    k: &'a mut [f32],
    /// Products of queries and keys with keys: [GRID][GRID] each.
    qk: &'a mut [f32],
    kk: &'a mut [f32],
    /// Values, then outputs, of one head: [GRID][padded dim].
    values: &'a mut [f32],
    /// A state for each value head, as tiles.
    states: &'a mut [f32],
    cell: &'a mut [f32],
}

/// The part of a cell's work that is one head's channels.
struct Channels {
    /// First of them, in a projected row.
    column: usize,
    /// As in [`Convolution`].
    norm: Option<(f32, f32)>,
}

impl Mixer<'_> {
    /// Everything for one key head and its value heads; the output takes the place of v.
    fn mix(&self, part: &Part, key_head: usize, work: &mut Aligned) {
        let (delta, tiles) = (&self.spec.delta, self.tiles());
        let (dim, heads) = (delta.head_dim, delta.value_heads / delta.key_heads);
        let (rows, square) = (GRID * dim, GRID * GRID);
        let windows = (2 + heads) * (delta.taps - 1) * dim;
        let cell = cell_room(dim, tiles.columns);
        let lens = [windows, rows, rows, square, square, GRID * tiles.width(), heads * tiles.len(), cell];
        work.reserve(lens.iter().map(|len| len.next_multiple_of(16)).sum());
        let [windows, q, k, qk, kk, values, states, cell] = carve(work, lens);
        let mut room = Room { windows, q, k, qk, kk, values, states, cell };
        // Padding of the values; that of the outputs stays zero too.
        room.values.fill(0.0);
        let heads = key_head * heads..(key_head + 1) * heads;
        let channels = self.channels(key_head, &heads);
        self.load_windows(part, &channels, room.windows);
        // A decode step takes states from one place to the other without a stop.
        let steps = part.rows.len() == 1;
        if !steps {
            for (head, state) in heads.clone().zip(room.states.chunks_exact_mut(tiles.len())) {
                tiles.load(self.state_before(part, head), state);
            }
        }
        for rows in part.run.cells(part.rows.clone()) {
            self.cell(part, rows, (&heads, &channels), &mut room);
        }
        if !steps {
            for (head, state) in heads.zip(room.states.chunks_exact(tiles.len())) {
                // SAFETY: this head of the state belongs to this unit alone.
                tiles.store(state, unsafe { part.to.1.part(head, 0, dim * dim) });
            }
        }
        let windows = room.windows.chunks_exact((delta.taps - 1) * dim);
        for (window, Channels { column, .. }) in windows.zip(&channels) {
            for (i, row) in window.chunks_exact(dim).enumerate() {
                // SAFETY: these channels of the window belong to this unit alone.
                unsafe { part.to.0.part(i, *column, dim).copy_from_slice(row) };
            }
        }
    }

    fn tiles(&self) -> Tiles {
        Tiles { dim: self.spec.delta.head_dim, columns: self.kernels.state_columns }
    }

    /// Those of the query, the key, and the value heads.
    fn channels(&self, key_head: usize, heads: &Range<usize>) -> Vec<Channels> {
        let (delta, eps) = (&self.spec.delta, self.spec.rms_eps);
        let dim = delta.head_dim;
        let q = Channels { column: key_head * dim, norm: Some((eps, 1.0 / (dim as f32).sqrt())) };
        let k = Channels { column: delta.key_dim() + key_head * dim, norm: Some((eps, 1.0)) };
        let v = heads.clone().map(|head| Channels { column: 2 * delta.key_dim() + head * dim, norm: None });
        [q, k].into_iter().chain(v).collect()
    }

    fn load_windows(&self, part: &Part, channels: &[Channels], windows: &mut [f32]) {
        let delta = &self.spec.delta;
        let dim = delta.head_dim;
        for (window, &Channels { column, .. }) in
            windows.chunks_exact_mut((delta.taps - 1) * dim).zip(channels)
        {
            for (i, row) in window.chunks_exact_mut(dim).enumerate() {
                match part.from {
                    Some(None) => row.fill(0.0),
                    Some(Some((from, _))) => {
                        row.copy_from_slice(&from[i * delta.channels() + column..][..dim]);
                    }
                    // SAFETY: these channels of the window belong to this unit alone.
                    None => row.copy_from_slice(unsafe { part.to.0.part(i, column, dim) }),
                }
            }
        }
    }

    /// The state of a head that a part starts from, if it is not all zeros.
    fn state_before<'a>(&self, part: &'a Part, head: usize) -> Option<&'a [f32]> {
        let len = self.tiles().dim.pow(2);
        match part.from {
            Some(None) => None,
            Some(Some((_, from))) => Some(&from[head * len..][..len]),
            // SAFETY: this head of the state belongs to this unit alone, which writes it after its last use.
            None => Some(unsafe { part.to.1.part(head, 0, len) }),
        }
    }

    /// The rows of one cell.
    fn cell(
        &self,
        part: &Part,
        rows: Range<usize>,
        (heads, channels): (&Range<usize>, &[Channels]),
        room: &mut Room,
    ) {
        let (delta, dim, tiles) = (&self.spec.delta, self.spec.delta.head_dim, self.tiles());
        let mut windows = room.windows.chunks_exact_mut((delta.taps - 1) * dim);
        let mut convolve = |channels, out: &mut [f32], stride| {
            let window = windows.next().expect("one for each head");
            self.convolve(part, rows.clone(), channels, window, (out, stride));
        };
        convolve(&channels[0], room.q, dim);
        convolve(&channels[1], room.k, dim);
        if rows.len() > 1 {
            self.scores(rows.len(), room.q, room.k, room.qk);
            self.scores(rows.len(), room.k, room.k, room.kk);
        }
        for (i, head) in heads.clone().enumerate() {
            convolve(&channels[2 + i], room.values, tiles.width());
            let (beta, log_decay) = self.gates(rows.clone(), head);
            let (q, k, qk, kk) = (&*room.q, &*room.k, &*room.qk, &*room.kk);
            let cell = Cell { rows: rows.len(), dim, q, k, qk, kk, beta: &beta, log_decay: &log_decay };
            let state = &mut room.states[i * tiles.len()..][..tiles.len()];
            let mut snapshots = snapshots(part, &rows, head, dim * dim);
            match (rows.len(), part.rows.len()) {
                (1, 1) => self.step(part, head, &cell, room.values, &mut snapshots),
                (1, _) => self.step_tiles(&cell, room.values, state, &mut snapshots),
                _ => (self.kernels.delta_cell)(&cell, room.cell, room.values, state, &mut snapshots),
            }
            for (row, out) in rows.clone().zip(room.values.chunks_exact(tiles.width())) {
                let at = row - self.first;
                let z = &self.z[at * delta.value_dim() + head * dim..][..dim];
                // SAFETY: this value head belongs to this unit alone.
                let to = unsafe { self.qkv.part(at, channels[2 + i].column, dim) };
                (self.kernels.gated_norm)(&out[..dim], &self.weights.norm, self.spec.rms_eps, z, to);
            }
        }
    }

    /// Convolves the channels of one head over the rows of a cell, and moves its window on. `out` is where the
    /// results go, and the distance of their rows.
    fn convolve(
        &self,
        part: &Part,
        rows: Range<usize>,
        channels: &Channels,
        window: &mut [f32],
        (out, stride): (&mut [f32], usize),
    ) {
        let delta = &self.spec.delta;
        let (dim, taps, count) = (delta.head_dim, delta.taps, rows.len());
        let mut samples = [std::ptr::null(); GRID + MOST_TAPS];
        let samples = &mut samples[..count + taps - 1];
        let (before, of_rows) = samples.split_at_mut(taps - 1);
        before.iter_mut().zip(window.chunks_exact(dim)).for_each(|(to, row)| *to = row.as_ptr());
        for (to, row) in of_rows.iter_mut().zip(rows.clone()) {
            // SAFETY: these columns of the part's rows belong to this unit alone.
            *to = unsafe { self.qkv.part(row - self.first, channels.column, dim) }.as_ptr();
        }
        let weights = (self.conv[channels.column..].as_ptr(), delta.channels());
        let convolution = Convolution { weights, taps, dim, norm: channels.norm };
        assert!(out.len() >= (count - 1) * stride + dim && self.conv.len() == taps * delta.channels());
        // SAFETY: a head's channels of window, rows and weights; room for the rows in `out`.
        unsafe { (self.kernels.convolve)(&convolution, samples, (out.as_mut_ptr(), stride)) };
        for (row, (to, _)) in part.snapshots.iter().filter(|(row, _)| rows.contains(row)) {
            for (i, &sample) in samples[row - rows.start + 1..][..taps - 1].iter().enumerate() {
                // SAFETY: these channels of the snapshot's window belong to this unit alone.
                unsafe { to.part(i, channels.column, dim).as_mut_ptr().copy_from(sample, dim) };
            }
        }
        for (i, &sample) in samples[count..].iter().enumerate() {
            // SAFETY: a row of the window, and a later sample: perhaps a later row of the window.
            unsafe { window[i * dim..][..dim].as_mut_ptr().copy_from(sample, dim) };
        }
    }

    /// scores[r, j] = x[r] · k[j] for j up to r at least: [rows][GRID].
    fn scores(&self, rows: usize, x: &[f32], k: &[f32], scores: &mut [f32]) {
        let dim = self.spec.delta.head_dim;
        assert!(k.len() >= GRID * dim);
        for first in (0..rows).step_by(SCORE_ROWS) {
            let end = rows.min(first + SCORE_ROWS);
            let mut starts = [std::ptr::null(); SCORE_ROWS];
            for (start, row) in starts.iter_mut().zip(x[first * dim..].chunks_exact(dim)) {
                *start = row.as_ptr();
            }
            let out = (scores[first * GRID..end * GRID].as_mut_ptr(), GRID);
            let shape = (end.next_multiple_of(4), dim);
            // SAFETY: there are GRID keys, at least as many as asked for, and as many columns of scores.
            unsafe { (self.kernels.dot_form)(&starts[..end - first], (k.as_ptr(), dim), shape, out, false) };
        }
    }

    /// Betas and log decays of rows of a cell.
    fn gates(&self, rows: Range<usize>, head: usize) -> ([f32; GRID], [f32; GRID]) {
        let heads = self.spec.delta.value_heads;
        let (mut beta, mut alpha) = ([0.0; GRID], [0.0; GRID]);
        for ((beta, alpha), row) in beta.iter_mut().zip(&mut alpha).zip(rows.clone()) {
            let raw = &self.beta_alpha[(row - self.first) * 2 * heads..][..2 * heads];
            (*beta, *alpha) = (raw[head], raw[heads + head]);
        }
        let used = rows.len().next_multiple_of(16);
        let of_head = (self.weights.a[head], self.weights.dt_bias[head]);
        (self.kernels.gates)(&mut beta[..used], &mut alpha[..used], of_head);
        (beta, alpha)
    }

    /// The only row of a part: values to outputs, and the state from where it is to where it goes.
    fn step(
        &self,
        part: &Part,
        head: usize,
        cell: &Cell,
        values: &mut [f32],
        snapshots: &mut [(usize, &mut [f32])],
    ) {
        let dim = cell.dim;
        // SAFETY: this head of the state belongs to this unit alone.
        let to = unsafe { part.to.1.part(head, 0, dim * dim) };
        let from = match part.from {
            Some(Some((_, from))) => from[head * dim * dim..][..dim * dim].as_ptr(),
            Some(None) => {
                to.fill(0.0);
                to.as_ptr()
            }
            None => to.as_ptr(),
        };
        let step = self.only_row(cell);
        // SAFETY: two states of this head, or one.
        unsafe { (self.kernels.delta_step)(&step, (from, dim), (to.as_mut_ptr(), dim), &mut values[..dim]) };
        snapshots.iter_mut().for_each(|(_, snapshot)| snapshot.copy_from_slice(to));
    }

    /// As [`Mixer::step`] for a state that lies in tiles.
    fn step_tiles(
        &self,
        cell: &Cell,
        values: &mut [f32],
        state: &mut [f32],
        snapshots: &mut [(usize, &mut [f32])],
    ) {
        let (tiles, step) = (self.tiles(), self.only_row(cell));
        let of_tiles = state.chunks_exact_mut(tiles.dim * tiles.columns);
        for (tile, values) in of_tiles.zip(values.chunks_exact_mut(tiles.columns)) {
            let (start, columns) = (tile.as_mut_ptr(), tiles.columns);
            // SAFETY: a tile, as wide as these values.
            unsafe { (self.kernels.delta_step)(&step, (start, columns), (start, columns), values) };
        }
        snapshots.iter_mut().for_each(|(_, snapshot)| tiles.store(state, snapshot));
    }

    fn only_row<'a>(&self, cell: &Cell<'a>) -> Step<'a> {
        let mut decay = [cell.log_decay[0]];
        (self.kernels.exp)(&mut decay);
        let (q, k) = (&cell.q[..cell.dim], &cell.k[..cell.dim]);
        Step { q, k, decay: decay[0], beta: cell.beta[0] }
    }
}

/// Rows of a cell after which the state is wanted, and where this head of it goes.
#[allow(clippy::mut_from_ref)] // parts of what `Out` points to
fn snapshots<'a>(
    part: &'a Part,
    rows: &Range<usize>,
    head: usize,
    len: usize,
) -> Vec<(usize, &'a mut [f32])> {
    let wanted = part.snapshots.iter().filter(|(row, _)| rows.contains(row));
    // SAFETY: this head of the snapshot's state belongs to this unit alone.
    wanted.map(|(row, (_, to))| (row - rows.start, unsafe { to.part(head, 0, len) })).collect()
}

/// How a state, [dim][dim], lies in tiles of columns: [tiles][dim][columns], with zeros behind the last column.
#[derive(Clone, Copy)]
struct Tiles {
    dim: usize,
    columns: usize,
}

impl Tiles {
    /// Columns with padding.
    fn width(self) -> usize {
        self.dim.next_multiple_of(self.columns)
    }

    fn len(self) -> usize {
        self.dim * self.width()
    }

    /// A state to tiles.
    fn load(self, state: Option<&[f32]>, tiles: &mut [f32]) {
        tiles.fill(0.0);
        let Some(state) = state else { return };
        for (row, first, len, at) in self.pieces() {
            tiles[at..at + len].copy_from_slice(&state[row * self.dim + first..][..len]);
        }
    }

    /// Tiles to a state.
    fn store(self, tiles: &[f32], state: &mut [f32]) {
        for (row, first, len, at) in self.pieces() {
            state[row * self.dim + first..][..len].copy_from_slice(&tiles[at..at + len]);
        }
    }

    /// Row, first column, columns, and place in the tiles of what lies together.
    fn pieces(self) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let Tiles { dim, columns } = self;
        (0..self.width() / columns).flat_map(move |tile| {
            let (first, len) = (tile * columns, columns.min(dim - tile * columns));
            (0..dim).map(move |row| (row, first, len, (tile * dim + row) * columns))
        })
    }
}
