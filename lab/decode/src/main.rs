//! Decoding of every weight type to integers, and products of one to four rows, checked and timed: one thread,
//! CPU time.
//!
//! Versions of decoding: `table` (loops over arrays, then a transposition), `register` (what the backend
//! ships). Products: from the second cache and from memory. The kernels are those of `crates/cpu`. Arguments
//! restrict the types.

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
    mod vnni_gemv;

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

    /// As [`vnni_gemv::gemv`].
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn gemv(
        ty: Type,
        rows: &[&[u8]],
        x: &[*const Codes],
        out: (&mut [f32], usize),
        ahead: *const u8,
    ) {
        // SAFETY: features checked in `main`, the rest by the caller.
        unsafe { vnni_gemv::gemv(ty, rows, x, out, ahead) }
    }
}

use clock::{Random, median};
use kernels::int8::{COLUMNS, Codes, GROUP, PANEL, Panel};
use kernels::unpack;
use quant::Type;

/// Inputs of the products.
const K: usize = 2048;

/// Weight rows that lie in the second cache, and those that do not lie in any.
const NEAR: usize = 256;
const FAR: usize = 128 * 1024;

/// Decoding from the first cache: ns for 256 weights.
fn decoding(fill: impl Fn(&[&[u8]], &mut Panel), bytes: &[u8], panel: &mut Panel) -> f64 {
    let rows: Vec<&[u8]> = bytes.chunks_exact(bytes.len() / PANEL).collect();
    let seconds = median(|| (0..500).for_each(|_| fill(&rows, panel)));
    seconds / 500.0 / (PANEL * COLUMNS / 256) as f64 * 1e9
}

/// Products of all panels of `bytes` with `x`.
fn gemv(ty: Type, bytes: &[u8], x: &[*const Codes], out: &mut [f32]) {
    let row_bytes = ty.bytes(K).expect("whole blocks");
    let panels = bytes.chunks_exact(PANEL * row_bytes).zip(out.chunks_exact_mut(x.len() * PANEL));
    for (panel, out) in panels {
        let mut rows = [&panel[..0]; PANEL];
        rows.iter_mut().zip(panel.chunks_exact(row_bytes)).for_each(|(row, bytes)| *row = bytes);
        // SAFETY: features checked in `main`, groups for whole rows.
        unsafe { kernels::gemv(ty, &rows, x, (out, PANEL), panel.as_ptr_range().end) };
    }
}

/// The same by panels that are stored.
fn by_panels(ty: Type, bytes: &[u8], x: &[*const Codes], out: &mut [f32], panel: &mut Panel) {
    let (row_bytes, part) = (ty.bytes(K).expect("whole blocks"), ty.bytes(COLUMNS).expect("whole blocks"));
    let panels = bytes.chunks_exact(PANEL * row_bytes).zip(out.chunks_exact_mut(x.len() * PANEL));
    for (bytes, out) in panels {
        for block in 0..K / COLUMNS {
            let mut rows = [&bytes[..0]; PANEL];
            for (row, bytes) in rows.iter_mut().zip(bytes.chunks_exact(row_bytes)) {
                *row = &bytes[block * part..][..part];
            }
            let groups = COLUMNS / GROUP;
            let x: Vec<*const Codes> = x.iter().map(|x| x.wrapping_add(block)).collect();
            // SAFETY: features checked in `main`, groups for whole rows, room in `out`.
            unsafe {
                kernels::fill_by_tables(ty, &rows, panel);
                let out = (out.as_mut_ptr(), PANEL);
                kernels::product(&x, &[panel], out, (groups, unpack::form(ty)), block > 0);
            }
        }
    }
}

/// Random blocks whose weights are finite.
fn blocks(ty: Type, count: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * ty.block_bytes());
    let mut out = vec![0.0; ty.block_len()];
    while bytes.len() < count * ty.block_bytes() {
        let block: Vec<u8> = (0..ty.block_bytes()).map(|_| random.next() as u8).collect();
        quant::decode(ty, &block, &mut out).expect("a whole block");
        if out.iter().all(|x| x.is_finite()) {
            bytes.extend(block);
        }
    }
    bytes
}

fn main() {
    for feature in [is_x86_feature_detected!("avx512vnni"), is_x86_feature_detected!("avx512vbmi")] {
        assert!(feature && is_x86_feature_detected!("gfni"), "AVX-512 with VNNI, VBMI and GFNI is needed");
    }
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let numbers: Vec<f32> =
        (0..4 * K).map(|_| random.next() as u32 as f32 / u32::MAX as f32 * 2.0 - 1.0).collect();
    let mut codes = vec![Codes::ZERO; 4 * K / COLUMNS];
    kernels::round(&numbers, &mut codes);
    let x: Vec<*const Codes> = codes.chunks_exact(K / COLUMNS).map(<[Codes]>::as_ptr).collect();
    let mut panel = Box::new(Panel::ZERO);
    let plain: Vec<u64> = (0..32 << 20).collect();
    let seconds = median(|| assert_ne!(plain.iter().fold(0u64, |a, x| a ^ x), 1));
    println!("reading from memory {:.1} GB/s", (plain.len() * 8) as f64 / seconds * 1e-9);
    println!("type        ns per 256 weights: table register | GB/s near: 1 row, 2 rows, 4 rows | far: 1, 4");
    for ty in Type::all().filter(|&ty| unpack::is_integer(ty)) {
        if !wanted.is_empty() && !wanted.iter().any(|name| name == ty.name()) {
            continue;
        }
        let row_bytes = ty.bytes(K).expect("whole blocks");
        let near = blocks(ty, NEAR * K / ty.block_len(), &mut random);
        let first = &near[..PANEL * ty.bytes(COLUMNS).expect("whole blocks")];
        let table = decoding(|rows, panel| kernels::fill_by_tables(ty, rows, panel), first, &mut panel);
        let register = decoding(|rows, panel| kernels::fill(ty, rows, panel), first, &mut panel);
        print!("{:8} {table:7.1} {register:7.1} |", ty.name());
        for count in [1, 2, 4] {
            let (mut out, mut expected) = (vec![0.0; NEAR * count], vec![0.0; NEAR * count]);
            gemv(ty, &near, &x[..count], &mut out);
            by_panels(ty, &near, &x[..count], &mut expected, &mut panel);
            assert!(out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{ty}, {count} rows");
            let seconds = median(|| (0..20).for_each(|_| gemv(ty, &near, &x[..count], &mut out)));
            print!(" {:5.1}", (20 * near.len()) as f64 / seconds * 1e-9);
        }
        let count = (256 << 20) / (row_bytes * NEAR) + 1;
        let far = near.repeat(count.min(FAR / NEAR));
        print!(" |");
        for count in [1, 4] {
            let mut out = vec![0.0; far.len() / row_bytes * count];
            let seconds = median(|| gemv(ty, &far, &x[..count], &mut out));
            print!(" {:5.1}", far.len() as f64 / seconds * 1e-9);
        }
        println!();
    }
}
