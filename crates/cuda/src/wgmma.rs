//! The text of the tensor cores' products of compute capability 9.0a, whose operands are as many as a tile is wide.

use std::ops::Range;

/// Where the first factor is.
enum First {
    /// In these registers, two numbers in each.
    Registers([&'static str; 4]),
    /// In shared memory, by the descriptor `a`.
    Shared,
}

/// c += a · b over 16 of k: c [64, width] f32 in registers, a [64, 16], b by a descriptor of [width, 16] in shared memory.
struct Product {
    /// The beginning of the function, with its parameters: c, the first factor, b.
    head: String,
    width: usize,
    /// The type of both factors.
    factors: &'static str,
    first: First,
    /// 1, or a constant of the function: whether c is added.
    add: &'static str,
    /// Whether b is [16, width] instead.
    transposed: bool,
}

impl Product {
    fn text(&self) -> String {
        let (sums, transposed) = (self.width / 2, u8::from(self.transposed));
        let places = |range: Range<usize>| list(range, |i| format!("%{i}"));
        // Neither factor is negated; one in registers lies in one order only.
        let (a, input, count, order) = match &self.first {
            First::Registers(names) => {
                let input = list(0..4, |i| format!("\"r\"({})", names[i]));
                (format!("{{{}}}", places(sums..sums + 4)), input, 4, format!("1, 1, {transposed}"))
            }
            First::Shared => {
                (format!("%{sums}"), "\"l\"(a)".to_string(), 1, format!("1, 1, 0, {transposed}"))
            }
        };
        let (b, add) = (sums + count, sums + count + 1);
        format!(
            "{head} {{\n    asm volatile(\"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{factors}.{factors} \"\n        \
             \"{{{c}}}, {a}, %{b}, %{add}, {order};\"\n        : {outputs}\n        \
             : {input}, \"l\"(b), \"n\"({added}));\n}}\n",
            head = self.head,
            width = self.width,
            factors = self.factors,
            c = places(0..sums),
            outputs = list(0..sums, |i| format!("\"+f\"(c[{i}])")),
            added = self.add,
        )
    }
}

fn list(range: Range<usize>, of: impl Fn(usize) -> String) -> String {
    range.map(of).collect::<Vec<_>>().join(", ")
}

/// For other GPUs there is nothing.
fn guarded(text: &str) -> String {
    format!("#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n{text}#endif\n")
}

/// `multiply_128` and `multiply_256`: bf16, both factors in shared memory.
pub(crate) fn of_tiles() -> String {
    let of_width = |width| Product {
        head: format!("DEVICE void multiply_{width}(float c[{}], u64 a, u64 b)", width / 2),
        width,
        factors: "bf16",
        first: First::Shared,
        add: "1",
        transposed: false,
    };
    guarded(&(of_width(128).text() + &of_width(256).text()))
}

/// `Products<WIDTH>::add` for multiples of 16 up to `widest`: bf16, the first factor in registers.
pub(crate) fn of_rows(widest: usize) -> String {
    let of_width = |width| {
        let product = Product {
            head: "DEVICE void add(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u64 b)".to_string(),
            width,
            factors: "bf16",
            first: First::Registers(["a0", "a1", "a2", "a3"]),
            add: "1",
            transposed: false,
        };
        format!("template <> struct Products<{width}> {{\n{}}};\n", product.text())
    };
    let all: String = (16..=widest).step_by(16).map(of_width).collect();
    guarded(&format!("template <int WIDTH> struct Products;\n{all}"))
}

/// `multiply_keys<ADD>`: c (+)= a · bᵀ over 16 columns, a and b [64, 16] in shared memory; `multiply_values`: c += a · b over 16
/// positions, a [64, 16] in registers, b [16, 256] in shared memory; f16.
pub(crate) fn of_attention() -> String {
    let keys = Product {
        head: "template <int ADD> DEVICE void multiply_keys(float c[32], u64 a, u64 b)".to_string(),
        width: 64,
        factors: "f16",
        first: First::Shared,
        add: "ADD",
        transposed: false,
    };
    let values = Product {
        head: "DEVICE void multiply_values(float c[128], const u32 a[4], u64 b)".to_string(),
        width: 256,
        factors: "f16",
        first: First::Registers(["a[0]", "a[1]", "a[2]", "a[3]"]),
        add: "1",
        transposed: true,
    };
    guarded(&(keys.text() + &values.text()))
}
