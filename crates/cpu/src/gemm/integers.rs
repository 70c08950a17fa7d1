//! Products on integers; see `kernels::int8` for the arithmetic.

use std::ops::Range;

use crate::kernels::{Ahead, Codes, GEMV_ROWS, GROUP, GROUPS, Gemv, Kernels, PANEL, Panel, form, is_integer};
use crate::memory::{Out, Rows, reserve};
use crate::team::{Scratch, Team};

use super::Weights;

/// Rows that meet a panel together: several register tiles.
pub(super) const CHUNK: usize = 48;

/// Whether inputs of so many columns are rounded to integers at all.
pub(crate) fn rounds(team: &Team, cols: usize) -> bool {
    !team.exact && cols.is_multiple_of(GROUP)
}

/// Inputs of products, perhaps rounded to integers too.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// As they are, unless only integers were made.
    pub(super) numbers: Option<Rows<'a>>,
    /// As integers.
    codes: Option<Rows<'a, Codes>>,
}

impl<'a> Input<'a> {
    /// Inputs that stay in single precision.
    pub(crate) fn exact(numbers: Rows<'a>) -> Input<'a> {
        Input { numbers: Some(numbers), codes: None }
    }

    /// Inputs that were rounded when they were made, if they were: see [`rounds`].
    pub(crate) fn with(team: &Team, numbers: Rows<'a>, codes: Rows<'a, Codes>, cols: usize) -> Input<'a> {
        Input { numbers: Some(numbers), codes: rounds(team, cols).then_some(codes) }
    }

    /// Inputs that exist as integers only: for weights that are integers too ([`is_integer`]).
    pub(crate) fn rounded(codes: Rows<'a, Codes>) -> Input<'a> {
        Input { numbers: None, codes: Some(codes) }
    }

    /// Rounds inputs of `cols` columns into `codes`.
    pub(crate) fn round(
        team: &mut Team,
        numbers: Rows<'a>,
        cols: usize,
        codes: &'a mut Vec<Codes>,
    ) -> Input<'a> {
        if !rounds(team, cols) {
            return Input::exact(numbers);
        }
        let (kernels, per_row) = (team.kernels, Codes::per_row(cols));
        reserve(codes, numbers.count() * per_row, Codes::ZERO);
        let out = Out::new(codes, per_row);
        team.split(numbers.count(), |rows, _| {
            for row in rows {
                // SAFETY: each row belongs to one member.
                (kernels.round)(numbers.row(row, cols), unsafe { out.part(row, 0, per_row) });
            }
        });
        Input { numbers: Some(numbers), codes: Some(Rows::new(codes, per_row, numbers.count())) }
    }

    /// Some of the rows, which lie one after the other.
    pub(crate) fn part(&self, rows: Range<usize>) -> Input<'a> {
        let numbers = self.numbers.map(|numbers| numbers.part(rows.clone()));
        Input { numbers, codes: self.codes.map(|codes| codes.part(rows)) }
    }

    /// Asks for the integers of some rows.
    pub(super) fn prefetch(&self, kernels: &Kernels, rows: Range<usize>) {
        if let Some(codes) = self.codes {
            for row in rows {
                for codes in codes.whole_row(row) {
                    (kernels.prefetch)((&raw const *codes).cast(), Codes::HOT_BYTES);
                }
            }
        }
    }

    /// Number of rows.
    pub(super) fn count(&self) -> usize {
        self.numbers.map(|numbers| numbers.count()).or(self.codes.map(|codes| codes.count())).unwrap_or(0)
    }

    /// The integers, if the weights are integers too.
    pub(super) fn codes_for(&self, weights: &[Weights]) -> Option<Rows<'a, Codes>> {
        self.codes.filter(|_| weights.iter().all(|weights| is_integer(weights.ty)))
    }
}

/// As [`super::panels`], on integers.
pub(super) fn panels(
    kernels: &Kernels,
    scratch: &mut Scratch,
    (weights, ahead): (&[Weights], usize),
    x: Rows<Codes>,
    mut emit: impl FnMut(Range<usize>, &mut [f32], usize),
) {
    if let Some(gemv) = kernels.gemv.filter(|_| x.count() <= GEMV_ROWS) {
        return few(gemv, scratch, (weights, ahead), x, emit);
    }
    let groups = weights[0].cols / GROUP;
    let per_row = Codes::per_row(weights[0].cols);
    let (chunks, stride) = (x.count().div_ceil(CHUNK), weights.len() * PANEL);
    // With a single chunk a pair is used at once, and its place is taken by the next.
    let kept = chunks > 1;
    reserve(&mut scratch.panels, if kept { weights.len() * per_row } else { 2 }, Panel::ZERO);
    scratch.tile.reserve(CHUNK * stride);
    // The rows of a chunk; of those behind the last, none.
    let chunk_rows = |chunk: usize| {
        let bound = |chunk: usize| chunk.min(chunks) * x.count() / chunks;
        bound(chunk)..bound(chunk + 1)
    };
    let weights_count = weights.len();
    for chunk in 0..chunks {
        let rows = chunk_rows(chunk);
        let mut starts = [std::ptr::null(); CHUNK];
        for block in 0..per_row {
            let groups = block * GROUPS..groups.min((block + 1) * GROUPS);
            for (start, row) in starts.iter_mut().zip(rows.clone()) {
                *start = &raw const x.row(row, per_row)[block];
            }
            for (pair, weights) in weights.chunks(2).enumerate() {
                let place = if kept { 2 * pair * per_row + block * weights.len() } else { 0 };
                let panels = &mut scratch.panels[place..][..weights.len()];
                if chunk == 0 {
                    for (weights, panel) in weights.iter().zip(&mut *panels) {
                        fill(kernels, weights, &groups, panel);
                    }
                }
                let (pairs, next) = (weights_count.div_ceil(2), chunk_rows(chunk + 1));
                let share = |pair: usize| next.start + pair * next.len() / pairs;
                for row in share(pair)..share(pair + 1) {
                    let codes: *const u8 = (&raw const x.row(row, per_row)[block]).cast();
                    (kernels.prefetch)(codes, Codes::HOT_BYTES);
                }
                let out = (scratch.tile[2 * pair * PANEL..].as_mut_ptr(), stride);
                let later = if chunk == 0 { later(weights, &groups, ahead) } else { Ahead::NONE };
                let shape = (groups.len(), block > 0, later);
                // SAFETY: each start points to the block's codes of a row, the tile has room for the chunk.
                unsafe {
                    multiply(kernels, &starts[..rows.len()], (weights, panels), out, shape);
                }
            }
        }
        let len = rows.len() * stride;
        emit(rows, &mut scratch.tile[..len], stride);
    }
}

/// Multiplies rows with one or two panels, which may differ in form.
///
/// # Safety
/// As for [`Kernels::int_product`].
unsafe fn multiply(
    kernels: &Kernels,
    x: &[*const Codes],
    (weights, panels): (&[Weights], &[Panel]),
    (out, stride): (*mut f32, usize),
    (groups, add, ahead): (usize, bool, Ahead),
) {
    let form_of = |i: usize| form(weights[i].ty);
    // SAFETY: the caller's promise.
    unsafe {
        match panels {
            [a, b] if weights[1].rows > 0 && form_of(0) == form_of(1) => {
                (kernels.int_product)(x, &[a, b], (out, stride), (groups, form_of(0)), add, ahead);
            }
            _ => {
                for (i, panel) in panels.iter().enumerate().filter(|(i, _)| weights[*i].rows > 0) {
                    let out = (out.add(i * PANEL), stride);
                    let ahead = if i == 0 { ahead } else { Ahead::NONE };
                    (kernels.int_product)(x, &[panel], out, (groups, form_of(i)), add, ahead);
                }
            }
        }
    }
}

/// As [`panels`], for few rows: weights are multiplied as they are decoded.
fn few(
    gemv: Gemv,
    scratch: &mut Scratch,
    (weights, ahead): (&[Weights], usize),
    x: Rows<Codes>,
    mut emit: impl FnMut(Range<usize>, &mut [f32], usize),
) {
    let (count, stride) = (x.count(), weights.len() * PANEL);
    let mut starts = [std::ptr::null(); GEMV_ROWS];
    for (row, start) in starts.iter_mut().enumerate().take(count) {
        *start = x.row(row, Codes::per_row(weights[0].cols)).as_ptr();
    }
    scratch.tile.reserve(GEMV_ROWS * stride);
    for (p, weights) in weights.iter().enumerate().filter(|(_, weights)| weights.rows > 0 && count > 0) {
        let row_bytes = weights.bytes.len() / weights.rows;
        let mut rows: [&[u8]; PANEL] = [&[]; PANEL];
        for (row, bytes) in rows.iter_mut().zip(weights.bytes.chunks_exact(row_bytes)) {
            *row = bytes;
        }
        let out = (&mut scratch.tile[p * PANEL..], stride);
        let next = weights.bytes.as_ptr().wrapping_add(ahead);
        // SAFETY: each start points to a row as long as the weights'.
        unsafe { gemv(weights.ty, &rows[..weights.rows], &starts[..count], out, next) };
    }
    emit(0..count, &mut scratch.tile[..count * stride], stride);
}

/// What lies `ahead` of some groups of columns of one or two panels: rows are far apart, which the processor does
/// not foresee.
fn later(weights: &[Weights], groups: &Range<usize>, ahead: usize) -> Ahead {
    let columns = groups.start * GROUP..groups.end * GROUP;
    let start = |weights: &Weights| weights.blocks(0, &columns).as_ptr().wrapping_add(ahead);
    match weights.iter().find(|weights| weights.rows > 0) {
        None => Ahead::NONE,
        Some(first) => Ahead {
            starts: std::array::from_fn(|i| {
                weights.get(i).filter(|w| w.rows > 0).map_or(start(first), start)
            }),
            row_bytes: first.bytes.len() / first.rows,
            lines: (first.blocks(0, &columns).len() + 63).div_ceil(64),
        },
    }
}

/// Decodes some groups of columns of a panel.
fn fill(kernels: &Kernels, weights: &Weights, groups: &Range<usize>, panel: &mut Panel) {
    if weights.rows == 0 {
        return;
    }
    let columns = groups.start * GROUP..groups.end * GROUP;
    let mut rows: [&[u8]; PANEL] = [&[]; PANEL];
    for (row, bytes) in rows.iter_mut().enumerate().take(weights.rows) {
        *bytes = weights.blocks(row, &columns);
    }
    (kernels.fill)(weights.ty, &rows[..weights.rows], columns.len(), panel);
}

#[cfg(test)]
mod tests;
