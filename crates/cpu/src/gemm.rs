//! Products of activations with weights in file form.
//!
//! out[r, n] = Σ_k x[r, k] · W[n, k]. The unit of work is a panel of [`PANEL`] weight rows: it is decoded
//! once, into memory near the thread, and meets all rows of its group while it is there. Dense matrices are
//! one group, experts one group each.
//!
//! The sum over k is cut every [`K_BLOCK`] columns; inside a block the kernel fixes the order, and blocks are
//! added in order. So a row's products depend on that row and the weights alone, however many rows come
//! with it and whoever computes them.
//!
//! Inputs that come rounded to integers meet quantised weights as integers ([`integers`]), everything else
//! is multiplied in single precision.

mod integers;

use std::ops::Range;

pub(crate) use integers::{Input, rounds};
use model::ResidentMatrix;
use quant::Type;

use crate::kernels::{Kernels, PANEL};
use crate::memory::{Out, Rows};
use crate::team::{Scratch, Team};

/// Rows that meet a panel together: their products stay in the first cache.
const CHUNK: usize = 32;

/// Columns whose products are summed in registers: with a panel of them, half of a first cache. A multiple
/// of every block length.
const K_BLOCK: usize = 512;

/// Up to so many rows, `F32` weights are used where they lie: copying them would take longer than using them.
const IN_PLACE_ROWS: usize = 4;

/// Cost of decoding a panel, in rows multiplied with it.
const DECODE_ROWS: usize = 8;

/// A weight matrix in file form, [rows = outputs, cols = inputs].
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a> {
    /// Type of its blocks.
    pub(crate) ty: Type,
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
    /// The blocks, row by row.
    pub(crate) bytes: &'a [u8],
}

impl<'a> From<&'a ResidentMatrix> for Weights<'a> {
    fn from(matrix: &'a ResidentMatrix) -> Weights<'a> {
        Weights { ty: matrix.ty, rows: matrix.rows, cols: matrix.cols, bytes: &matrix.bytes }
    }
}

impl<'a> Weights<'a> {
    /// Panel number `index`; beyond the last one, a panel without rows.
    fn panel(&self, index: usize) -> Weights<'a> {
        let row_bytes = self.bytes.len() / self.rows;
        let rows = (index * PANEL).min(self.rows)..((index + 1) * PANEL).min(self.rows);
        let bytes = &self.bytes[rows.start * row_bytes..rows.end * row_bytes];
        Weights { rows: rows.len(), bytes, ..*self }
    }

    /// The blocks of some columns of a row; `columns` starts and ends between blocks.
    fn blocks(&self, row: usize, columns: &Range<usize>) -> &'a [u8] {
        let row_bytes = self.bytes.len() / self.rows;
        let at = |column: usize| column / self.ty.block_len() * self.ty.block_bytes();
        &self.bytes[row * row_bytes..][at(columns.start)..at(columns.end)]
    }

    /// The numbers of the panel from column `first` on, if they can be used where they lie.
    fn in_place(&self, first: usize) -> Option<*const f32> {
        let start: *const f32 = self.bytes[first * size_of::<f32>()..].as_ptr().cast();
        let usable = cfg!(target_endian = "little") && self.rows.is_multiple_of(4) && start.is_aligned();
        usable.then_some(start)
    }
}

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(crate) enum Then<'a> {
    /// It is stored.
    Store,
    /// It is added to what is there.
    Add,
    /// Each row is multiplied by its factor and stored.
    Scale(&'a [f32]),
}

/// A dense product.
pub(crate) struct Product<'a> {
    /// The weights.
    pub(crate) weights: Weights<'a>,
    /// The inputs.
    pub(crate) x: Input<'a>,
    /// Where the outputs go, one row for each of `x`.
    pub(crate) out: Out,
    /// What becomes of them.
    pub(crate) then: Then<'a>,
}

/// Several dense products in one region.
pub(crate) fn dense(team: &mut Team, products: &[Product]) {
    let kernels = team.kernels;
    let costs: Vec<(usize, u64)> = products
        .iter()
        .map(|p| (p.weights.rows.div_ceil(2 * PANEL), ((p.x.count() + DECODE_ROWS) * p.weights.cols) as u64))
        .collect();
    team.split_costs(&costs, |index, units, scratch| {
        let Product { weights, x, out, then } = &products[index];
        for unit in units {
            let pair = [weights.panel(2 * unit), weights.panel(2 * unit + 1)];
            panels(kernels, scratch, pair, *x, |rows, tiles| {
                for (p, tile) in tiles.into_iter().enumerate().filter(|(p, _)| pair[*p].rows > 0) {
                    for (row, from) in rows.clone().zip(tile.chunks_exact(PANEL)) {
                        let from = &from[..pair[p].rows];
                        // SAFETY: these columns of the output belong to this unit alone.
                        let to = unsafe { out.part(row, (2 * unit + p) * PANEL, from.len()) };
                        match then {
                            Then::Store => to.copy_from_slice(from),
                            Then::Add => to.iter_mut().zip(from).for_each(|(to, x)| *to += x),
                            Then::Scale(by) => to.iter_mut().zip(from).for_each(|(to, x)| *to = x * by[row]),
                        }
                    }
                }
            });
        }
    });
}

/// The first half of a gated network for one group of rows: SiLU(gate · x) · (up · x).
pub(crate) struct GateUp<'a> {
    /// [width, hidden].
    pub(crate) gate: Weights<'a>,
    /// [width, hidden].
    pub(crate) up: Weights<'a>,
    /// The group's rows.
    pub(crate) x: Input<'a>,
    /// Row of the output where the group begins.
    pub(crate) first: usize,
}

/// The first halves of gated networks, all groups in one region.
pub(crate) fn gate_up(team: &mut Team, groups: &[GateUp], out: Out) {
    let kernels = team.kernels;
    let costs: Vec<(usize, u64)> = groups
        .iter()
        .map(|g| (g.gate.rows.div_ceil(PANEL), ((g.x.count() + DECODE_ROWS) * g.gate.cols) as u64))
        .collect();
    team.split_costs(&costs, |index, units, scratch| {
        let GateUp { gate, up, x, first } = &groups[index];
        for unit in units {
            let pair = [gate.panel(unit), up.panel(unit)];
            panels(kernels, scratch, pair, *x, |rows, [gates, ups]| {
                (kernels.swiglu)(gates, ups);
                for (row, from) in rows.zip(gates.chunks_exact(PANEL)) {
                    let from = &from[..pair[0].rows];
                    // SAFETY: these columns of the group's rows belong to this unit alone.
                    let to = unsafe { out.part(first + row, unit * PANEL, from.len()) };
                    to.copy_from_slice(from);
                }
            });
        }
    });
}

/// The second half of a gated network for one group of rows.
pub(crate) struct Down<'a> {
    /// [hidden, width].
    pub(crate) weights: Weights<'a>,
    /// What the first half made of the group's rows.
    pub(crate) x: Input<'a>,
    /// Row of the sum for each row of the group.
    pub(crate) rows: &'a [u32],
    /// Factor of each row.
    pub(crate) factors: &'a [f32],
}

/// The second halves of gated networks, all groups in one region: sum[row] += factor · (weights · x), in the
/// order of `groups`. With `residual`, the complete `sum` joins it.
///
/// Threads own columns of the sum, so that its order does not depend on them.
pub(crate) fn down(
    team: &mut Team,
    groups: &[Down],
    hidden: usize,
    sum: Out,
    residual: Option<(Out, usize)>,
) {
    let kernels = team.kernels;
    team.split(hidden.div_ceil(2 * PANEL), |units, scratch| {
        for Down { weights, x, rows: to_rows, factors } in groups {
            for unit in units.clone() {
                let pair = [weights.panel(2 * unit), weights.panel(2 * unit + 1)];
                panels(kernels, scratch, pair, *x, |rows, tiles| {
                    for (p, tile) in tiles.into_iter().enumerate().filter(|(p, _)| pair[*p].rows > 0) {
                        for (row, from) in rows.clone().zip(tile.chunks_exact(PANEL)) {
                            let (column, from) = ((2 * unit + p) * PANEL, &from[..pair[p].rows]);
                            // SAFETY: these columns of the sum belong to this thread alone.
                            let to = unsafe { sum.part(to_rows[row] as usize, column, from.len()) };
                            (kernels.add_scaled)(factors[row], from, to);
                        }
                    }
                });
            }
        }
        if let Some((residual, rows)) = residual {
            let columns = (units.start * 2 * PANEL).min(hidden)..(units.end * 2 * PANEL).min(hidden);
            for row in 0..rows {
                // SAFETY: these columns of both belong to this thread alone.
                let (to, from) = unsafe {
                    (
                        residual.part(row, columns.start, columns.len()),
                        sum.part(row, columns.start, columns.len()),
                    )
                };
                to.iter_mut().zip(from).for_each(|(to, x)| *to += *x);
            }
        }
    });
}

/// Multiplies all rows of `x` with some panels. `emit` is given a range of rows and, for each panel, their
/// products: [rows of the range][PANEL].
fn panels<const P: usize>(
    kernels: &Kernels,
    scratch: &mut Scratch,
    weights: [Weights; P],
    x: Input,
    emit: impl FnMut(Range<usize>, [&mut [f32]; P]),
) {
    match x.codes_for(&weights) {
        Some(codes) => integers::panels(kernels, scratch, weights, codes, emit),
        None => numbers(kernels, scratch, weights, x.numbers, emit),
    }
}

/// As [`panels`], in single precision.
fn numbers<const P: usize>(
    kernels: &Kernels,
    scratch: &mut Scratch,
    weights: [Weights; P],
    x: Rows,
    mut emit: impl FnMut(Range<usize>, [&mut [f32]; P]),
) {
    let cols = weights[0].cols;
    let blocks = cols.div_ceil(K_BLOCK);
    let chunks = x.count().div_ceil(CHUNK);
    // With a single chunk every block is used at once, and its place is taken by the next.
    let kept = if chunks > 1 { blocks } else { 1 };
    let in_place = weights.map(|w| w.ty == Type::F32 && x.count() <= IN_PLACE_ROWS);
    scratch.panel.reserve(P * kept * PANEL * K_BLOCK);
    scratch.tile.reserve(P * CHUNK * PANEL);
    for chunk in 0..chunks {
        let rows = chunk * CHUNK..x.count().min((chunk + 1) * CHUNK);
        for block in 0..blocks {
            let columns = block * K_BLOCK..cols.min((block + 1) * K_BLOCK);
            let mut starts = [std::ptr::null(); CHUNK];
            for (start, row) in starts.iter_mut().zip(rows.clone()) {
                *start = x.row(row, cols)[columns.start..].as_ptr();
            }
            for (p, weights) in weights.iter().enumerate().filter(|(_, w)| w.rows > 0) {
                let place = (p * kept + block % kept) * PANEL * K_BLOCK;
                let panel = &mut scratch.panel[place..][..PANEL * K_BLOCK];
                let lying = if in_place[p] { weights.in_place(columns.start) } else { None };
                if chunk == 0 && lying.is_none() {
                    decode(kernels, weights, &columns, panel);
                }
                let w = lying.map_or((panel.as_ptr(), K_BLOCK), |start| (start, cols));
                let tile = &mut scratch.tile[p * CHUNK * PANEL..][..CHUNK * PANEL];
                let n = weights.rows.next_multiple_of(4);
                // SAFETY: each start points to the block's columns of a row; the panel has n rows (those
                // behind the last are zeros, and weights in place are a multiple of four) of these columns;
                // the tile has room for the chunk.
                unsafe {
                    let (shape, out) = ((n, columns.len()), (tile.as_mut_ptr(), PANEL));
                    (kernels.dot_form)(&starts[..rows.len()], w, shape, out, block > 0);
                }
            }
        }
        let mut tiles = scratch.tile.chunks_exact_mut(CHUNK * PANEL);
        emit(
            rows.clone(),
            std::array::from_fn(|_| &mut tiles.next().expect("reserved")[..rows.len() * PANEL]),
        );
    }
}

/// Decodes some columns of a panel: [rows][K_BLOCK], zeros behind the last row up to a multiple of four.
fn decode(kernels: &Kernels, weights: &Weights, columns: &Range<usize>, panel: &mut [f32]) {
    for (row, out) in panel.chunks_exact_mut(K_BLOCK).enumerate().take(weights.rows.next_multiple_of(4)) {
        if row < weights.rows {
            (kernels.decode)(weights.ty, weights.blocks(row, columns), &mut out[..columns.len()]);
        } else {
            out[..columns.len()].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests;
