//! Versions of the expert kernel (IQ2_XXS, gate and up of 512 × 2048), checked against f64 and timed, one
//! thread, in CPU time, next to the integer peak measured in the same run.
//!
//! Versions: `naive` (decode every weight for every row, f32), `panel` (decode once, f32), `table` (decode once
//! to integers through tables), `register` (decode once to integers in registers; what the backend ships). The
//! integer kernels are those of `crates/cpu`.

#[path = "../../../crates/cpu/src/kernels"]
#[allow(dead_code)] // what the backend alone uses
mod kernels {
    mod blocks;
    pub(crate) mod int8;
    mod lanes;
    mod product;
    mod simd;
    pub(crate) mod unpack;
    mod vnni;
    mod vnni_fill;

    use int8::{COLUMNS, Codes, Form, Panel};
    use quant::Type;

    pub(crate) fn round(x: &[f32], out: &mut [Codes]) {
        int8::round(x, out);
    }

    pub(crate) fn fill(ty: Type, rows: &[&[u8]], panel: &mut Panel) {
        // SAFETY: features checked in `main`.
        unsafe { vnni_fill::fill(ty, rows, COLUMNS, panel) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn loops(ty: Type, rows: &[&[u8]], panel: &mut Panel) {
        int8::fill(ty, rows, COLUMNS, panel);
    }

    pub(crate) fn fill_by_tables(ty: Type, rows: &[&[u8]], panel: &mut Panel) {
        // SAFETY: features checked in `main`.
        unsafe { loops(ty, rows, panel) }
    }

    /// As [`vnni::product`].
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn product(
        x: &[*const Codes],
        panels: &[&Panel],
        out: (*mut f32, usize),
        shape: (usize, Form),
        add: bool,
    ) {
        // SAFETY: features checked in `main`, the rest by the caller.
        unsafe { vnni::product(x, panels, out, shape, add, int8::Ahead::NONE) }
    }
}

use std::arch::x86_64::*;

use clock::{Random, STEP, dot_products, median};
use kernels::int8::{COLUMNS, Codes, GROUP, PANEL, Panel};
use kernels::unpack;
use quant::Type;

const K: usize = 2048;
const N: usize = 512;
const EXPERTS: usize = 48;
const ROW_BYTES: usize = K / 256 * 66;
const BLOCKS: usize = K / COLUMNS;

/// vpdpbusd from registers: multiply-adds a second.
#[target_feature(enable = "avx512f,avx512vnni")]
fn peak() -> f64 {
    const STEPS: usize = 4_000_000;
    (STEPS * STEP) as f64 / median(|| dot_products(STEPS))
}

fn weights(random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..N * ROW_BYTES).map(|_| random.next() as u8).collect();
    for block in bytes.as_chunks_mut::<66>().0 {
        // An f16 between 2^-5 and 2^-4.
        (block[0], block[1]) = (random.next() as u8, 0x28 | random.next() as u8 & 3);
    }
    bytes
}

struct Inputs {
    numbers: Vec<f32>,
    codes: Vec<Codes>,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Decode,
    Multiply,
    Both,
}

type Fill = fn(&[&[u8]], &mut Panel);

fn table(rows: &[&[u8]], panel: &mut Panel) {
    kernels::fill_by_tables(Type::IQ2_XXS, rows, panel);
}

fn register(rows: &[&[u8]], panel: &mut Panel) {
    kernels::fill(Type::IQ2_XXS, rows, panel);
}

/// Asks for the three lines of a row's blocks.
fn prefetch(bytes: *const u8) {
    for at in [0, 64, 128] {
        // SAFETY: a hint, harmless for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.wrapping_add(at).cast()) };
    }
}

/// One expert's gate and up for `tokens` rows: [N / PANEL][tokens][2][PANEL].
fn integers(fill: Fill, part: Part, both: [&[u8]; 2], x: &[Codes], panels: &mut [Panel; 2], out: &mut [f32]) {
    let tokens = x.len() / BLOCKS;
    let form = unpack::form(Type::IQ2_XXS);
    let size = tokens * PANEL;
    for first in (0..N).step_by(PANEL) {
        for block in 0..BLOCKS {
            if part != Part::Multiply {
                for (bytes, panel) in both.iter().zip(panels.iter_mut()) {
                    let bytes_of = |r: usize| &bytes[(first + r) * ROW_BYTES + block * 132..][..132];
                    let rows: [&[u8]; PANEL] = std::array::from_fn(bytes_of);
                    fill(&rows, panel);
                    rows.iter().for_each(|row| prefetch(row.as_ptr().wrapping_add(PANEL * ROW_BYTES)));
                }
            }
            if part != Part::Decode {
                let starts: Vec<*const Codes> = x.chunks(BLOCKS).map(|row| &raw const row[block]).collect();
                let at = first / PANEL * 2 * size;
                let out = (out[at..].as_mut_ptr(), 2 * PANEL);
                // SAFETY: lengths as the kernel wants them; features checked in `main`.
                unsafe {
                    let pair = [&panels[0], &panels[1]];
                    kernels::product(&starts, &pair, out, (COLUMNS / GROUP, form), block > 0);
                }
            }
        }
    }
}

/// Where the output of gate `n` for row `t` lies.
fn place(tokens: usize, t: usize, n: usize) -> usize {
    ((n / PANEL * tokens + t) * 2) * PANEL + n % PANEL
}

/// Single precision: decodes `block` rows of weights at a time, each for all tokens or for one.
#[target_feature(enable = "avx512f,avx2,fma")]
fn singles(once: bool, bytes: &[u8], x: &[f32], out: &mut [f32]) {
    let tokens = x.len() / K;
    let mut row = vec![0.0; K];
    for n in 0..N {
        let blocks = &bytes[n * ROW_BYTES..][..ROW_BYTES];
        for t in 0..tokens {
            if t == 0 || !once {
                quant::decode(Type::IQ2_XXS, blocks, &mut row).unwrap();
            }
            let mut acc = [0.0f32; 64];
            for (w, x) in row.as_chunks::<64>().0.iter().zip(x[t * K..].as_chunks::<64>().0) {
                for i in 0..64 {
                    acc[i] = w[i].mul_add(x[i], acc[i]);
                }
            }
            out[place(tokens, t, n)] = acc.iter().sum();
        }
    }
}

fn relative_rms(found: &[f32], expected: &[f64]) -> f64 {
    let error: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    (error / expected.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

fn check(gate: &[u8], inputs: &Inputs, found: &[f32], rounded: bool) -> f64 {
    let tokens = inputs.numbers.len() / K;
    let mut w = vec![0.0; N * K];
    quant::decode(Type::IQ2_XXS, gate, &mut w).unwrap();
    let mut x: Vec<f64> = inputs.numbers.iter().map(|&x| f64::from(x)).collect();
    if rounded {
        for (group, x) in inputs.numbers.chunks(32).zip(x.chunks_mut(32)) {
            let largest = group.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            for (number, x) in group.iter().zip(x) {
                let integer = (number * (127.0 / largest)).round_ties_even();
                *x = f64::from(integer) * f64::from(largest) / 127.0;
            }
        }
    }
    let mut expected = vec![0.0; N * tokens];
    for t in 0..tokens {
        for n in 0..N {
            let terms = x[t * K..][..K].iter().zip(&w[n * K..][..K]).map(|(x, &w)| x * f64::from(w));
            expected[t * N + n] = terms.sum();
        }
    }
    let found: Vec<f32> = (0..tokens * N).map(|i| found[place(tokens, i / N, i % N)]).collect();
    relative_rms(&found, &expected)
}

fn main() {
    assert!(is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi"));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let experts: Vec<[Vec<u8>; 2]> =
        (0..EXPERTS).map(|_| [weights(&mut random), weights(&mut random)]).collect();
    // SAFETY: features checked above.
    let peak = unsafe { peak() };
    println!("peak {:.0} GMAC/s (vpdpbusd from registers, one thread)", peak * 1e-9);
    let mut panels = Box::new([Panel::ZERO; 2]);
    for ty in Type::all().filter(|&ty| unpack::is_integer(ty)) {
        let row_bytes = COLUMNS / ty.block_len() * ty.block_bytes();
        let bytes: Vec<u8> = (0..PANEL * row_bytes).map(|_| random.next() as u8).collect();
        let rows: [&[u8]; PANEL] = std::array::from_fn(|r| &bytes[r * row_bytes..][..row_bytes]);
        let seconds = median(|| (0..2000).for_each(|_| kernels::fill(ty, &rows, &mut panels[0])));
        let per_256 = seconds / 2000.0 / (PANEL * COLUMNS / 256) as f64 * 1e9;
        println!("decode from the first cache {:8} {per_256:7.2} ns per 256 weights", ty.name());
    }
    for tokens in [1, 4, 10, 20, 40, 80, 160] {
        let numbers: Vec<f32> =
            (0..tokens * K).map(|_| random.next() as u32 as f32 / u32::MAX as f32 * 2.0 - 1.0).collect();
        let mut codes = vec![Codes::ZERO; tokens * BLOCKS];
        kernels::round(&numbers, &mut codes);
        let inputs = Inputs { numbers, codes };
        let mut out = vec![0.0; 2 * N * tokens];
        let macs = (EXPERTS * 2 * N * K * tokens) as f64;
        let line = |name: &str, part: &str, share: usize, seconds: f64| {
            let (seconds, weights) = (seconds * share as f64, (EXPERTS * 2 * N * K) as f64);
            let rate = macs / seconds;
            let per_256 = seconds / weights * 256.0 * 1e9;
            println!(
                "{tokens:4} rows  {name:8} {part:8} {:8.1} GMAC/s  {:5.3} of peak  {per_256:7.2} ns per 256 weights",
                rate * 1e-9,
                rate / peak
            );
        };
        if tokens == 10 || tokens == 40 {
            for (name, once) in [("naive", false), ("panel", true)] {
                // A fraction of the work: these take long.
                let share = if once { 16 } else { 48 };
                let seconds = median(|| {
                    for both in experts.iter().take(EXPERTS / share) {
                        for bytes in both {
                            // SAFETY: features checked above.
                            unsafe { singles(once, bytes, &inputs.numbers, &mut out) };
                        }
                    }
                });
                line(name, "both", share, seconds);
            }
        }
        for (name, fill) in [("table", table as Fill), ("register", register)] {
            for (part, label) in
                [(Part::Decode, "decode"), (Part::Multiply, "multiply"), (Part::Both, "both")]
            {
                let seconds = median(|| {
                    for both in &experts {
                        integers(fill, part, [&both[0], &both[1]], &inputs.codes, &mut panels, &mut out);
                    }
                });
                line(name, label, 1, seconds);
            }
            let error = check(&experts[EXPERTS - 1][0], &inputs, &out, true);
            assert!(error < 1e-6, "{name}: {error:e}");
        }
    }
}
