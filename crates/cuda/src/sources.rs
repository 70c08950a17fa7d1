//! The text of the kernels, and what it is compiled with.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use model::{DeltaSpec, GRID as CELL, KvType};
use quant::{Type, codebook};

use crate::wgmma;

const COMMON: &str = include_str!("../kernels/common.cuh");
const TYPES: &str = include_str!("../kernels/types.cuh");
const RUNS: &str = include_str!("../kernels/runs.cuh");
const WEIGHTS: &str = include_str!("../kernels/weights.cu");

const GEMM: &str = include_str!("../kernels/gemm.cu");
const DENSE: &str = include_str!("../kernels/dense.cu");
const HEADS: &str = include_str!("../kernels/heads.cu");
const EXPERTS: &str = include_str!("../kernels/experts.cu");
const FEW_ROWS: &str = include_str!("../kernels/few.cuh");
const FEW: &str = include_str!("../kernels/few.cu");
const PLANES: &str = include_str!("../kernels/planes.cuh");
const LINES: &str = include_str!("../kernels/lines.cuh");
const SINGLE_EXPERTS: &str = include_str!("../kernels/few_experts.cuh");
const FEW_EXPERTS: &str = include_str!("../kernels/few_experts.cu");
const MORE_EXPERTS: &str = include_str!("../kernels/more_experts.cu");
const SPANS: &str = include_str!("../kernels/spans.cuh");
const FEW_SPANS: &str = include_str!("../kernels/few_spans.cu");
const FEW_HEAD: &str = include_str!("../kernels/few_head.cu");
const WHOLE: &str = include_str!("../kernels/whole.cuh");
const ROUTE: &str = include_str!("../kernels/route.cuh");
const ROWS: &str = include_str!("../kernels/rows.cu");
const LARGEST: &str = include_str!("../kernels/largest.cu");
const DELTA: &str = include_str!("../kernels/delta.cu");
const CELLS: &str = include_str!("../kernels/cells.cu");
const ATTENTION: &str = include_str!("../kernels/attention.cu");
const ATTN_SINGLE: &str = include_str!("../kernels/attn_single.cu");
const MIX: &str = include_str!("../kernels/mix.cu");
const PEAKS: &str = include_str!("../kernels/peaks.cu");
const BOOK: &str = include_str!("../kernels/book.cuh");
const KEEP: &str = include_str!("../kernels/keep.cuh");
const FETCH: &str = include_str!("../kernels/fetch.cu");

/// Behind [`RUNS`]: what looks like decoding and costs nothing. The numbers depend on something the compiler does not know.
const CONSTANT: &str = "
template <class T> struct Constant {
    static const int TABLE = Run<T>::TABLE;
    DEVICE void fill_table(u32 *table) { Run<T>::fill_table(table); }
    DEVICE void decode(const u8 *, u32 run, const u32 *, u32 out[16]) {
#pragma unroll
        for (int i = 0; i < 16; i++) out[i] = 0x3f803f80u ^ run << i;
    }
};
#define Run Constant
";

/// Barriers and copies between warps, and the tensor cores' products of tiles.
static PIPELINE: LazyLock<String> =
    LazyLock::new(|| wgmma::of_tiles() + include_str!("../kernels/pipeline.cuh"));

/// What kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The architecture, such as `sm_90a`.
    pub arch: String,
    /// Shared memory of a block, bytes.
    pub shared: usize,
}

impl Target {
    /// The target of a compute capability. 9.0 has instructions of its own; later ones run what all have.
    pub fn of((major, minor): (i32, i32), shared: usize) -> Target {
        let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
        Target { arch: format!("sm_{major}{minor}{suffix}"), shared }
    }

    /// What kernels that come with the program are compiled for, to be used on a GPU of this compute capability: Hopper, or
    /// all others, whose driver compiles them further.
    pub fn packaged(capability: (i32, i32)) -> Target {
        Target::named(if capability == (9, 0) { "sm_90a" } else { "compute_80" })
    }

    /// A target by name, with the shared memory such a GPU has.
    pub fn named(arch: &str) -> Target {
        let shared = match arch {
            "sm_80" | "sm_87" => 163 << 10,
            "sm_90" | "sm_90a" | "sm_100" | "sm_103" => 227 << 10,
            _ => 99 << 10,
        };
        Target { arch: arch.to_string(), shared }
    }
}

/// Kernels compiled together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// A name for messages.
    pub name: String,
    /// CUDA C++.
    pub text: String,
    /// Options of the compiler.
    pub options: Vec<String>,
}

/// Bytes of a stage of the products of many rows: 256 + 128 rows of 64 bf16.
pub(crate) const STAGE_BYTES: usize = (256 + 128) * 64 * 2;

/// Bytes of the two barriers of a stage.
const BARRIER_BYTES: usize = 16;

/// Stages of the products of many rows, and their shared memory in all.
pub(crate) fn gemm_stages(target: &Target) -> (usize, usize) {
    let stages = (target.shared / (STAGE_BYTES + BARRIER_BYTES)).min(4);
    (stages, stages * (STAGE_BYTES + BARRIER_BYTES))
}

/// Whether there are products of spans of `ty` (`Span::EXISTS` of the kernels).
pub(crate) fn has_spans(ty: Type) -> bool {
    matches!(ty, Type::Q4_K | Type::Q5_K | Type::Q6_K | Type::Q8_0)
}

/// Bytes of the table of decoded codebook rows that decoding `ty` keeps in shared memory (`Run::TABLE` of the kernels).
pub(crate) fn table_bytes(ty: Type) -> usize {
    match ty {
        Type::IQ1_S | Type::IQ1_M => codebook::IQ1_GRID.len() * 16,
        Type::IQ2_XXS => codebook::IQ2_XXS_GRID.len() * 16,
        Type::IQ2_XS => codebook::IQ2_XS_GRID.len() * 16,
        Type::IQ2_S => codebook::IQ2_S_GRID.len() * 16,
        Type::IQ3_XXS => codebook::IQ3_XXS_GRID.len() * 8,
        Type::IQ3_S => codebook::IQ3_S_GRID.len() * 8,
        Type::IQ4_NL | Type::IQ4_XS | Type::MXFP4 => 256 * 4,
        _ => 0,
    }
}

/// Copies of the tables that decoding to whole numbers keeps in shared memory: a quarter where a block has little of that.
fn whole_copies(shared: usize) -> usize {
    if shared >= 160 << 10 { 32 } else { 8 }
}

/// Bytes of those tables for `ty` (`Whole::TABLE` of the kernels), on a GPU whose blocks have `shared` bytes.
pub(crate) fn whole_table_bytes(ty: Type, shared: usize) -> usize {
    let all = whole_copies(shared);
    let (half, quarter) = (all / 2, (all / 4).max(4));
    let entries = match ty {
        Type::IQ1_S | Type::IQ1_M => codebook::IQ1_GRID.len() * 4,
        Type::IQ2_XXS | Type::IQ3_XXS => 2 * 256 * all,
        Type::IQ2_XS => codebook::IQ2_XS_GRID.len() * half + 128 * all,
        Type::IQ2_S => codebook::IQ2_S_GRID.len() * quarter + 256 * half,
        Type::IQ3_S => codebook::IQ3_S_GRID.len() * half,
        Type::IQ4_NL | Type::IQ4_XS | Type::MXFP4 => 256 * all,
        _ => 0,
    };
    4 * entries
}

/// Copies of the table of [`table_bytes`] for the products of pairs of experts, so that lanes read from different banks: as many as lanes read
/// at a time, or fit.
fn copies(ty: Type) -> usize {
    let lanes = match ty {
        Type::IQ1_S | Type::IQ1_M | Type::IQ2_XXS | Type::IQ2_XS | Type::IQ2_S => 8,
        Type::IQ3_XXS | Type::IQ3_S => 16,
        _ => 32,
    };
    (COPIES_BYTES / table_bytes(ty).max(1)).clamp(1, lanes)
}

/// Most bytes of all copies of a table.
const COPIES_BYTES: usize = 32 << 10;

/// Bytes of shared memory of `bytes` bytes of a row (`window` of the kernels of few rows): whole words of 16, an odd number
/// of them.
pub(crate) fn few_window(bytes: usize) -> usize {
    (((bytes + 30) / 16) | 1) * 16
}

/// Bytes of shared memory for 256 weights of a row (`WINDOW` of the kernels): rows begin at even addresses if blocks have
/// an even number of bytes.
fn span_window(ty: Type) -> usize {
    let bytes = ty.bytes(256).expect("256 weights are whole blocks of every type");
    (((bytes + 30 - usize::from(ty.block_bytes().is_multiple_of(2))) / 16) | 1) * 16
}

/// Tiles of the products of pairs of experts (`Low` and `High` of the kernels).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairTiles {
    /// Pairs of a tile.
    pub(crate) pairs: usize,
    /// Threads of a block.
    pub(crate) threads: usize,
    rows: usize,
    x_stages: usize,
}

/// For few pairs of an expert, and for many.
pub(crate) const PAIR_TILES: [PairTiles; 2] = [
    PairTiles { pairs: 64, threads: 640, rows: 256, x_stages: 4 },
    PairTiles { pairs: 192, threads: 512, rows: 128, x_stages: 3 },
];

/// Buffers of blocks of `ty` for the products of pairs of experts, and their shared memory in all. `None` for plain numbers,
/// and for GPUs that cannot hand registers from one warp to another or lack the shared memory.
pub(crate) fn pair_buffers(target: &Target, ty: Type, tiles: PairTiles) -> Option<(usize, usize)> {
    let x = tiles.x_stages * tiles.pairs * 128 * 2;
    let fixed = x + copies(ty) * table_bytes(ty) + 2 * 4 * tiles.pairs + BARRIER_BYTES * tiles.x_stages;
    let each = tiles.rows * span_window(ty) + BARRIER_BYTES;
    let buffers = (target.shared.checked_sub(fixed)? / each).min(3);
    let possible = target.arch == "sm_90a" && buffers >= 2 && ty.block_len() > 1;
    possible.then_some((buffers, fixed + buffers * each))
}

/// Bytes of shared memory of the scan over cells with `stages` stages, for heads of `dim`.
pub(crate) fn scan_shared(dim: usize, stages: usize) -> usize {
    let (row, wide) = (dim + 8, dim.min(32) + 8);
    let inputs = 2 * (3 * CELL * row + CELL * (CELL + 8) + CELL * wide) + 2 * 4 * CELL;
    let left = 2 * (dim + CELL) * wide;
    stages * (inputs + left) + 2 * CELL * wide
}

/// Bytes of shared memory of what is prepared for a cell, for heads of `dim`: keys, values, A, decays, and queries, whose room
/// becomes that of two squares.
pub(crate) fn prepare_shared(dim: usize) -> usize {
    let rows = 2 * CELL * (dim + 8);
    2 * rows + 4 * CELL * CELL + 2 * 4 * CELL + rows.max(2 * 2 * CELL * (CELL + 8))
}

/// Stages of the scan over cells: two if they fit.
pub(crate) fn scan_stages(target: &Target, dim: usize) -> usize {
    if scan_shared(dim, 2) <= target.shared { 2 } else { 1 }
}

/// Whether blocks of single rows can have parts of a head of the delta rule, and work together as a cluster.
pub(crate) fn splits_heads(target: &Target, dim: usize) -> bool {
    target.arch == "sm_90a" && matches!(dim, 64 | 128)
}

/// Bytes of shared memory of attention by pairs of heads of `dim`: the queries of 64 rows of both, five tiles of 64 keys or
/// values. `None` for other heads, and for GPUs that cannot hand registers from one warp to another or lack the shared memory.
pub(crate) fn mix_shared(target: &Target, dim: usize) -> Option<usize> {
    let bytes = (2 + 5) * 64 * dim * 2 + (1 + 5) * BARRIER_BYTES;
    (target.arch == "sm_90a" && dim == 256 && bytes <= target.shared).then_some(bytes)
}

impl Source {
    /// A file name that holds all that its code depends on, except for the compiler's version: an older result is as good.
    pub fn file_name(&self) -> String {
        let mut hasher = DefaultHasher::new();
        (&self.text, &self.options).hash(&mut hasher);
        let (name, ending) =
            (self.name.replace(' ', "-").to_lowercase(), if self.is_portable() { "ptx" } else { "cubin" });
        // The longest are lists of types.
        format!("{:.60}-{:016x}.{ending}", name, hasher.finish())
    }

    /// Whether it is compiled for more than one architecture.
    pub(crate) fn is_portable(&self) -> bool {
        self.options.iter().any(|option| option.starts_with("--gpu-architecture=compute_"))
    }

    fn new(target: &Target, name: String, parts: &[&str], defines: &[String]) -> Source {
        let mut options = vec![
            format!("--gpu-architecture={}", target.arch),
            "--std=c++17".to_string(),
            "--diag-suppress=177".to_string(),
            "--device-as-default-execution-space".to_string(), // also generic lambdas
        ];
        options.extend(defines.iter().map(|define| format!("-D{define}")));
        Source { name, text: parts.concat(), options }
    }

    /// Products of many rows.
    pub fn gemm(target: &Target) -> Source {
        Source::new(
            target,
            "gemm".to_string(),
            &[COMMON, &PIPELINE, GEMM],
            &[format!("STAGES={}", gemm_stages(target).0)],
        )
    }

    /// Products of many rows with one matrix whose tiles the copy engine brings, on Hopper.
    pub fn dense(target: &Target) -> Option<Source> {
        let define = format!("ROOM={}", target.shared);
        let parts = [COMMON, &PIPELINE, DENSE, HEADS];
        (target.arch == "sm_90a").then(|| Source::new(target, "dense".to_string(), &parts, &[define]))
    }

    /// Products of the pairs of experts whose weights are blocks of `ty`, if this GPU has the shared memory for them.
    pub fn experts(target: &Target, ty: Type) -> Option<Source> {
        let [low, high] = PAIR_TILES.map(|tiles| pair_buffers(target, ty, tiles));
        let (low, high) = (low?.0, high?.0);
        let parts = [
            COMMON,
            &codebooks(&[ty]),
            TYPES,
            RUNS,
            &PIPELINE,
            &wgmma::of_rows(PAIR_TILES[1].pairs),
            EXPERTS,
        ];
        let defines = [
            format!("TYPE={ty}"),
            format!("SPANS_LOW={low}"),
            format!("SPANS_HIGH={high}"),
            format!("COPIES={}", copies(ty)),
        ];
        Some(Source::new(target, format!("experts {ty}"), &parts, &defines))
    }

    /// Norms, router, grouping, sums, the largest numbers.
    pub fn rows(target: &Target) -> Source {
        Source::new(target, "rows".to_string(), &[COMMON, ROUTE, ROWS, LARGEST], &[])
    }

    /// Products with few rows, of all types of a model; their numbers are the places in `types`.
    pub fn few(target: &Target, types: &[Type]) -> Source {
        Source::of_few(target, "few", types, &[ROUTE, &PIPELINE, FEW_ROWS, FEW, SPANS, FEW_SPANS, FEW_HEAD])
    }

    /// The experts of few rows, of all types that a model's experts and shared experts have: with others among them a kernel
    /// would need more registers.
    pub fn few_experts(target: &Target, types: &[Type]) -> Source {
        Source::of_few(
            target,
            "few experts",
            types,
            &[
                ROUTE,
                &PIPELINE,
                FEW_ROWS,
                SPANS,
                PLANES,
                LINES,
                BOOK,
                KEEP,
                SINGLE_EXPERTS,
                FEW_EXPERTS,
                MORE_EXPERTS,
            ],
        )
    }

    fn of_few(target: &Target, what: &str, types: &[Type], parts: &[&str]) -> Source {
        let names: Vec<&str> = types.iter().map(|ty| ty.name()).collect();
        let tables = codebooks(types);
        let parts = [&[COMMON, &tables, TYPES, RUNS, WHOLE], parts].concat();
        let name = format!("{what} {}", names.join(" "));
        let defines = [
            format!("TYPES={}", names.join(",")),
            "COPIES=1".to_string(),
            format!("TABLE_COPIES={}", whole_copies(target.shared)),
        ];
        Source::new(target, name, &parts, &defines)
    }

    /// What the GPU can do at most.
    pub fn peaks(target: &Target) -> Source {
        Source::new(target, "peaks".to_string(), &[COMMON, &PIPELINE, PEAKS], &[])
    }

    /// The same kernels, which multiply with something else instead of decoding: the last of the parts decode with `Run`.
    pub(crate) fn without_decoding(self) -> Source {
        let constant = format!("{RUNS}{CONSTANT}");
        Source {
            name: format!("{} undecoded", self.name),
            text: self.text.replacen(RUNS, &constant, 1),
            ..self
        }
    }

    /// Experts the GPU fetches by itself.
    pub fn fetch(target: &Target) -> Source {
        Source::new(target, "fetch".to_string(), &[COMMON, ROUTE, BOOK, FETCH], &[])
    }

    /// The DeltaNet mixer, for heads of `dim`.
    pub fn delta(target: &Target, dim: usize) -> Source {
        let defines = [
            format!("DIM={dim}"),
            format!("L2_EPS={:e}f", DeltaSpec::L2_EPS),
            format!("DELTA_STAGES={}", scan_stages(target, dim)),
            format!("DELTA_CLUSTERS={}", i32::from(splits_heads(target, dim))),
        ];
        Source::new(target, "delta".to_string(), &[COMMON, DELTA, CELLS], &defines)
    }

    /// The attention mixer, for heads of `dim`.
    pub fn attention(target: &Target, dim: usize, kv: KvType) -> Source {
        let single = i32::from(kv == KvType::F32);
        let defines = [format!("DIM={dim}"), format!("KV_F32={single}")];
        let (mut parts, products) = (vec![COMMON, ATTENTION, ATTN_SINGLE], wgmma::of_attention());
        if mix_shared(target, dim).is_some() {
            parts.extend([&PIPELINE, &products[..], MIX]);
        }
        Source::new(target, "attention".to_string(), &parts, &defines)
    }

    /// Decoding, of one type.
    pub fn weights(target: &Target, ty: Type) -> Source {
        let parts = [COMMON, &codebooks(&[ty]), TYPES, WEIGHTS];
        Source::new(target, format!("weights {ty}"), &parts, &[format!("TYPE={ty}")])
    }
}

/// The tables some types need, from the one place that has them; the others empty, so that every decoder compiles.
fn codebooks(types: &[Type]) -> String {
    let mut out = String::new();
    let eights = |rows: &[[i8; 8]]| -> Vec<u64> {
        rows.iter().map(|row| u64::from_le_bytes(row.map(|x| x as u8))).collect()
    };
    let fours =
        |rows: &[[u8; 4]]| -> Vec<u64> { rows.iter().map(|&row| u32::from_le_bytes(row).into()).collect() };
    let values = |values: &[i8]| -> Vec<u64> { values.iter().map(|&x| (x as u8).into()).collect() };
    let needs = |any: &[Type]| any.iter().any(|ty| types.contains(ty));
    let tables: [(&str, &str, bool, Vec<u64>); 8] = [
        ("u64", "IQ1_GRID", needs(&[Type::IQ1_S, Type::IQ1_M]), eights(&codebook::IQ1_GRID)),
        ("u64", "IQ2_XXS_GRID", needs(&[Type::IQ2_XXS]), eights(&codebook::IQ2_XXS_GRID)),
        ("u64", "IQ2_XS_GRID", needs(&[Type::IQ2_XS]), eights(&codebook::IQ2_XS_GRID)),
        ("u64", "IQ2_S_GRID", needs(&[Type::IQ2_S]), eights(&codebook::IQ2_S_GRID)),
        ("u32", "IQ3_XXS_GRID", needs(&[Type::IQ3_XXS]), fours(&codebook::IQ3_XXS_GRID)),
        ("u32", "IQ3_S_GRID", needs(&[Type::IQ3_S]), fours(&codebook::IQ3_S_GRID)),
        (
            "signed char",
            "IQ4_NL_VALUES",
            needs(&[Type::IQ4_NL, Type::IQ4_XS]),
            values(&codebook::IQ4_NL_VALUES),
        ),
        ("signed char", "MXFP4_VALUES", needs(&[Type::MXFP4]), values(&codebook::MXFP4_VALUES)),
    ];
    for (kind, name, needed, rows) in tables {
        let rows = if needed { &rows[..] } else { &[0] };
        let numbers: Vec<String> = rows.iter().map(|row| format!("({kind}){row:#x}ull")).collect();
        writeln!(out, "static __device__ const {kind} {name}[{}] = {{{}}};", rows.len(), numbers.join(","))
            .expect("writing to a string");
    }
    out
}

/// What sources say the constant `name` is, a number.
#[cfg(test)]
pub(crate) fn constant(sources: &[&str], name: &str) -> usize {
    let before = format!(" {name} = ");
    let places: Vec<&str> = sources.iter().flat_map(|text| text.split(before.as_str()).skip(1)).collect();
    let [place] = places[..] else { panic!("{name} is defined in {} places", places.len()) };
    let digits: String = place.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a number")
}
