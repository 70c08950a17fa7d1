//! Versions of attention of one key/value head over keys and values in half precision, checked against f64 and timed
//! in turn, one thread, in CPU time, next to the peaks measured in the same turns.
//!
//! 64 rows with eight query heads each: `naive` (all scores of a row, their softmax, the weighted sum; four rows are
//! timed), `online` (blocks of 64 positions, softmax corrected as it goes, f32, 16 rows at a time; what the backend
//! ships for exact arithmetic), `integers` (16-bit integers, 16 rows at a time, and 64; the latter is what the backend
//! ships). One row: `integers`, `widened` (f32 by way of a widened block), `in place` (halves widened in registers;
//! what the backend ships). The kernels are those of `crates/cpu`.

#[path = "../../../crates/cpu/src/kernels"]
#[allow(dead_code)] // what the backend alone uses
mod kernels {
    pub(crate) mod int16;
    mod lanes;
    mod product;
    mod rows;
    mod simd;
    mod vnni_attention;
    mod x86;

    use half::f16;
    use x86::Avx512;

    pub(crate) static INTEGERS: &int16::IntAttention = &vnni_attention::FUNCTIONS;

    /// out[r, n] = Σ_k x[r][k] · w[n, k].
    ///
    /// # Safety
    /// As for [`product::dot_form`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) unsafe fn dot(x: &[*const f32], w: *const f32, (n, k): (usize, usize), out: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { product::dot_form::<Avx512, f32>(x, (w, k), (n, k), (out, n), false) }
    }

    /// As [`dot`].
    ///
    /// # Safety
    /// As there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) unsafe fn dot_half(x: &[*const f32], w: *const f16, (n, k): (usize, usize), out: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { product::dot_form::<Avx512, f16>(x, (w, k), (n, k), (out, n), false) }
    }

    /// out[r, n] += Σ_k a[r, k] · b[k, n].
    ///
    /// # Safety
    /// As for [`product::sum_form`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) unsafe fn sum(shape: (usize, usize, usize), a: *const f32, b: *const f32, out: *mut f32) {
        let (_, k, n) = shape;
        // SAFETY: the caller's promise.
        unsafe { product::sum_form::<Avx512, f32>(shape, (a, k), (b, n), (out, n), true) }
    }

    /// As [`sum`].
    ///
    /// # Safety
    /// As there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) unsafe fn sum_half(shape: (usize, usize, usize), a: *const f32, b: *const f16, out: *mut f32) {
        let (_, k, n) = shape;
        // SAFETY: the caller's promise.
        unsafe { product::sum_form::<Avx512, f16>(shape, (a, k), (b, n), (out, n), true) }
    }

    /// Scaled scores to e^(score − largest): the new largest, the correction of what was before, the sum.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) fn softmax_block(scores: &mut [f32], scale: f32, largest: f32) -> (f32, f32, f32) {
        rows::softmax_block::<Avx512>(scores, scale, largest)
    }
}

use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use clock::{Random, alternate, multiply_adds};
use half::f16;
use half::slice::HalfFloatSliceExt;
use kernels::int16::{Block, Row};
use model::GRID;

const DIM: usize = 256;
/// Query heads of the key/value head.
const HEADS: usize = 8;
const ROWS: usize = GRID;
/// Pairs that `dot` takes together.
const CHUNK: usize = 32;
const ROUNDS: usize = 7;
/// Rows that the naive version is timed with.
const FEW: usize = 4;

/// Steps of twelve multiply-adds of vectors.
const PEAK_STEPS: usize = 400_000;

/// vpdpwssd from registers.
#[target_feature(enable = "avx512f,avx512vnni")]
fn i16_peak() {
    let factor = _mm512_set1_epi16(black_box(3));
    let mut sums = [factor; 12];
    for _ in 0..PEAK_STEPS {
        sums.iter_mut().for_each(|sum| *sum = _mm512_dpwssd_epi32(*sum, factor, factor));
    }
    black_box(sums);
}

/// Keys and values of all positions, and the queries of the last [`ROWS`] of them.
struct Input {
    positions: usize,
    /// [positions][DIM].
    keys: Vec<f16>,
    values: Vec<f16>,
    /// The same numbers in single precision, for the naive version.
    wide_keys: Vec<f32>,
    wide_values: Vec<f32>,
    /// [ROWS][HEADS][DIM].
    queries: Vec<f32>,
}

impl Input {
    fn new(positions: usize, random: &mut Random) -> Input {
        let mut numbers = |len: usize, most: f32| -> Vec<f32> {
            (0..len).map(|_| (random.next() as u32 as f32 / u32::MAX as f32 * 2.0 - 1.0) * most).collect()
        };
        let mut halves =
            || numbers(positions * DIM, 1.0).into_iter().map(f16::from_f32).collect::<Vec<f16>>();
        let (keys, values) = (halves(), halves());
        let widened = |halves: &[f16]| halves.iter().map(|x| x.to_f32()).collect();
        let (wide_keys, wide_values) = (widened(&keys), widened(&values));
        Input { positions, keys, values, wide_keys, wide_values, queries: numbers(ROWS * HEADS * DIM, 4.0) }
    }

    /// Positions that a row sees.
    fn seen(&self, row: usize) -> usize {
        self.positions - ROWS + row + 1
    }

    fn query(&self, pair: usize) -> &[f32] {
        &self.queries[pair * DIM..(pair + 1) * DIM]
    }

    /// The output of a row's head.
    fn exact(&self, pair: usize) -> Vec<f64> {
        let (seen, query) = (self.seen(pair / HEADS), self.query(pair));
        let product = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
        let score = |key: &[f32]| key.iter().zip(query).map(product).sum::<f64>() / (DIM as f64).sqrt();
        let scores: Vec<f64> = self.wide_keys.chunks_exact(DIM).take(seen).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let weighted = |i: usize| {
            let values = self.wide_values[i..].iter().step_by(DIM);
            values.zip(&weights).map(|(value, weight)| f64::from(*value) * weight).sum::<f64>() / sum
        };
        (0..DIM).map(weighted).collect()
    }
}

/// Row after row, head after head, over all positions at once.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn naive(input: &Input, rows: Range<usize>, out: &mut [f32]) {
    let mut scores = vec![0.0; input.positions];
    for pair in rows.start * HEADS..rows.end * HEADS {
        let (query, out) = (input.query(pair), &mut out[pair * DIM..(pair + 1) * DIM]);
        let scores = &mut scores[..input.seen(pair / HEADS)];
        for (score, key) in scores.iter_mut().zip(input.wide_keys.chunks_exact(DIM)) {
            // 16 sums, so that the compiler may use vectors.
            let mut sums = [0.0; 16];
            for (key, query) in key.as_chunks::<16>().0.iter().zip(query.as_chunks::<16>().0) {
                sums.iter_mut().zip(key).zip(query).for_each(|((sum, k), q)| *sum += k * q);
            }
            *score = sums.iter().sum::<f32>() / (DIM as f32).sqrt();
        }
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
        let sum: f32 = scores.iter().sum();
        out.fill(0.0);
        for (weight, value) in scores.iter().zip(input.wide_values.chunks_exact(DIM)) {
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
        }
        out.iter_mut().for_each(|out| *out /= sum);
    }
}

/// Blocks of [`GRID`] positions in f32, keys and values widened for all pairs or, `in_place`, in registers.
fn online(input: &Input, rows: Range<usize>, in_place: bool, out: &mut [f32]) {
    let pairs = rows.len() * HEADS;
    let (mut keys, mut values) = (vec![0.0; GRID * DIM], vec![0.0; GRID * DIM]);
    let mut scores = vec![0.0; pairs * GRID];
    let (mut largest, mut sums) = (vec![f32::NEG_INFINITY; pairs], vec![0.0; pairs]);
    let out = &mut out[rows.start * HEADS * DIM..rows.end * HEADS * DIM];
    out.fill(0.0);
    for start in (0..input.seen(rows.end - 1)).step_by(GRID) {
        let most = GRID.min(input.positions - start);
        let block = start * DIM..(start + most) * DIM;
        let (half_keys, half_values) = (&input.keys[block.clone()], &input.values[block]);
        if !in_place {
            half_keys.convert_to_f32_slice(&mut keys[..most * DIM]);
            half_values.convert_to_f32_slice(&mut values[..most * DIM]);
        }
        for (i, scores) in scores.chunks_mut(CHUNK * GRID).enumerate() {
            let first = rows.start * HEADS + i * CHUNK;
            let queries: Vec<*const f32> =
                (first..first + scores.len() / GRID).map(|pair| input.query(pair).as_ptr()).collect();
            // SAFETY: whole queries, a block of GRID positions, room for the scores; features checked in `main`.
            unsafe {
                match in_place {
                    true => kernels::dot_half(&queries, half_keys.as_ptr(), (GRID, DIM), scores.as_mut_ptr()),
                    false => kernels::dot(&queries, keys.as_ptr(), (GRID, DIM), scores.as_mut_ptr()),
                }
            }
        }
        for (pair, scores) in scores.chunks_exact_mut(GRID).enumerate() {
            let seen = GRID.min(input.seen(rows.start + pair / HEADS) - start);
            let (scores, beyond) = scores.split_at_mut(seen);
            // SAFETY: features checked in `main`.
            let (new, correction, sum) =
                unsafe { kernels::softmax_block(scores, 1.0 / (DIM as f32).sqrt(), largest[pair]) };
            beyond.fill(0.0);
            largest[pair] = new;
            sums[pair] = sums[pair] * correction + sum;
            out[pair * DIM..(pair + 1) * DIM].iter_mut().for_each(|out| *out *= correction);
        }
        let (shape, scores, out) = ((pairs, GRID, DIM), scores.as_ptr(), out.as_mut_ptr());
        // SAFETY: scores are [pairs][GRID], values [GRID][DIM], out [pairs][DIM]; features checked in `main`.
        unsafe {
            match in_place {
                true => kernels::sum_half(shape, scores, half_values.as_ptr(), out),
                false => kernels::sum(shape, scores, values.as_ptr(), out),
            }
        }
    }
    for (out, sum) in out.chunks_exact_mut(DIM).zip(sums) {
        out.iter_mut().for_each(|out| *out /= sum);
    }
}

/// On integers of 16 bits.
fn integers(input: &Input, rows: Range<usize>, out: &mut [f32]) {
    let (functions, pairs) = (kernels::INTEGERS, rows.len() * HEADS);
    let (mut keys, mut values) = (vec![0; GRID * DIM], vec![0; GRID * DIM]);
    let (mut queries, mut weights) = (vec![0; pairs * DIM], vec![0; pairs * GRID]);
    let mut block = Block::new(DIM, &mut keys, &mut values);
    let round = |(i, query): (usize, &mut [i16])| {
        let scale = (functions.round)(input.query(rows.start * HEADS + i), query);
        Row::new(scale / (DIM as f32).sqrt())
    };
    let mut states: Vec<Row> = queries.chunks_exact_mut(DIM).enumerate().map(round).collect();
    let out = &mut out[rows.start * HEADS * DIM..rows.end * HEADS * DIM];
    out.fill(0.0);
    for start in (0..input.seen(rows.end - 1)).step_by(GRID) {
        let most = GRID.min(input.seen(rows.end - 1) - start);
        let positions = start * DIM..(start + most) * DIM;
        (functions.pack)(&input.keys[positions.clone()], &input.values[positions], DIM, &mut block);
        for (pair, state) in states.iter_mut().enumerate() {
            state.seen = GRID.min(input.seen(rows.start + pair / HEADS) - start);
        }
        (functions.weigh)(&block, &queries, &mut states, &mut weights);
        (functions.sum)(&block, &states, &weights, out);
    }
    for (out, state) in out.chunks_exact_mut(DIM).zip(&states) {
        out.iter_mut().for_each(|out| *out /= state.sum);
    }
}

/// A version: its name, whether it multiplies integers, its rows and how many of them it takes at a time, how far it
/// may be off.
struct Version(&'static str, bool, Range<usize>, usize, f64);

/// The lone row of the second table sees whole blocks.
const LAST: Range<usize> = ROWS - 1..ROWS;

const VERSIONS: [Version; 7] = [
    Version("naive", false, ROWS - FEW..ROWS, FEW, 1e-5),
    Version("online, 16", false, 0..ROWS, 16, 1e-5),
    Version("integers, 16", true, 0..ROWS, 16, 2e-3),
    Version("integers, 64", true, 0..ROWS, 64, 2e-3),
    Version("integers, 1", true, LAST, 1, 2e-3),
    Version("widened, 1", false, LAST, 1, 1e-5),
    Version("in place, 1", false, LAST, 1, 1e-5),
];

fn run(Version(name, integer, rows, step, _): &Version, input: &Input, out: &mut [f32]) {
    for first in rows.clone().step_by(*step) {
        let rows = first..first + step;
        match (*name, *integer) {
            // SAFETY: features checked in `main`.
            ("naive", _) => unsafe { naive(input, rows, out) },
            (_, true) => integers(input, rows, out),
            (name, false) => online(input, rows, name.starts_with("in place"), out),
        }
    }
}

fn main() {
    for feature in [is_x86_feature_detected!("avx512vnni"), is_x86_feature_detected!("avx512bw")] {
        assert!(feature && is_x86_feature_detected!("avx512dq"), "AVX-512 with VNNI is needed");
        assert!(is_x86_feature_detected!("avx512vl"), "AVX-512 with VNNI is needed");
        assert!(
            is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            "FMA and F16C are needed"
        );
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut out = vec![0.0; ROWS * HEADS * DIM];
    for positions in [2048, 8192] {
        let input = Input::new(positions, &mut random);
        for version @ Version(name, _, rows, _, most) in &VERSIONS {
            run(version, &input, &mut out);
            for pair in [rows.start * HEADS, rows.end * HEADS - 1] {
                let (found, exact) = (&out[pair * DIM..(pair + 1) * DIM], input.exact(pair));
                let error: f64 = found.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
                let error = (error / exact.iter().map(|b| b * b).sum::<f64>()).sqrt();
                assert!(error < *most, "{name} is off by {error:e}");
            }
        }
        let [f32_peak, i16_peak, times @ ..]: [f64; 9] = alternate(ROUNDS, |version| match version {
            // SAFETY: features checked above.
            0 => unsafe { multiply_adds(PEAK_STEPS) },
            // SAFETY: as above.
            1 => unsafe { i16_peak() },
            version => run(&VERSIONS[version - 2], &input, &mut out),
        });
        let peaks = [(16, f32_peak), (32, i16_peak)].map(|(lanes, s)| (PEAK_STEPS * 12 * lanes) as f64 / s);
        println!("{positions} positions; f32 {:.0} GMAC/s, vpdpwssd {:.0}", peaks[0] * 1e-9, peaks[1] * 1e-9);
        println!("version, rows at a time | us a row and head | GMAC/s, share of the peak");
        for (Version(name, integer, rows, ..), seconds) in VERSIONS.iter().zip(times) {
            let pairs = (rows.len() * HEADS) as f64;
            let rate = pairs * (2 * DIM * positions) as f64 / seconds;
            let peak = peaks[usize::from(*integer)];
            println!("{name:23} | {:17.1} | {:6.1}, {:.2}", seconds / pairs * 1e6, rate * 1e-9, rate / peak);
        }
    }
}
