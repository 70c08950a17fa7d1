//! Versions of the gated delta rule of one value head, checked against f64 and timed in turn, one thread, in CPU
//! time, next to the f32 peak measured in the same turns.
//!
//! Versions: `naive` (the recurrence as it is written, row after row), `step` (the recurrence with each state read
//! twice and written once; what the backend ships for single tokens), `matrices` (cells of 64 rows, products of whole
//! matrices, loops between them), `tiles` (the same for 64 columns at a time, whose part of the state stays in the
//! first cache; what the backend ships). Products of keys with keys and queries, which value heads share, are made
//! beforehand. The last two kernels are those of `crates/cpu`.

#[path = "../../../crates/cpu/src/kernels"]
#[allow(dead_code)] // what the backend alone uses
mod kernels {
    pub(crate) mod delta;
    mod product;
    mod rows;
    mod simd;
    mod x86;

    use delta::{Cell, Step};

    /// Columns of a tile of a state.
    pub(crate) const COLUMNS: usize = delta::VECTORS * 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) fn cell(cell: &Cell, room: &mut [f32], values: &mut [f32], state: &mut [f32]) {
        delta::cell::<x86::Avx512>(cell, room, values, state, &mut []);
    }

    /// # Safety
    /// The state has a row for every number of the key, as long as `values`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) unsafe fn step(step: &Step, state: *mut f32, values: &mut [f32]) {
        let stride = values.len();
        // SAFETY: the caller's promise.
        unsafe { delta::step::<x86::Avx512>(step, (state, stride), (state, stride), values) }
    }
}

#[path = "../../../crates/cpu/src/memory.rs"]
#[allow(dead_code)] // what the backend alone uses
mod memory;

use clock::{Random, alternate, multiply_adds};
use kernels::COLUMNS;
use kernels::delta::{Cell, Step};
use memory::Aligned;
use model::GRID;

const DIM: usize = 128;
const CELLS: usize = 8;
const ROWS: usize = CELLS * GRID;
const ROUNDS: usize = 11;

/// Steps of twelve multiply-adds of vectors.
const PEAK_STEPS: usize = 200_000;

/// Rows of one head: queries, keys, values [ROWS][DIM]; beta and the logarithm of the decay.
struct Head {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    log_decay: Vec<f32>,
    /// q · k and k · k of every row with the rows of its cell up to itself: [ROWS][GRID].
    qk: Vec<f32>,
    kk: Vec<f32>,
}

impl Head {
    fn new(random: &mut Random) -> Head {
        let mut numbers = |len: usize, low: f32, high: f32| -> Vec<f32> {
            (0..len).map(|_| low + (high - low) * (random.next() as u32 as f32 / u32::MAX as f32)).collect()
        };
        let (mut q, mut k) = (numbers(ROWS * DIM, -1.0, 1.0), numbers(ROWS * DIM, -1.0, 1.0));
        for row in q.chunks_exact_mut(DIM).chain(k.chunks_exact_mut(DIM)) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
        }
        let products = |x: &[f32]| {
            let dot = |t: usize, j: usize| (0..DIM).map(|i| x[t * DIM + i] * k[j * DIM + i]).sum();
            let entry = |at: usize| (at / GRID, at / GRID / GRID * GRID + at % GRID);
            (0..ROWS * GRID).map(entry).map(|(t, j)| if j <= t { dot(t, j) } else { 0.0 }).collect()
        };
        let (qk, kk) = (products(&q), products(&k));
        let (v, beta) = (numbers(ROWS * DIM, -1.0, 1.0), numbers(ROWS, 0.0, 1.0));
        Head { q, k, v, beta, log_decay: numbers(ROWS, -0.2, 0.0), qk, kk }
    }

    /// Outputs and the state behind the last row.
    fn exact(&self, state: &[f32]) -> Vec<f64> {
        let mut s: Vec<f64> = state.iter().map(|&s| s.into()).collect();
        let mut out = Vec::new();
        for t in 0..ROWS {
            let at = |x: &[f32], i: usize| f64::from(x[t * DIM + i]);
            let sum =
                |s: &[f64], x: &[f32], c: usize| (0..DIM).map(|i| s[i * DIM + c] * at(x, i)).sum::<f64>();
            s.iter_mut().for_each(|s| *s *= f64::from(self.log_decay[t]).exp());
            let d = |c: usize| f64::from(self.beta[t]) * (at(&self.v, c) - sum(&s, &self.k, c));
            let d: Vec<f64> = (0..DIM).map(d).collect();
            (0..DIM * DIM).for_each(|i| s[i] += at(&self.k, i / DIM) * d[i % DIM]);
            out.extend((0..DIM).map(|c| sum(&s, &self.q, c)));
        }
        out.extend(s);
        out
    }
}

/// Row after row: S ← e^g S; d = beta (v − Sᵀk); S ← S + k dᵀ; o = Sᵀ q.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn naive(head: &Head, state: &mut [f32], out: &mut [f32]) {
    for (t, out) in out.chunks_exact_mut(DIM).enumerate() {
        let row = t * DIM..(t + 1) * DIM;
        let (q, k, v) = (&head.q[row.clone()], &head.k[row.clone()], &head.v[row]);
        let decay = head.log_decay[t].exp();
        state.iter_mut().for_each(|s| *s *= decay);
        let mut d = [0.0; DIM];
        for (state, k) in state.chunks_exact(DIM).zip(k) {
            d.iter_mut().zip(state).for_each(|(d, s)| *d += s * k);
        }
        d.iter_mut().zip(v).for_each(|(d, v)| *d = head.beta[t] * (v - *d));
        for (state, k) in state.chunks_exact_mut(DIM).zip(k) {
            state.iter_mut().zip(&d).for_each(|(s, d)| *s += k * d);
        }
        out.fill(0.0);
        for (state, q) in state.chunks_exact(DIM).zip(q) {
            out.iter_mut().zip(state).for_each(|(out, s)| *out += q * s);
        }
    }
}

fn step(head: &Head, state: &mut [f32], out: &mut [f32]) {
    out.copy_from_slice(&head.v);
    for (t, values) in out.chunks_exact_mut(DIM).enumerate() {
        let row = t * DIM..(t + 1) * DIM;
        let (q, k) = (&head.q[row.clone()], &head.k[row]);
        let step = Step { q, k, decay: head.log_decay[t].exp(), beta: head.beta[t] };
        // SAFETY: a whole state; features checked in `main`.
        unsafe { kernels::step(&step, state.as_mut_ptr(), values) };
    }
}

/// out[i] += a(i, p) · b[p], for `rows` rows of `out` and the rows of b that `terms` gives for each.
#[inline(always)]
fn add_products(out: &mut [f32], terms: impl Fn(usize) -> usize, a: impl Fn(usize, usize) -> f32, b: &[f32]) {
    for (i, out) in out.chunks_exact_mut(DIM).enumerate() {
        for (p, b) in b.chunks_exact(DIM).enumerate().take(terms(i)) {
            let a = a(i, p);
            out.iter_mut().zip(b).for_each(|(out, b)| *out += a * b);
        }
    }
}

/// Cell after cell, unrolled (see the kernel of the backend), whole matrices one after the other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn matrices(head: &Head, state: &mut [f32], out: &mut [f32]) {
    let (mut d, mut e) = (vec![0.0; GRID * DIM], [[0.0; GRID]; GRID]);
    for (cell, out) in out.chunks_exact_mut(GRID * DIM).enumerate() {
        let (first, numbers) = (cell * GRID, cell * GRID * DIM..(cell + 1) * GRID * DIM);
        let (q, k, v) = (&head.q[numbers.clone()], &head.k[numbers.clone()], &head.v[numbers]);
        let (qk, kk) = (&head.qk[first * GRID..], &head.kk[first * GRID..]);
        let mut sums = [0.0; GRID];
        let mut sum = 0.0;
        for (to, &log) in sums.iter_mut().zip(&head.log_decay[first..]) {
            sum += f64::from(log);
            *to = sum;
        }
        for t in 0..GRID {
            (0..=t).for_each(|j| e[t][j] = ((sums[t] - sums[j]) as f32).exp());
        }
        let start = sums.map(|sum| (sum as f32).exp());
        d.fill(0.0);
        add_products(&mut d, |_| DIM, |t, i| k[t * DIM + i], state);
        for (t, (d, v)) in d.chunks_exact_mut(DIM).zip(v.chunks_exact(DIM)).enumerate() {
            d.iter_mut().zip(v).for_each(|(d, v)| *d = head.beta[first + t] * (v - start[t] * *d));
        }
        for t in 1..GRID {
            let (above, row) = d.split_at_mut(t * DIM);
            let factor = |_, j| -head.beta[first + t] * e[t][j] * kk[t * GRID + j];
            add_products(&mut row[..DIM], |_| t, factor, above);
        }
        out.fill(0.0);
        add_products(out, |_| DIM, |t, i| q[t * DIM + i], state);
        for (out, start) in out.chunks_exact_mut(DIM).zip(start) {
            out.iter_mut().for_each(|out| *out *= start);
        }
        add_products(out, |t| t + 1, |t, j| e[t][j] * qk[t * GRID + j], &d);
        state.iter_mut().for_each(|s| *s *= start[GRID - 1]);
        add_products(state, |_| GRID, |i, t| e[GRID - 1][t] * k[t * DIM + i], &d);
    }
}

/// The backend's kernel; the state is stored as tiles.
fn tiles(head: &Head, room: &mut [f32], state: &mut [f32], out: &mut [f32]) {
    out.copy_from_slice(&head.v);
    for (cell, values) in out.chunks_exact_mut(GRID * DIM).enumerate() {
        let (rows, first) = (cell * GRID * DIM.., cell * GRID);
        let cell = Cell {
            rows: GRID,
            dim: DIM,
            q: &head.q[rows.clone()],
            k: &head.k[rows],
            qk: &head.qk[first * GRID..],
            kk: &head.kk[first * GRID..],
            beta: head.beta[first..].first_chunk().expect("a cell"),
            log_decay: head.log_decay[first..].first_chunk().expect("a cell"),
        };
        // SAFETY: features checked in `main`.
        unsafe { kernels::cell(&cell, room, values, state) };
    }
}

/// From rows to tiles of [`COLUMNS`] columns, or back.
fn retile(state: &[f32], back: bool) -> Vec<f32> {
    let place = |row: usize, column: usize| (column / COLUMNS * DIM + row) * COLUMNS + column % COLUMNS;
    let mut to = vec![0.0; state.len()];
    for (i, tiled) in (0..state.len()).map(|i| (i, place(i / DIM, i % DIM))) {
        match back {
            true => to[i] = state[tiled],
            false => to[tiled] = state[i],
        }
    }
    to
}

const VERSIONS: [&str; 4] = ["naive", "step", "matrices", "tiles"];

/// Runs a version.
fn run(version: usize, head: &Head, room: &mut [f32], state: &mut [f32], out: &mut [f32]) {
    match VERSIONS[version] {
        // SAFETY: features checked in `main`.
        "naive" => unsafe { naive(head, state, out) },
        "step" => step(head, state, out),
        // SAFETY: features checked in `main`.
        "matrices" => unsafe { matrices(head, state, out) },
        _ => tiles(head, room, state, out),
    }
}

fn main() {
    for feature in [is_x86_feature_detected!("avx512bw"), is_x86_feature_detected!("avx512vl")] {
        assert!(feature && is_x86_feature_detected!("avx512dq"), "AVX-512 is needed");
        assert!(
            is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            "FMA and F16C are needed"
        );
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let head = Head::new(&mut random);
    let before: Vec<f32> =
        (0..DIM * DIM).map(|_| random.next() as u32 as f32 / u32::MAX as f32 - 0.5).collect();
    let (mut room, mut out) = (Aligned::default(), Aligned::default());
    room.reserve(kernels::delta::room(DIM, COLUMNS));
    out.reserve(ROWS * DIM);
    let exact = head.exact(&before);
    for (version, name) in VERSIONS.iter().enumerate() {
        let tiled = *name == "tiles";
        let mut state = if tiled { retile(&before, false) } else { before.clone() };
        run(version, &head, &mut room, &mut state, &mut out[..ROWS * DIM]);
        let state = if tiled { retile(&state, true) } else { state };
        let found = out[..ROWS * DIM].iter().chain(&state);
        let error: f64 = found.zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
        let error = (error / exact.iter().map(|b| b * b).sum::<f64>()).sqrt();
        assert!(error < 1e-6, "{name} is off by {error:e}");
    }

    let mut state = Aligned::default();
    state.reserve(DIM * DIM);
    let [peak, times @ ..]: [f64; 5] = alternate(ROUNDS, |version| match version {
        // SAFETY: features checked above.
        0 => unsafe { multiply_adds(PEAK_STEPS) },
        version => {
            state[..DIM * DIM].copy_from_slice(&before);
            run(version - 1, &head, &mut room, &mut state[..DIM * DIM], &mut out[..ROWS * DIM]);
        }
    });
    let peak = (PEAK_STEPS * 12 * 16) as f64 / peak;
    println!("f32 multiply-adds from registers: {:.0} GMAC/s", peak * 1e-9);
    println!("version    us per 64 rows | GMAC/s of the recurrence, share of the peak");
    for (name, seconds) in VERSIONS.iter().zip(&times) {
        let rate = (3 * ROWS * DIM * DIM) as f64 / seconds;
        let cell = seconds / CELLS as f64 * 1e6;
        println!("{name:10} {cell:14.1} | {:24.1}, {:.2}", rate * 1e-9, rate / peak);
    }
}
