//! Stages `attn.project`, `attn.mix`, `attn.out`: a gated attention layer.

use std::ops::Range;

use cudarc::driver::DriverError;
use model::{AttentionWeights, GRID, Mixer, Spec};

use crate::Cuda;
use crate::dense::Heads;
use crate::few::side_by_side;
use crate::linear::Product;
use crate::open::{Open, attention_columns};
use crate::weights::Matrix;

type Done = Result<(), DriverError>;

#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    heads: i32,
    kv_heads: i32,
    layer: i32,
    stride: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Rotations {
    positions: u64,
    out: u64,
    base: f64,
    rows: i32,
    dims: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Prepare {
    shape: Shape,
    projected: u64,
    rotations: u64,
    query_norm: u64,
    key_norm: u64,
    pages: u64,
    positions: u64,
    queries: u64,
    eps: f32,
    dims: i32,
    rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Mix {
    shape: Shape,
    projected: u64,
    pages: u64,
    out: u64,
    rows: i32,
    position: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Single {
    shape: Shape,
    projected: u64,
    rotations: u64,
    query_norm: u64,
    key_norm: u64,
    pages: u64,
    positions: u64,
    sums: u64,
    stats: u64,
    out: u64,
    eps: f32,
    dims: i32,
    parts: i32,
    eights: i32,
}

/// Positions of a step of `attn_single`, parts that it cuts a row's positions into at most, queries of a block, threads of a block.
const STEP: usize = 32;
const MOST_PARTS: usize = 128;
const ABREAST: usize = 8;
const SINGLE_THREADS: usize = 320;

/// Heads of a block of `attn_prepare`.
const PREPARE_WARPS: usize = 8;

impl Cuda {
    fn attention_weights(&self, layer: usize) -> AttentionWeights<Matrix, u64> {
        match &self.weights.dense.layers[layer].mixer {
            Mixer::Attention(weights) => weights.clone(),
            Mixer::Delta(_) => panic!("an attention stage was called for a DeltaNet layer"),
        }
    }

    fn attention_shape(&self, layer: usize) -> Shape {
        let spec = &self.model.spec;
        Shape {
            heads: spec.attention.heads as i32,
            kv_heads: spec.attention.kv_heads as i32,
            layer: spec.ordinal(layer) as i32,
            stride: attention_columns(spec) as i32,
        }
    }

    /// Angles of the rows of a pass, once for all layers.
    pub(crate) fn rotations(&self, open: &Open) -> Done {
        let spec = &self.model.spec.attention;
        let p = Rotations {
            positions: open.tables.positions,
            out: open.buffers.rotations.at(),
            base: spec.rope_base,
            rows: open.pass.rows() as i32,
            dims: spec.rope_dims as i32,
        };
        self.device.launch(&self.kernels.attn_rotations, (open.pass.rows(), 1, 1), 32, 0, &p)
    }

    pub(crate) fn attn_project_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        let weights = self.attention_weights(layer);
        let matrices = [weights.query, weights.gate, weights.key, weights.value];
        let (projected, stride) = (open.buffers.projected.at(), attention_columns(&self.model.spec));
        if open.single {
            let input = self.few_input(open, layer, &rows);
            return self.few(&side_by_side(&matrices, projected), input, stride, false);
        }
        let heads = self.heads(open, layer, &rows);
        let x = self.mixer_input(open, layer, &rows)?;
        if self.gemm_heads(&matrices, x, (projected, stride), &heads)? {
            return Ok(());
        }
        self.gemm(&matrices, x, (projected, stride), Product::Store)?;
        self.prepare(layer, projected, rows.len(), &heads)
    }

    /// What becomes of the projections of `rows` of a layer.
    fn heads(&self, open: &Open, layer: usize, rows: &Range<usize>) -> Heads {
        let (weights, spec) = (self.attention_weights(layer), &self.model.spec);
        let attention = &spec.attention;
        Heads {
            queries: open.buffers.mixed.at(),
            norms: [weights.query_norm, weights.key_norm],
            rotations: open.buffers.rotations.at() + 4 * (rows.start * attention.rope_dims) as u64,
            pages: open.tables.row_pages + 8 * rows.start as u64,
            positions: open.tables.positions + 4 * rows.start as u64,
            eps: spec.rms_eps,
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            layer: spec.ordinal(layer),
        }
    }

    /// Norms, rotation, and the store of keys and values, where products do not do that.
    fn prepare(&self, layer: usize, projected: u64, rows: usize, heads: &Heads) -> Done {
        let p = Prepare {
            shape: self.attention_shape(layer),
            projected,
            rotations: heads.rotations,
            query_norm: heads.norms[0],
            key_norm: heads.norms[1],
            pages: heads.pages,
            positions: heads.positions,
            queries: heads.queries,
            eps: heads.eps,
            dims: self.model.spec.attention.rope_dims as i32,
            rows: rows as i32,
        };
        let warps = rows * (heads.heads + 2 * heads.kv_heads);
        let grid = (warps.div_ceil(PREPARE_WARPS), 1, 1);
        self.device.launch(&self.kernels.attn_prepare, grid, 32 * PREPARE_WARPS, 0, &p)
    }

    pub(crate) fn attn_mix_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        if open.single {
            return self.attn_mix_single(open, layer, rows);
        }
        let (attention, shape) = (&self.model.spec.attention, self.attention_shape(layer));
        let (queries, stride) = (attention.query_dim(), shape.stride as usize);
        for (index, part) in open.pass.runs_in(rows.clone()) {
            let first = part.start - rows.start;
            let p = Mix {
                shape,
                projected: open.buffers.projected.at() + 4 * (first * stride) as u64,
                pages: open.tables.run_pages[index],
                out: open.buffers.mixed.at() + 2 * (first * queries) as u64,
                rows: part.len() as i32,
                position: open.pass.runs[index].position(part.start) as i32,
            };
            let tiles = part.len().div_ceil(GRID);
            match &self.kernels.attn_mix_pair {
                Some((kernel, shared)) if attention.heads / attention.kv_heads % 2 == 0 => {
                    let blocks = (attention.heads / 2 * tiles).min(self.device.processors as usize);
                    self.device.launch(kernel, (blocks, 1, 1), 3 * 128, *shared, &p)?;
                }
                _ => {
                    let shared = 3 * GRID * attention.head_dim * 2;
                    self.device.launch(
                        &self.kernels.attn_mix,
                        (attention.heads, tiles, 1),
                        128,
                        shared,
                        &p,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Norms, rotation, the store of keys and values, and attention.
    fn attn_mix_single(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        let spec = &self.model.spec;
        let (attention, count, parts) = (spec.attention, rows.len(), open.parts);
        let sums = self.scratch.partial.take(&self.device, partial_bytes(spec, count, parts))?;
        let heads = self.heads(open, layer, &rows);
        let eights = (attention.heads / attention.kv_heads).div_ceil(ABREAST);
        let p = Single {
            shape: self.attention_shape(layer),
            projected: open.buffers.projected.at(),
            rotations: heads.rotations,
            query_norm: heads.norms[0],
            key_norm: heads.norms[1],
            pages: heads.pages,
            positions: heads.positions,
            sums,
            stats: sums + 4 * (count * attention.heads * parts * attention.head_dim) as u64,
            out: open.buffers.mixed.at(),
            eps: heads.eps,
            dims: attention.rope_dims as i32,
            parts: parts as i32,
            eights: eights as i32,
        };
        let grid = (parts, attention.kv_heads * eights, count);
        self.device.launch(&self.kernels.attn_single, grid, SINGLE_THREADS, 0, &p)?;
        let grid = (attention.heads, count, 1);
        self.device.launch(&self.kernels.attn_join, grid, attention.head_dim, 0, &p)
    }

    pub(crate) fn attn_out_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        self.mixer_output(open, self.attention_weights(layer).out, rows)
    }
}

/// Bytes of what `rows` single rows leave of every one of `parts` parts of their positions, before they are joined.
pub(crate) fn partial_bytes(spec: &Spec, rows: usize, parts: usize) -> usize {
    4 * rows * spec.attention.heads * parts * (spec.attention.head_dim + 2)
}

/// Parts that are provided for in passes whose longest sequence has `positions`: few different numbers, so that a recorded pass
/// serves many positions.
pub(crate) fn provided(positions: usize) -> usize {
    positions.div_ceil(STEP).next_power_of_two().clamp(16, MOST_PARTS)
}
