//! Gate and up of experts (512 × 2048) of every weight type beside those of IQ2_XXS, as the backend computes them, in
//! turn, one thread, CPU time: the whole, decoding alone, products alone; all experts from memory, and the same one
//! again and again from the second cache. Arguments: rows of an expert (40), types (all).

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

    use int8::{Ahead, COLUMNS, Codes, Form, Panel};
    use quant::Type;

    pub(crate) fn round(x: &[f32], out: &mut [Codes]) {
        int8::round(x, out);
    }

    pub(crate) fn fill(ty: Type, rows: &[&[u8]], panel: &mut Panel) {
        // SAFETY: features checked in `main`.
        unsafe { vnni_fill::fill(ty, rows, COLUMNS, panel) }
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
        ahead: Ahead,
    ) {
        // SAFETY: features checked in `main`, the rest by the caller.
        unsafe { vnni::product(x, panels, out, shape, add, ahead) }
    }
}

use clock::{Random, alternate};
use kernels::int8::{Ahead, COLUMNS, Codes, GROUPS, PANEL, Panel};
use kernels::unpack;
use quant::Type;

const K: usize = 2048;
const N: usize = 512;
const BLOCKS: usize = K / COLUMNS;
const ROUNDS: usize = 9;

/// Bytes of experts that lie in no cache.
const FAR: usize = 192 << 20;
/// Experts that a version computes in a turn.
const EXPERTS: usize = 6;

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Decode,
    Multiply,
    Both,
}

/// Experts of a type: gate and up, row by row.
struct Experts {
    ty: Type,
    bytes: Vec<u8>,
    /// Which one comes next.
    next: usize,
}

impl Experts {
    fn new(ty: Type, random: &mut Random) -> Experts {
        let len = 2 * N * ty.bytes(K).expect("whole blocks");
        // One of bytes that make numbers of middling size in every type, again and again.
        let one: Vec<u8> = (0..len).map(|_| random.next() as u8 & 15 | 0x30).collect();
        Experts { ty, bytes: one.repeat(FAR / len), next: 0 }
    }

    /// One or several experts with the rows of `x`.
    fn run(&mut self, part: Part, far: bool, x: &[Codes], panels: &mut [Panel; 2], out: &mut [f32]) {
        let (row, part_row) =
            (self.ty.bytes(K).expect("whole blocks"), self.ty.bytes(COLUMNS).expect("whole blocks"));
        let len = 2 * N * row;
        for _ in 0..EXPERTS {
            if far {
                self.next = (self.next + 1) % (self.bytes.len() / len);
            }
            let bytes = &self.bytes[self.next * len..][..len];
            for first in (0..N).step_by(PANEL) {
                for block in 0..BLOCKS {
                    let start = |matrix: usize| (matrix * N + first) * row + block * part_row;
                    if part != Part::Multiply {
                        for (matrix, panel) in panels.iter_mut().enumerate() {
                            let rows: [&[u8]; PANEL] =
                                std::array::from_fn(|r| &bytes[start(matrix) + r * row..][..part_row]);
                            kernels::fill(self.ty, &rows, panel);
                        }
                    }
                    if part == Part::Decode {
                        continue;
                    }
                    let later = |matrix| bytes.as_ptr().wrapping_add(start(matrix) + PANEL * row);
                    let lines = if part == Part::Multiply { 0 } else { (part_row + 63).div_ceil(64) };
                    let ahead = Ahead { starts: [later(0), later(1)], row_bytes: row, lines };
                    let starts: Vec<*const Codes> =
                        x.chunks(BLOCKS).map(|row| &raw const row[block]).collect();
                    let shape = (GROUPS, unpack::form(self.ty));
                    let out = (out.as_mut_ptr(), 2 * PANEL);
                    // SAFETY: lengths as the kernel wants them; features checked in `main`.
                    unsafe {
                        let pair = [&panels[0], &panels[1]];
                        kernels::product(&starts, &pair, out, shape, block > 0, ahead);
                    }
                }
            }
        }
    }
}

/// What is timed: a part, and whether weights come from memory.
const WAYS: [(Part, bool); 5] = [
    (Part::Both, true),
    (Part::Both, false),
    (Part::Decode, true),
    (Part::Decode, false),
    (Part::Multiply, false),
];

fn main() {
    for feature in [is_x86_feature_detected!("avx512vnni"), is_x86_feature_detected!("avx512vbmi")] {
        assert!(feature && is_x86_feature_detected!("gfni"), "AVX-512 with VNNI, VBMI and GFNI is needed");
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tokens = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(40);
    let wanted: Vec<Type> = arguments.iter().filter_map(|name| Type::from_name(name)).collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let numbers: Vec<f32> =
        (0..tokens * K).map(|_| random.next() as u32 as f32 / u32::MAX as f32 * 2.0 - 1.0).collect();
    let mut codes = vec![Codes::ZERO; tokens * BLOCKS];
    kernels::round(&numbers, &mut codes);
    let (mut panels, mut out) = (Box::new([Panel::ZERO; 2]), vec![0.0; 2 * PANEL * tokens]);
    let mut base = Experts::new(Type::IQ2_XXS, &mut random);
    println!("{tokens} rows; ns for 256 weights and, in brackets, the rate beside that of IQ2_XXS");
    println!("type     | whole: far     | near         | decode: far  | near         | multiply");
    for ty in Type::all().filter(|&ty| unpack::is_integer(ty)) {
        if !wanted.is_empty() && !wanted.contains(&ty) {
            continue;
        }
        let mut experts = Experts::new(ty, &mut random);
        print!("{:8}", ty.name());
        for (part, far) in WAYS {
            let times: [f64; 2] = alternate(ROUNDS, |version| {
                let experts = if version == 0 { &mut base } else { &mut experts };
                experts.run(part, far, &codes, &mut panels, &mut out);
            });
            let per_256 = times[1] / (EXPERTS * 2 * N * K / 256) as f64 * 1e9;
            print!(" | {per_256:6.1} ({:.2})", times[0] / times[1]);
        }
        println!();
    }
}
