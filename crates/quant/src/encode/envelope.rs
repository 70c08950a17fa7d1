//! The best codebook row of a group as a function of the scale, exactly.
//!
//! A group of weights x (with error weights w) that takes row g at scale s costs
//!
//! ```text
//! Σ w·(x − s·g)² = Σ w·x² + s·(s·n − c),   c = 2·Σ w·x·g,  n = Σ w·g²
//! ```
//!
//! so over the rows, `s·n − c` are straight lines in s, and the best row at any scale is the lowest line
//! there. One pass over the codebook computes c and n of every row; the few rows that are lowest somewhere
//! (the lower envelope) are kept. After that the search over scales is cheap *and* misses no row.

use std::ops::Range;

use super::levels::Fit;

/// Rows worked on together: enough independent lanes for any vector unit.
pub(super) const LANES: usize = 32;

/// One number of each of so many rows.
type Lanes = [f32; LANES];

/// A codebook of rows of `D` values, laid out for going through all rows at once.
pub(super) struct Book<const D: usize> {
    /// For each position in the row the values of so many rows.
    chunks: Vec<[Lanes; D]>,
}

impl<const D: usize> Book<D> {
    /// Lays out `rows`, a multiple of 32.
    pub(super) fn new(rows: impl Iterator<Item = [f32; D]>) -> Self {
        let rows: Vec<_> = rows.collect();
        let (chunks, rest) = rows.as_chunks::<LANES>();
        assert!(rest.is_empty(), "codebooks have a multiple of {LANES} rows");
        let transposed = |rows: &[[f32; D]; LANES]| std::array::from_fn(|i| rows.map(|row| row[i]));
        Self { chunks: chunks.iter().map(transposed).collect() }
    }

    /// Row `index`.
    pub(super) fn row(&self, index: usize) -> [f32; D] {
        self.chunks[index / LANES].map(|values| values[index % LANES])
    }
}

/// One row at all scales.
#[derive(Clone, Copy)]
pub(super) struct Line {
    /// 2·Σ w·x·g, less what a sign that parity forbids takes away.
    pub(super) c: f32,
    /// Σ w·g².
    pub(super) n: f32,
    /// The row.
    pub(super) row: u16,
    /// The scale from which on the next line of the envelope is lower.
    until: f32,
}

impl Line {
    fn at(&self, s: f32) -> f32 {
        s * self.n - self.c
    }

    /// Whether this line rises less steeply, by more than rounding explains: where weights are alike, rows
    /// that differ in order only have the same line up to rounding, and no meaningful crossing.
    fn is_flatter_than(&self, other: &Line) -> bool {
        self.n < (1.0 - 1e-5) * other.n
    }

    /// The scale from which on `next`, which is flatter, is lower.
    fn crossing(&self, next: &Line) -> f32 {
        (self.c - next.c) / (self.n - next.n)
    }

    /// What the group costs at scale `s`, less Σ w·x², and the sums to refit.
    pub(super) fn fit(&self, s: f32) -> Fit {
        Fit { cost: s * self.at(s), xq: 0.5 * self.c, qq: self.n }
    }
}

/// Envelopes of many groups.
#[derive(Default)]
pub(super) struct Envelopes {
    lines: Vec<Line>,
    /// Where each envelope ends in `lines`.
    ends: Vec<usize>,
    /// c and n of every row for the group at hand, in chunks.
    c: Vec<Lanes>,
    c_flipped: Vec<Lanes>,
    n: Vec<Lanes>,
}

impl Envelopes {
    /// How many were pushed.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The best line of envelope `index` (counted in the order of pushing) at scale `s`.
    pub(super) fn at(&self, index: usize, s: f32) -> &Line {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        let lines = &self.lines[start..self.ends[index]];
        // Counting needs no branch that depends on `s`; the last line has no end.
        let passed = lines.iter().map(|line| usize::from(line.until < s)).sum::<usize>();
        &lines[passed.min(lines.len() - 1)]
    }

    /// Measures every row of `book` against a group: `a` = w·x and `w`. What is pushed next refers to it.
    pub(super) fn measure<const D: usize>(&mut self, book: &Book<D>, a: &[f32; D], w: &[f32; D]) {
        let chunks = book.chunks.len();
        self.c.resize(chunks, [0.0; LANES]);
        self.c_flipped.resize(chunks, [0.0; LANES]);
        self.n.resize(chunks, [0.0; LANES]);
        let out = [&mut self.c[..], &mut self.c_flipped, &mut self.n];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { measure_avx2(book, a, w, out) };
        }
        measure(book, a, w, out);
    }

    /// Adds the envelope of the measured group for the scales of `range`; outside, it is that of the nearest
    /// end. If `flipped`, one sign is wrong: where that costs least.
    pub(super) fn push(&mut self, range: &Range<f32>, flipped: bool) {
        let rows = Rows { c: if flipped { &self.c_flipped } else { &self.c }, n: &self.n };
        let first = rows.lowest(range.start);
        let last = rows.lowest(range.end);
        let start = self.lines.len();
        self.lines.push(first);
        if last.is_flatter_than(&first) {
            between(rows, &first, &last, &mut self.lines);
            self.lines.push(last);
        }
        for i in start + 1..self.lines.len() {
            self.lines[i - 1].until = self.lines[i - 1].crossing(&self.lines[i]);
        }
        self.ends.push(self.lines.len());
    }
}

/// Appends to `envelope`, in order, the lines that are lowest somewhere between `first` and `last`.
fn between(rows: Rows<'_>, first: &Line, last: &Line, envelope: &mut Vec<Line>) {
    // A line that is above both ends and above their crossing is lowest nowhere in between.
    let s = first.crossing(last);
    let lanes = rows.least(s);
    let least = least_of(lanes);
    if least >= first.at(s) {
        return;
    }
    let middle = rows.find(s, &lanes, least);
    if middle.is_flatter_than(first) && last.is_flatter_than(&middle) {
        between(rows, first, &middle, envelope);
        envelope.push(middle);
        between(rows, &middle, last, envelope);
    }
}

/// c and n of all rows.
#[derive(Clone, Copy)]
struct Rows<'a> {
    c: &'a [Lanes],
    n: &'a [Lanes],
}

impl Rows<'_> {
    /// The lowest line at scale `s`.
    fn lowest(self, s: f32) -> Line {
        let lanes = self.least(s);
        self.find(s, &lanes, least_of(lanes))
    }

    /// For each lane the lowest value of its lines at scale `s`.
    fn least(self, s: f32) -> Lanes {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { least_avx2(self, s) };
        }
        least(self, s)
    }

    /// The line whose value at scale `s` is `least`, the least of `lanes`.
    fn find(self, s: f32, lanes: &Lanes, least: f32) -> Line {
        let k = lanes.iter().position(|&value| value == least).expect("it is the least of these");
        let mut lines = self.c.iter().zip(self.n).map(|(c, n)| (c[k], n[k]));
        let i = lines.position(|(c, n)| s * n - c == least).expect("the lane has it from one of its lines");
        Line { c: self.c[i][k], n: self.n[i][k], row: (LANES * i + k) as u16, until: f32::INFINITY }
    }
}

fn least_of(mut lanes: Lanes) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            lanes[k] = if lanes[k + width] < lanes[k] { lanes[k + width] } else { lanes[k] };
        }
        width /= 2;
    }
    lanes[0]
}

/// [`least`], compiled for AVX2. Without fused operations the result is the same to the bit.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn least_avx2(rows: Rows<'_>, s: f32) -> Lanes {
    least(rows, s)
}

#[inline(always)]
fn least(rows: Rows<'_>, s: f32) -> Lanes {
    let mut least = [f32::INFINITY; LANES];
    for (c, n) in rows.c.iter().zip(rows.n) {
        for k in 0..LANES {
            let value = s * n[k] - c[k];
            least[k] = if value < least[k] { value } else { least[k] };
        }
    }
    least
}

/// [`measure`], compiled for AVX2. Without fused operations the result is the same to the bit.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn measure_avx2<const D: usize>(book: &Book<D>, a: &[f32; D], w: &[f32; D], out: [&mut [Lanes]; 3]) {
    measure(book, a, w, out);
}

/// Writes c, c with the cheapest sign wrong, and n of every row.
#[inline(always)]
fn measure<const D: usize>(book: &Book<D>, a: &[f32; D], w: &[f32; D], out: [&mut [Lanes]; 3]) {
    let [c_out, flipped_out, n_out] = out;
    let out = c_out.iter_mut().zip(flipped_out).zip(n_out);
    for (values, ((c_out, flipped_out), n_out)) in book.chunks.iter().zip(out) {
        for k in 0..LANES {
            let (mut c, mut n, mut least) = (0.0, 0.0, f32::INFINITY);
            for i in 0..D {
                let ag = a[i] * values[i][k];
                c += ag;
                n += w[i] * values[i][k] * values[i][k];
                least = if ag < least { ag } else { least };
            }
            c_out[k] = 2.0 * c;
            flipped_out[k] = 2.0 * c - 4.0 * least;
            n_out[k] = n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codebook::IQ2_XXS_GRID;

    /// Weights and error weights of a few groups, all different.
    fn groups() -> impl Iterator<Item = ([f32; 8], [f32; 8])> {
        let value = |i: usize, j: usize| ((i * 37 + j * 101) % 89) as f32 / 89.0;
        (0..20).map(move |i| {
            let w = std::array::from_fn(|j| 0.1 + value(i + 7, 3 * j));
            (std::array::from_fn(|j| w[j] * (0.02 + value(i, j))), w)
        })
    }

    fn book() -> Book<8> {
        Book::new(IQ2_XXS_GRID.iter().map(|row| row.map(f32::from)))
    }

    #[test]
    fn the_envelope_is_the_lowest_line_at_every_scale() {
        let (book, mut envelopes) = (book(), Envelopes::default());
        let range = 0.005..0.06;
        for (a, w) in groups() {
            envelopes.measure(&book, &a, &w);
            for flipped in [false, true] {
                envelopes.push(&range, flipped);
                for step in 0..=100 {
                    let s = range.start + (range.end - range.start) * step as f32 / 100.0;
                    let rows = IQ2_XXS_GRID.iter().map(|row| row.map(f32::from));
                    let least =
                        rows.map(|row| row_cost(&row, &a, &w, s, flipped)).fold(f32::INFINITY, f32::min);
                    let line = envelopes.at(envelopes.len() - 1, s);
                    assert!(
                        line.fit(s).cost < least + 1e-4,
                        "{} instead of {least} at {s}",
                        line.fit(s).cost
                    );
                    let own = row_cost(&book.row(line.row.into()), &a, &w, s, flipped);
                    assert!((line.fit(s).cost - own).abs() < 1e-4, "the line belongs to another row");
                }
            }
        }
    }

    /// Σ w·(x − s·g)² − Σ w·x², for non-negative x, or with the sign of one x the wrong way.
    fn row_cost(row: &[f32; 8], a: &[f32; 8], w: &[f32; 8], s: f32, flipped: bool) -> f32 {
        let cost: f32 = (0..8).map(|i| s * s * w[i] * row[i] * row[i] - 2.0 * s * a[i] * row[i]).sum();
        let wrong = (0..8).map(|i| 4.0 * s * a[i] * row[i]).fold(f32::INFINITY, f32::min);
        if flipped { cost + wrong } else { cost }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn avx2_gives_the_same_bits() {
        if !is_x86_feature_detected!("avx2") {
            return;
        }
        let book = book();
        for (a, w) in groups() {
            let mut plain = [[[0.0; LANES]; 8]; 3];
            let mut wide = plain;
            measure(&book, &a, &w, plain.each_mut().map(|out| &mut out[..]));
            // SAFETY: the CPU has AVX2.
            unsafe { measure_avx2(&book, &a, &w, wide.each_mut().map(|out| &mut out[..])) };
            assert_eq!(plain, wide);
            let rows = Rows { c: &plain[0], n: &plain[2] };
            // SAFETY: the CPU has AVX2.
            assert_eq!(least(rows, 0.02), unsafe { least_avx2(rows, 0.02) });
        }
    }
}
