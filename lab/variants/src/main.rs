//! Products of every kernel variant of x86-64 beside the fastest its instructions allow, measured in the same
//! run: one thread, CPU time, a panel of 16 × 512 weights in the first cache.
//!
//! Versions: `f32` (a decoded panel, single precision), `int` (what the backend ships for the variant). Decoding:
//! to f32 through `quant`, to integers as the variant does. The kernels are those of `crates/cpu`.

#[path = "../../../crates/cpu/src/kernels"]
#[allow(dead_code)] // what the backend alone uses
mod kernels {
    mod avx2;
    mod avx2_fill;
    mod blocks;
    pub(crate) mod int8;
    mod lanes;
    mod product;
    mod simd;
    mod tiles;
    pub(crate) mod unpack;
    mod vnni;
    mod vnni_fill;
    mod x86;

    use int8::{Ahead, Codes, Form, Panel};
    use product::Target;
    use quant::Type;

    pub(crate) type IntProduct = unsafe fn(&[*const Codes], &[&Panel], Target, (usize, Form), bool, Ahead);
    pub(crate) type Fill = unsafe fn(Type, &[&[u8]], usize, &mut Panel);
    pub(crate) type Numbers = unsafe fn(&[*const f32], *const f32, usize, *mut f32);

    /// A variant: name, products and decoding of integers, products of numbers.
    pub(crate) struct Variant(
        pub(crate) &'static str,
        pub(crate) IntProduct,
        pub(crate) Fill,
        pub(crate) Numbers,
    );

    pub(crate) const VARIANTS: [Variant; 4] = [
        Variant("avx2", avx2::product, avx2_fill::fill, numbers_256),
        Variant("avx2-vnni", avx2::product_vnni, avx2_fill::fill, numbers_256),
        Variant("avx512-vnni-base", vnni::product, avx2_fill::fill, numbers_512),
        Variant("avx512-vnni", vnni::product, vnni_fill::fill, numbers_512),
    ];

    pub(crate) fn round(x: &[f32], out: &mut [Codes]) {
        int8::round(x, out);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn numbers_256(x: &[*const f32], w: *const f32, k: usize, out: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { product::dot_form::<x86::Avx2, f32>(x, (w, k), (int8::PANEL, k), (out, int8::PANEL), true) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn numbers_512(x: &[*const f32], w: *const f32, k: usize, out: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            product::dot_form::<x86::Avx512, f32>(x, (w, k), (int8::PANEL, k), (out, int8::PANEL), true)
        }
    }
}

use clock::now;
use kernels::int8::{Ahead, COLUMNS, Codes, GROUPS, PANEL, Panel};
use kernels::{VARIANTS, Variant, unpack};
use quant::Type;

/// At least one type for each way the kernels multiply.
const TYPES: [Type; 9] = [
    Type::IQ2_XXS,
    Type::IQ2_XS,
    Type::IQ3_XXS,
    Type::Q2_K,
    Type::Q3_K,
    Type::Q4_K,
    Type::Q5_K,
    Type::Q6_K,
    Type::Q8_0,
];

/// Median CPU seconds of seven runs of `times` calls, after one to warm up, for one call.
fn median(times: usize, mut work: impl FnMut()) -> f64 {
    work();
    let mut runs: Vec<f64> = (0..7)
        .map(|_| {
            let start = now();
            (0..times).for_each(|_| work());
            (now() - start) / times as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[3]
}

/// Multiply-adds a second of an instruction sequence with sums in the registers 0 to 11.
macro_rules! peak {
    ($macs:literal, $($line:literal),+) => {{
        const ROUNDS: usize = 1_000_000;
        let seconds = median(1, || {
            // SAFETY: registers only; the instructions exist where `main` calls this.
            unsafe {
                std::arch::asm!("2:", $($line,)+ "dec {0}", "jnz 2b", inout(reg) ROUNDS => _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _);
            }
        });
        ($macs * ROUNDS) as f64 / seconds
    }};
}

/// Products of bytes: two instructions (and an addition) or one.
fn peak(name: &str) -> f64 {
    match name {
        "avx2" => peak!(
            192,
            "vpmaddubsw ymm12, ymm14, ymm15",
            "vpmaddwd ymm12, ymm12, ymm13",
            "vpaddd ymm0, ymm0, ymm12",
            "vpmaddubsw ymm11, ymm14, ymm15",
            "vpmaddwd ymm11, ymm11, ymm13",
            "vpaddd ymm1, ymm1, ymm11",
            "vpmaddubsw ymm10, ymm14, ymm15",
            "vpmaddwd ymm10, ymm10, ymm13",
            "vpaddd ymm2, ymm2, ymm10",
            "vpmaddubsw ymm9, ymm14, ymm15",
            "vpmaddwd ymm9, ymm9, ymm13",
            "vpaddd ymm3, ymm3, ymm9",
            "vpmaddubsw ymm8, ymm14, ymm15",
            "vpmaddwd ymm8, ymm8, ymm13",
            "vpaddd ymm4, ymm4, ymm8",
            "vpmaddubsw ymm7, ymm14, ymm15",
            "vpmaddwd ymm7, ymm7, ymm13",
            "vpaddd ymm5, ymm5, ymm7"
        ),
        "avx2-vnni" => peak!(
            384,
            "{{vex}} vpdpbusd ymm0, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm1, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm2, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm3, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm4, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm5, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm6, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm7, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm8, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm9, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm10, ymm14, ymm15",
            "{{vex}} vpdpbusd ymm11, ymm14, ymm15"
        ),
        _ => peak!(
            768,
            "vpdpbusd zmm0, zmm14, zmm15",
            "vpdpbusd zmm1, zmm14, zmm15",
            "vpdpbusd zmm2, zmm14, zmm15",
            "vpdpbusd zmm3, zmm14, zmm15",
            "vpdpbusd zmm4, zmm14, zmm15",
            "vpdpbusd zmm5, zmm14, zmm15",
            "vpdpbusd zmm6, zmm14, zmm15",
            "vpdpbusd zmm7, zmm14, zmm15",
            "vpdpbusd zmm8, zmm14, zmm15",
            "vpdpbusd zmm9, zmm14, zmm15",
            "vpdpbusd zmm10, zmm14, zmm15",
            "vpdpbusd zmm11, zmm14, zmm15"
        ),
    }
}

/// Random bytes, whose scales are then ordinary numbers.
fn weights(ty: Type) -> Vec<Vec<u8>> {
    let mut state = 0x1234_5678_u64;
    let mut row = || -> Vec<u8> {
        let len = COLUMNS / ty.block_len() * ty.block_bytes();
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8 & 0xbb
            })
            .collect()
    };
    (0..PANEL).map(|_| row()).collect()
}

fn measure(Variant(name, product, fill, numbers): &Variant, rows: usize) {
    let top = peak(name);
    println!("{name}: {:.0} GMAC/s of bytes at most; {rows} rows", top / 1e9);
    let x: Vec<f32> = (0..rows * COLUMNS).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut codes = vec![Codes::ZERO; rows];
    kernels::round(&x, &mut codes);
    let macs = (rows * PANEL * COLUMNS) as f64;
    let mut out = vec![0.0f32; rows * PANEL];

    let plain: Vec<*const f32> = x.chunks(COLUMNS).map(<[f32]>::as_ptr).collect();
    let dense = vec![0.5f32; PANEL * COLUMNS];
    // SAFETY: rows of x and of the weights as long as said, room for all products; features checked in `main`.
    let seconds = median(40, || unsafe { numbers(&plain, dense.as_ptr(), COLUMNS, out.as_mut_ptr()) });
    println!("  f32      multiply {:4.0} GMAC/s", macs / seconds / 1e9);
    for ty in TYPES {
        let bytes = weights(ty);
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let mut panel = Box::new(Panel::ZERO);
        // SAFETY: features checked in `main`.
        let decode = median(100, || unsafe { fill(ty, &bytes, COLUMNS, &mut panel) });
        let mut row = vec![0.0; COLUMNS];
        let to_f32 = median(100, || {
            bytes.iter().for_each(|bytes| quant::decode(ty, bytes, &mut row).expect("whole blocks"));
        });
        let starts: Vec<*const Codes> = codes.iter().map(|codes| &raw const *codes).collect();
        let shape = (GROUPS, unpack::form(ty));
        let seconds = median(40, || {
            // SAFETY: codes of whole panels at every start, room for all products; features checked in `main`.
            unsafe { product(&starts, &[&panel], (out.as_mut_ptr(), PANEL), shape, true, Ahead::NONE) }
        });
        let per_256 = 1e9 / (PANEL * COLUMNS / 256) as f64;
        println!(
            "  {ty:<8} multiply {:4.0} GMAC/s, {:.2} of that; decode {:5.1} ns per 256 (f32 {:5.1})",
            macs / seconds / 1e9,
            macs / seconds / top,
            decode * per_256,
            to_f32 * per_256,
        );
    }
}

fn main() {
    if !is_x86_feature_detected!("avx512vbmi") || !is_x86_feature_detected!("avxvnni") {
        eprintln!("this processor lacks some of the variants");
        return;
    }
    let rows = std::env::args().nth(1).map_or(40, |rows| rows.parse().expect("rows"));
    VARIANTS.iter().for_each(|variant| measure(variant, rows));
}
