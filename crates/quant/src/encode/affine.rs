//! Formats whose weights are `scale · code − min`, with a level for the scale and one for the min of each
//! sub-block and an `f16` that multiplies either: Q2_K, Q4_K, Q5_K.
//!
//! Every sub-block first finds its free scale and min. For a few pairs of the two `f16` each sub-block then
//! takes the pair of levels that costs least with its codes chosen anew, and the two are refitted together by
//! least squares until that stops helping.

use half::f16;

use super::block::{Block, dot, round};

/// Passes of least squares after the best start is known.
const REFITS: usize = 4;

/// Passes of least squares for each first try of a sub-block.
const FREE_REFITS: usize = 2;

/// A line through a sub-block: weights are `s · code − m`, m ≥ 0.
#[derive(Clone, Copy, Default)]
struct Line {
    s: f32,
    m: f32,
}

/// Numbers of a format.
struct Plan<'a> {
    /// Largest code.
    codes: f32,
    /// Largest level of scale and min.
    levels: f32,
    /// First tries of the sub-block's range over its scale.
    spans: &'a [f32],
    /// Levels of the scale tried on either side of the free one.
    reach: i32,
}

/// What was chosen for a super-block of `S` sub-blocks.
#[derive(Clone)]
struct Choice<const S: usize> {
    stored: [f16; 2],
    /// What `stored` stands for, in units of the block.
    d: Line,
    /// Levels of scale and min, whole numbers.
    levels: [Line; S],
    cost: f32,
    refit: Line,
}

/// 256 weights in 16 sub-blocks: levels of 4 bits (scale low, min high), codes of 2 bits, both scales.
pub(super) fn q2_k(block: &Block<256>) -> [u8; 84] {
    const SPANS: [f32; 7] = super::levels::spaced(1.8, 0.3);
    let plan = Plan { codes: 3.0, levels: 15.0, spans: &SPANS, reach: 3 };
    let choice = search::<16, 16>(block, &plan);

    let mut bytes = [0; 84];
    for (byte, level) in bytes.iter_mut().zip(&choice.levels) {
        *byte = level.s as u8 | (level.m as u8) << 4;
    }
    for (i, q) in all_codes(block, &plan, &choice).into_iter().enumerate() {
        let (half, group, l) = (i / 128, i % 128 / 32, i % 32);
        bytes[16 + 32 * half + l] |= q << (2 * group);
    }
    put_scales(&mut bytes[80..84], &choice);
    bytes
}

/// 256 weights in 8 sub-blocks: both scales, levels of 6 bits, codes of 4 bits.
pub(super) fn q4_k(block: &Block<256>) -> [u8; 144] {
    const SPANS: [f32; 9] = super::levels::spaced(12.8, 0.4);
    let plan = Plan { codes: 15.0, levels: 63.0, spans: &SPANS, reach: 2 };
    let choice = search::<32, 8>(block, &plan);

    let mut bytes = [0; 144];
    put_scales(&mut bytes[..4], &choice);
    bytes[4..16].copy_from_slice(&pack_levels(&choice.levels));
    put_low_halves(&mut bytes[16..], &all_codes(block, &plan, &choice));
    bytes
}

/// 256 weights in 8 sub-blocks: both scales, levels of 6 bits, high bits of the codes, low 4 bits.
pub(super) fn q5_k(block: &Block<256>) -> [u8; 176] {
    const SPANS: [f32; 9] = super::levels::spaced(28.8, 0.4);
    let plan = Plan { codes: 31.0, levels: 63.0, spans: &SPANS, reach: 2 };
    let choice = search::<32, 8>(block, &plan);
    let q = all_codes(block, &plan, &choice);

    let mut bytes = [0; 176];
    put_scales(&mut bytes[..4], &choice);
    bytes[4..16].copy_from_slice(&pack_levels(&choice.levels));
    for (i, q) in q.iter().enumerate() {
        bytes[16 + i % 32] |= (q >> 4) << (i / 32);
    }
    put_low_halves(&mut bytes[48..], &q.map(|q| q & 15));
    bytes
}

fn put_scales<const S: usize>(bytes: &mut [u8], choice: &Choice<S>) {
    bytes[..2].copy_from_slice(&choice.stored[0].to_le_bytes());
    bytes[2..].copy_from_slice(&choice.stored[1].to_le_bytes());
}

/// Codes of 4 bits: of 64 weights, the first 32 in the low halves of 32 bytes.
fn put_low_halves(bytes: &mut [u8], q: &[u8; 256]) {
    for (bytes, q) in bytes.as_chunks_mut::<32>().0.iter_mut().zip(q.as_chunks::<64>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = q[l] | q[l + 32] << 4;
        }
    }
}

/// Twelve bytes for eight pairs of 6 bits: four pairs whole, of the other four the low 4 bits in bytes of
/// their own and the high 2 bits on top of the first eight bytes.
fn pack_levels(levels: &[Line; 8]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for (j, level) in levels.iter().enumerate() {
        let (s, m) = (level.s as u8, level.m as u8);
        if j < 4 {
            bytes[j] |= s;
            bytes[4 + j] |= m;
        } else {
            bytes[4 + j] = s & 15 | m << 4;
            bytes[j - 4] |= s >> 4 << 6;
            bytes[j] |= m >> 4 << 6;
        }
    }
    bytes
}

fn search<const L: usize, const S: usize>(block: &Block<256>, plan: &Plan<'_>) -> Choice<S> {
    let _: () = const { assert!(L * S == 256, "sub-blocks cover the super-block") };
    let (x, w) = (block.x.as_chunks::<L>().0, block.w.as_chunks::<L>().0);
    let free: [Line; S] = std::array::from_fn(|j| free_line(&x[j], &w[j], plan));
    let at = |d: Line| levels_at::<L, S>(block, plan, &free, d);

    let (full_s, even_s) = first_tries(&free.map(|line| line.s), plan.levels);
    let (full_m, even_m) = first_tries(&free.map(|line| line.m), plan.levels);
    let starts = [(full_s, full_m), (even_s, even_m), (even_s, full_m), (full_s, even_m)];
    let starts = starts.map(|(s, m)| at(Line { s, m }));
    let mut best =
        starts.into_iter().reduce(|a, b| if b.cost < a.cost { b } else { a }).expect("four starts");
    for _ in 0..REFITS {
        let next = at(best.refit);
        if next.stored == best.stored || next.cost >= best.cost {
            break;
        }
        best = next;
    }
    best
}

/// Two scales to try for the levels of these values: the one that gives the largest value the largest level,
/// and, among those somewhat larger, the one of which all values are nearest to multiples.
fn first_tries<const S: usize>(values: &[f32; S], levels: f32) -> (f32, f32) {
    const TRIES: usize = 60;
    let largest = values.iter().fold(0.0, |m: f32, &v| m.max(v));
    let mut best = (f32::INFINITY, 0.0);
    for i in 0..TRIES {
        let inverse = levels * (1.0 - 0.2 * i as f32 / TRIES as f32) / largest.max(f32::MIN_POSITIVE);
        let d = 1.0 / inverse;
        let mut miss = 0.0;
        for v in values {
            let rest = v - d * round(v * inverse, 0.0, levels);
            miss += rest * rest;
        }
        if miss < best.0 {
            best = (miss, d);
        }
    }
    (largest / levels, best.1)
}

/// The line that serves a sub-block best: spans around the whole range, each refitted twice.
fn free_line<const L: usize>(x: &[f32; L], w: &[f32; L], plan: &Plan<'_>) -> Line {
    let low = x.iter().fold(0.0, |m: f32, &x| m.min(x));
    let high = x.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let mut best = (f32::INFINITY, Line { s: 0.0, m: -low });
    if low == high {
        return best.1;
    }
    for span in plan.spans {
        let s = (high - low) / span;
        // Where the span has more steps than there are codes, both ends are cut, or one.
        let cut = (span - plan.codes) * s;
        for share in [0.0, 0.5, 1.0] {
            let mut line = Line { s, m: (-low - share * cut).max(0.0) };
            for _ in 0..=FREE_REFITS {
                let fit = Fit::new(x, w, line, plan.codes);
                if fit.cost < best.0 {
                    best = (fit.cost, line);
                }
                line = fit.solve();
            }
        }
    }
    best.1
}

/// A sub-block with its codes chosen for one line: the error and the sums to refit.
#[derive(Clone, Copy, Default)]
struct Fit {
    cost: f32,
    /// Σ w·code², Σ w·code, Σ w.
    qq: f32,
    q: f32,
    one: f32,
    /// Σ w·x·code, Σ w·x.
    xq: f32,
    x: f32,
}

impl Fit {
    #[inline(always)]
    fn new<const L: usize>(x: &[f32; L], w: &[f32; L], line: Line, codes: f32) -> Self {
        let q = line.codes(x, codes);
        let (mut wq, mut wr, mut r) = ([0.0; L], [0.0; L], [0.0; L]);
        for i in 0..L {
            wq[i] = w[i] * q[i];
            r[i] = x[i] - (line.s * q[i] - line.m);
            wr[i] = w[i] * r[i];
        }
        let ones = [1.0; L];
        Self {
            cost: dot(&wr, &r),
            qq: dot(&wq, &q),
            q: dot(&wq, &ones),
            one: dot(w, &ones),
            xq: dot(&wq, x),
            x: dot(w, x),
        }
    }

    /// The sums with codes multiplied by `s` and the min by `m`.
    fn scaled(&self, s: f32, m: f32) -> Self {
        Self {
            cost: self.cost,
            qq: self.qq * s * s,
            q: self.q * s * m,
            one: self.one * m * m,
            xq: self.xq * s,
            x: self.x * m,
        }
    }

    fn add(&mut self, other: &Self) {
        self.cost += other.cost;
        self.qq += other.qq;
        self.q += other.q;
        self.one += other.one;
        self.xq += other.xq;
        self.x += other.x;
    }

    /// Minimises Σ w·(x − s·code + m)² over s and m ≥ 0.
    fn solve(&self) -> Line {
        let determinant = self.qq * self.one - self.q * self.q;
        if determinant > 1e-6 * self.qq * self.one {
            let s = (self.xq * self.one - self.x * self.q) / determinant;
            let m = (self.xq * self.q - self.x * self.qq) / determinant;
            if m >= 0.0 {
                return Line { s, m };
            }
        }
        Line { s: if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }, m: 0.0 }
    }
}

impl Line {
    #[inline(always)]
    fn codes<const L: usize>(self, x: &[f32; L], codes: f32) -> [f32; L] {
        let inverse = if self.s == 0.0 { 0.0 } else { 1.0 / self.s };
        x.map(|x| round((x + self.m) * inverse, 0.0, codes))
    }
}

/// The best levels of every sub-block for one pair of scales.
fn levels_at<const L: usize, const S: usize>(
    block: &Block<256>,
    plan: &Plan<'_>,
    free: &[Line; S],
    d: Line,
) -> Choice<S> {
    let ((s, d_s), (m, d_m)) = (block.stored(d.s), block.stored(d.m));
    let d = Line { s: d_s, m: d_m };
    let (x, w) = (block.x.as_chunks::<L>().0, block.w.as_chunks::<L>().0);
    let mut sums = Fit::default();
    let levels = std::array::from_fn(|j| {
        let (level, fit) = best_level(&x[j], &w[j], plan, free[j], d);
        sums.add(&fit.scaled(level.s, level.m));
        level
    });
    Choice { stored: [s, m], d, levels, cost: sums.cost, refit: sums.solve() }
}

/// The levels of one sub-block: those around the free scale, each with the min that suits it.
fn best_level<const L: usize>(
    x: &[f32; L],
    w: &[f32; L],
    plan: &Plan<'_>,
    free: Line,
    d: Line,
) -> (Line, Fit) {
    let level = |v: f32, d: f32| if d == 0.0 { 0.0 } else { (v / d).clamp(0.0, plan.levels) };
    let (wanted_s, wanted_m) = (level(free.s, d.s), level(free.m, d.m));
    let mut best = (Line::default(), Fit { cost: f32::INFINITY, ..Fit::default() });
    let mut consider = |s: f32, m: f32| {
        let fit = Fit::new(x, w, Line { s: d.s * s, m: d.m * m }, plan.codes);
        if fit.cost < best.1.cost {
            best = (Line { s, m }, fit);
        }
        fit
    };
    for step in 1 - plan.reach..=plan.reach {
        let s = (wanted_s.floor() + step as f32).clamp(0.0, plan.levels);
        let mut tried = [-1.0; 2];
        for m in [wanted_m.floor(), wanted_m.ceil()] {
            let fit = consider(s, m);
            // With this scale and these codes another min may be better than the free one.
            let suited = level((d.s * s * fit.q - fit.x) / fit.one, d.m);
            let suited = round(suited, 0.0, plan.levels);
            if suited != m && !tried.contains(&suited) {
                consider(s, suited);
                tried = [tried[1], suited];
            }
        }
    }
    best
}

fn all_codes<const S: usize>(block: &Block<256>, plan: &Plan<'_>, choice: &Choice<S>) -> [u8; 256] {
    let mut codes = [0; 256];
    let len = 256 / S;
    for (j, level) in choice.levels.iter().enumerate() {
        let line = Line { s: choice.d.s * level.s, m: choice.d.m * level.m };
        let inverse = if line.s == 0.0 { 0.0 } else { 1.0 / line.s };
        for (code, x) in codes[len * j..][..len].iter_mut().zip(&block.x[len * j..]) {
            *code = round((x + line.m) * inverse, 0.0, plan.codes) as u8;
        }
    }
    codes
}
