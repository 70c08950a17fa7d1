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

    /// The scale from which on `next`, which is less steep, is lower.
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
        lines.iter().find(|line| s <= line.until).unwrap_or(&lines[lines.len() - 1])
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
        if first.n > last.n {
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
    let least = rows.least(s);
    if least >= first.at(s) {
        return;
    }
    let middle = rows.find(s, least);
    if middle.n < first.n && middle.n > last.n {
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
    fn lowest(self, s: f32) -> Line {
        self.find(s, self.least(s))
    }

    /// The lowest value of any line at scale `s`.
    fn least(self, s: f32) -> f32 {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { least_avx2(self, s) };
        }
        least(self, s)
    }

    /// The line that has this lowest value.
    fn find(self, s: f32, least: f32) -> Line {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { find_avx2(self, s, least) };
        }
        find(self, s, least)
    }
}

/// [`find`], compiled for AVX2. Without fused operations the result is the same to the bit.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn find_avx2(rows: Rows<'_>, s: f32, least: f32) -> Line {
    find(rows, s, least)
}

#[inline(always)]
fn find(rows: Rows<'_>, s: f32, least: f32) -> Line {
    for (i, (c, n)) in rows.c.iter().zip(rows.n).enumerate() {
        // One more than the place, 0 for nowhere: a maximum, unlike a search, goes through all lanes at once.
        let mut place = 0;
        for k in 0..LANES {
            let here = if s * n[k] - c[k] == least { k as u32 + 1 } else { 0 };
            place = here.max(place);
        }
        if place > 0 {
            let k = place as usize - 1;
            return Line { c: c[k], n: n[k], row: (LANES * i + k) as u16, until: f32::INFINITY };
        }
    }
    unreachable!("the least value belongs to one of the rows")
}

/// [`least`], compiled for AVX2. Without fused operations the result is the same to the bit.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn least_avx2(rows: Rows<'_>, s: f32) -> f32 {
    least(rows, s)
}

#[inline(always)]
fn least(rows: Rows<'_>, s: f32) -> f32 {
    let mut least = [f32::INFINITY; LANES];
    for (c, n) in rows.c.iter().zip(rows.n) {
        for k in 0..LANES {
            let value = s * n[k] - c[k];
            least[k] = if value < least[k] { value } else { least[k] };
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            least[k] = if least[k + width] < least[k] { least[k + width] } else { least[k] };
        }
        width /= 2;
    }
    least[0]
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
