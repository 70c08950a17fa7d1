//! Products on integers.
//!
//! Activations are rounded to eight bits with one scale per 32 of them, weights are taken as the integers of
//! their blocks with the blocks' own scales. A run is 32 or 16 columns with one scale of the weights:
//!
//! out[r, n] = Σ_runs activation scale · (weight scale · Σ_run q_w · q_x) + offset · (activation scale · Σ_run q_x)
//!
//! Where a block's scales for 16 columns are integers so small that their products with its weights take six bits
//! (Q2_K), those products are the integers, and a run is 32 columns all the same.
//!
//! Sums inside a run are integers, hence exact; the product with the weight scale is rounded once. Runs are
//! added one after the other with one multiply-add each, one more for each offset. This fixes every bit: all
//! variants agree, and so does a row with itself among any others.
//!
//! The integer sum begins at the bits of [`MAGIC`], so that it ends as those of MAGIC + Σ: a multiply-add takes
//! the scale on and MAGIC off, and no conversion is needed.

use quant::Type;

use super::product::Target;
use super::unpack;

/// Columns with one activation scale.
pub(crate) const GROUP: usize = 32;

/// Weight rows of a panel.
pub(crate) const PANEL: usize = 16;

/// Columns of a panel.
pub(crate) const COLUMNS: usize = 512;

/// Groups of activations that meet a panel.
pub(crate) const GROUPS: usize = COLUMNS / GROUP;

/// 1.5 · 2^23. Around it numbers are as far apart as integers: an integer below 2^22 added to its bits is added
/// to its value.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// Its bits.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(super) const MAGIC_BITS: i32 = MAGIC.to_bits() as i32;

/// What weights are shifted by to be unsigned, as one factor of the multiplier must be.
pub(super) const SHIFT: i32 = 128;

/// The column (of a run of 16) whose number stands at each place. Decoders that look codes up for whole bytes
/// produce this order; it is free, since it is the same on both sides.
pub(super) const ORDER: [usize; 16] = {
    let mut order = [0; 16];
    let mut place = 0;
    while place < 16 {
        order[place] = place / 4 + [0, 8, 4, 12][place % 4];
        place += 1;
    }
    order
};

/// [`COLUMNS`] activations of a row as integers, and what products with them need to know. Of what stands
/// behind the integers, a product reads the arrays of its form only.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub(crate) struct Codes {
    /// The integers, each run of 16 in [`ORDER`].
    pub(super) q: [i8; COLUMNS],
    /// What the integers of a group are multiplied by.
    pub(super) scales: [f32; GROUPS],
    /// Where the integer sum of a group's products begins: [`MAGIC`] as bits, less what the shift of the weights
    /// adds, 128 Σq.
    pub(super) starts: [i32; GROUPS],
    /// The same for each half of a group.
    pub(super) half_starts: [[i32; 2]; GROUPS],
    /// scale · Σq of a group.
    pub(super) sums: [f32; GROUPS],
    /// The same for each half of a group.
    pub(super) half_sums: [[f32; 2]; GROUPS],
}

impl Codes {
    /// All zeros.
    pub(crate) const ZERO: Codes = Codes {
        q: [0; COLUMNS],
        scales: [0.0; GROUPS],
        starts: [0; GROUPS],
        half_starts: [[0; 2]; GROUPS],
        sums: [0.0; GROUPS],
        half_sums: [[0.0; 2]; GROUPS],
    };

    /// Leading bytes that every product reads.
    pub(crate) const HOT_BYTES: usize = std::mem::offset_of!(Codes, half_starts);

    /// How many of them hold a row of so many columns.
    pub(crate) const fn per_row(columns: usize) -> usize {
        columns.div_ceil(COLUMNS)
    }
}

/// Runs of a type's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// Whether a scale covers 16 columns instead of 32.
    pub(crate) halves: bool,
    /// Offsets of a group of 32 columns: none, one, or one for each half.
    pub(crate) offsets: usize,
    /// The smallest integer.
    pub(crate) lowest: i8,
    /// How far above it the largest lies at most.
    pub(crate) span: u8,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // whose multipliers need it
impl Form {
    /// The smallest integer, as it lies in a panel.
    pub(super) fn zero(self) -> u8 {
        (i32::from(self.lowest) + SHIFT) as u8
    }

    /// As [`Codes::starts`], for weights less [`Form::zero`].
    pub(super) fn start_from_zero(self, start: i32) -> i32 {
        MAGIC_BITS + (MAGIC_BITS - start) / SHIFT * i32::from(self.lowest)
    }

    /// How many sums of two products with weights less [`Form::zero`] can be added in sixteen bits.
    pub(super) fn pairs_in_sixteen_bits(self) -> i32 {
        i32::from(i16::MAX) / (2 * 127 * i32::from(self.span))
    }
}

/// Some columns of [`PANEL`] weight rows, decoded to integers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Panel {
    /// Four columns of every row: [columns / 4][rows][4], in the order of the activations, shifted.
    pub(super) q: [[u8; 4 * PANEL]; COLUMNS / 4],
    /// Scales: [runs][rows].
    pub(super) scales: [[f32; PANEL]; COLUMNS / 16],
    /// What every weight of a run, or of a half of one, is greater by: [offsets][rows].
    pub(super) offsets: [[f32; PANEL]; COLUMNS / 16],
}

impl Panel {
    /// All zeros.
    pub(crate) const ZERO: Panel = Panel {
        q: [[0; 4 * PANEL]; COLUMNS / 4],
        scales: [[0.0; PANEL]; COLUMNS / 16],
        offsets: [[0.0; PANEL]; COLUMNS / 16],
    };
}

/// Some columns of two panels in file form that will be decoded later: a product asks for them meanwhile, a few
/// lines at a time, since a processor waits for few lines at once.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    /// The first bytes of each panel.
    pub(crate) starts: [*const u8; 2],
    /// From a row to the next.
    pub(crate) row_bytes: usize,
    /// Cache lines of a row.
    pub(crate) lines: usize,
}

impl Ahead {
    /// Nothing.
    pub(crate) const NONE: Ahead = Ahead { starts: [std::ptr::null(); 2], row_bytes: 0, lines: 0 };

    /// How many lines there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        2 * PANEL * self.lines
    }

    /// One of them.
    #[inline(always)]
    pub(super) fn line(&self, index: usize) -> *const u8 {
        let (row, line) = (index % PANEL, index / (2 * PANEL));
        self.starts[index / PANEL % 2].wrapping_add(row * self.row_bytes + 64 * line)
    }
}

/// Rounds a row whose length is a multiple of [`GROUP`].
#[inline(always)]
pub(super) fn round(x: &[f32], out: &mut [Codes]) {
    for (x, codes) in x.chunks(COLUMNS).zip(out) {
        for (group, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            // SAFETY: the group lies in `codes`, which is borrowed mutably.
            unsafe { round_group(x, codes, group) };
        }
    }
}

/// Rounds a group. A number that is not finite makes the group's products NaN.
///
/// # Safety
/// `codes` must be alive, and nobody else may use the group's part of it.
#[inline(always)]
pub(super) unsafe fn round_group(x: &[f32; GROUP], codes: *mut Codes, group: usize) {
    // Compared as bits, in which NaN is the largest.
    let largest = x.iter().fold(0, |a: u32, x| a.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // Adding the magic number rounds to an integer, ties to even, which then lies in the low bits.
    let q: [i8; GROUP] = std::array::from_fn(|i| (x[i] * inverse + MAGIC).to_bits() as i8);
    let half = |first: usize| q[first..first + 16].iter().map(|&q| i32::from(q)).sum::<i32>();
    let sums = [half(0), half(16)];
    let scale = largest / 127.0;
    let start = |sum: i32| MAGIC.to_bits() as i32 - SHIFT * sum;
    let ordered: [i8; GROUP] = std::array::from_fn(|i| q[i / 16 * 16 + ORDER[i % 16]]);
    // SAFETY: inside `codes`, by the caller's promise nobody else's.
    unsafe {
        (&raw mut (*codes).q).cast::<[i8; GROUP]>().add(group).write(ordered);
        (&raw mut (*codes).scales[group]).write(scale);
        (&raw mut (*codes).starts[group]).write(start(sums[0] + sums[1]));
        (&raw mut (*codes).half_starts[group]).write(sums.map(start));
        (&raw mut (*codes).sums[group]).write(scale * (sums[0] + sums[1]) as f32);
        (&raw mut (*codes).half_sums[group]).write(sums.map(|sum| scale * sum as f32));
    }
}

/// Decodes some columns of up to [`PANEL`] rows, given as their blocks. Rows behind the last one hold
/// anything.
#[inline(always)]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    fill_with(unpack::form(ty), rows, columns, panel, (by_type(ty), transpose));
}

/// What decodes a row of blocks: bytes, integers, scales, offsets.
#[inline(always)]
pub(super) fn by_type(ty: Type) -> impl Fn(&[u8], &mut [u8], &mut [f32], &mut [f32]) {
    move |bytes, q, scales, offsets| unpack::unpack(ty, bytes, q, scales, offsets)
}

/// As [`fill`], given what decodes a row and what transposes as [`transpose`] does.
#[inline(always)]
pub(super) fn fill_with(
    form: Form,
    rows: &[&[u8]],
    columns: usize,
    panel: &mut Panel,
    (unpack, transpose): (
        impl Fn(&[u8], &mut [u8], &mut [f32], &mut [f32]),
        impl Fn(&[[u8; COLUMNS]; PANEL], usize, &mut Panel),
    ),
) {
    let mut natural = [[0; COLUMNS]; PANEL];
    let runs = columns / if form.halves { 16 } else { 32 };
    for (row, (bytes, natural)) in rows.iter().zip(&mut natural).enumerate() {
        let mut scales = [0.0; COLUMNS / 16];
        let mut offsets = [0.0; COLUMNS / 16];
        unpack(bytes, &mut natural[..columns], &mut scales, &mut offsets);
        let count = columns / GROUP * form.offsets;
        panel.scales[..runs].iter_mut().zip(scales).for_each(|(to, scale)| to[row] = scale);
        panel.offsets[..count].iter_mut().zip(offsets).for_each(|(to, offset)| to[row] = offset);
    }
    transpose(&natural, columns, panel);
}

/// Rows of natural order to columns of four in [`ORDER`].
#[inline(always)]
fn transpose(natural: &[[u8; COLUMNS]; PANEL], columns: usize, panel: &mut Panel) {
    for (row, natural) in natural.iter().enumerate() {
        let halves = natural[..columns].as_chunks::<16>().0;
        for (half, to) in halves.iter().zip(panel.q.as_chunks_mut::<4>().0) {
            for (i, to) in to.iter_mut().enumerate() {
                let four: [u8; 4] = std::array::from_fn(|j| half[ORDER[4 * i + j]]);
                to[4 * row..4 * row + 4].copy_from_slice(&four);
            }
        }
    }
}

/// out[r, n] (+)= Σ over the columns of `groups` groups, for rows `x` and the rows of the panels, those of the
/// second panel behind those of the first and so on. Where `add` is not set, sums begin at zero; where it is,
/// at what is there.
///
/// # Safety
/// `x[r]` must point to codes with `groups` groups, at most all of them; `out` to a row for each x, of
/// [`PANEL`] numbers for each panel, which nobody else uses.
#[inline(always)]
pub(super) unsafe fn product(
    x: &[*const Codes],
    panels: &[&Panel],
    (out, stride): Target,
    (groups, form): (usize, Form),
    add: bool,
    _: Ahead,
) {
    for (p, panel) in panels.iter().enumerate() {
        for (r, &x) in x.iter().enumerate() {
            // SAFETY: the caller's promise.
            let (x, out) = unsafe { (&*x, &mut *out.add(r * stride + p * PANEL).cast::<[f32; PANEL]>()) };
            let mut acc = if add { *out } else { [0.0; PANEL] };
            let q = x.q.as_chunks::<GROUP>().0;
            for g in 0..groups {
                if form.halves {
                    for (half, q) in q[g].as_chunks::<16>().0.iter().enumerate() {
                        run(panel, 2 * g + half, q, (x.half_starts[g][half], x.scales[g]), &mut acc);
                    }
                } else {
                    run(panel, g, &q[g], (x.starts[g], x.scales[g]), &mut acc);
                }
                let sums = if form.offsets == 1 { &x.sums[g..=g] } else { &x.half_sums[g] };
                let offsets = &panel.offsets[g * form.offsets..][..form.offsets];
                for (offsets, &sum) in offsets.iter().zip(sums) {
                    acc.iter_mut().zip(offsets).for_each(|(acc, offset)| *acc = offset.mul_add(sum, *acc));
                }
            }
            *out = acc;
        }
    }
}

/// Adds one run of columns.
#[inline(always)]
fn run<const N: usize>(
    panel: &Panel,
    index: usize,
    q: &[i8; N],
    (start, scale): (i32, f32),
    acc: &mut [f32; PANEL],
) {
    let mut sums = [start; PANEL];
    for (q, weights) in q.as_chunks::<4>().0.iter().zip(&panel.q[index * N / 4..]) {
        for (n, sum) in sums.iter_mut().enumerate() {
            for (j, &q) in q.iter().enumerate() {
                *sum += i32::from(weights[4 * n + j]) * i32::from(q);
            }
        }
    }
    for (n, acc) in acc.iter_mut().enumerate() {
        let weight = panel.scales[index][n];
        // (MAGIC + Σ) · weight − MAGIC · weight: exact but for one rounding, as scales have few digits.
        let sum_of_products = f32::from_bits(sums[n] as u32).mul_add(weight, -MAGIC * weight);
        *acc = sum_of_products.mul_add(scale, *acc);
    }
}

#[cfg(test)]
mod tests;
