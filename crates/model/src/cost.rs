//! What a stage costs at least, and what a machine can do at most: the two numbers a rate is judged by.
//!
//! Only products are counted, an addition and a multiplication as two operations; norms, activations and the
//! choice of experts are not. Bytes are those nobody can avoid moving once a call: weights in file form, keys and
//! values, recurrent states. Activations are not among them.

use crate::model::Model;
use crate::stage::Stage;
use crate::state::KvType;
use crate::weights::{ExpertTensor, MatrixInfo, Mixer};

/// Operations and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Operations of products with quantised weights.
    pub quantised: u64,
    /// Operations of products of plain numbers: unquantised weights, attention, the delta rule.
    pub plain: u64,
    /// Bytes moved at least once.
    pub bytes: u64,
}

impl Cost {
    /// Operations of both kinds.
    pub fn operations(&self) -> u64 {
        self.quantised + self.plain
    }

    /// Products of `rows` rows with a matrix of which `bytes` are read.
    fn product(ty: quant::Type, rows: u64, weights: u64, bytes: u64) -> Cost {
        let operations = 2 * rows * weights;
        match ty.block_len() {
            1 => Cost { quantised: 0, plain: operations, bytes },
            _ => Cost { quantised: operations, plain: 0, bytes },
        }
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            quantised: self.quantised + other.quantised,
            plain: self.plain + other.plain,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), |a, b| a + b)
    }
}

/// What one call of a stage works on: consecutive rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Rows.
    pub rows: usize,
    /// Position of the first of them.
    pub start: usize,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Experts chosen by at least one of the rows; only `experts` asks.
    pub experts: usize,
    /// Rows whose logits are wanted; only `head` asks.
    pub logits: usize,
}

impl Work {
    /// Positions the rows attend to, summed over the rows: a row attends to itself and all before it.
    fn attended(&self) -> u64 {
        let (rows, start) = (self.rows as u64, self.start as u64);
        rows * start + rows * (rows + 1) / 2
    }
}

impl Model {
    /// What a call of `stage` in `layer` costs at least.
    ///
    /// # Panics
    /// If the layer has no such stage.
    pub fn cost(&self, stage: Stage, layer: usize, work: &Work) -> Cost {
        let rows = work.rows as u64;
        let dense = |info: &MatrixInfo| {
            Cost::product(info.ty, rows, (info.rows * info.cols) as u64, info.bytes() as u64)
        };
        let delta = || match &self.weights.layers[layer].mixer {
            Mixer::Delta(weights) => weights,
            Mixer::Attention(_) => panic!("layer {layer} attends"),
        };
        let attention = || match &self.weights.layers[layer].mixer {
            Mixer::Attention(weights) => weights,
            Mixer::Delta(_) => panic!("layer {layer} is a DeltaNet layer"),
        };
        match stage {
            Stage::Embed => Cost { bytes: rows * self.embedding.row_bytes() as u64, ..Cost::default() },
            Stage::DeltaProject => {
                let w = delta();
                dense(&w.qkv) + dense(&w.z) + dense(&w.beta_alpha)
            }
            Stage::DeltaMix => self.delta_mix(rows),
            Stage::DeltaOut => dense(&delta().out),
            Stage::AttnProject => {
                let w = attention();
                let written = Cost { bytes: rows * self.kv_bytes(work.kv), ..Cost::default() };
                dense(&w.query) + dense(&w.gate) + dense(&w.key) + dense(&w.value) + written
            }
            Stage::AttnMix => Cost {
                // Queries with keys, probabilities with values.
                plain: 4 * self.spec.attention.query_dim() as u64 * work.attended(),
                bytes: (work.start + work.rows) as u64 * self.kv_bytes(work.kv),
                ..Cost::default()
            },
            Stage::AttnOut => dense(&attention().out),
            Stage::Route => dense(&self.weights.layers[layer].moe.router),
            Stage::Shared => {
                let w = &self.weights.layers[layer].moe;
                let len = w.shared_router.len as u64;
                let factor = Cost { plain: 2 * rows * len, bytes: 4 * len, ..Cost::default() };
                dense(&w.shared_gate) + dense(&w.shared_up) + dense(&w.shared_down) + factor
            }
            Stage::Experts => {
                let layout = &self.experts[layer];
                let pairs = rows * self.spec.moe.used as u64;
                let all = |tensor: &ExpertTensor| {
                    let bytes = (work.experts * tensor.bytes()) as u64;
                    Cost::product(tensor.ty, pairs, (tensor.rows * tensor.cols) as u64, bytes)
                };
                all(&layout.gate) + all(&layout.up) + all(&layout.down)
            }
            Stage::Head => {
                let output = &self.weights.output;
                let weights = (output.rows * output.cols) as u64;
                Cost::product(output.ty, work.logits as u64, weights, output.bytes() as u64)
            }
        }
    }

    /// Convolution and delta rule, counted in the recurrent form, which has the fewest operations: for every
    /// number of the state one product for the prediction, one for the update, one for the output.
    fn delta_mix(&self, rows: u64) -> Cost {
        let delta = &self.spec.delta;
        let (taps, channels) = (delta.taps as u64, delta.channels() as u64);
        let state = (delta.value_heads * delta.head_dim * delta.head_dim) as u64;
        let window = taps.saturating_sub(1) * channels;
        Cost {
            quantised: 0,
            plain: rows * (2 * taps * channels + 6 * state),
            // State and window are read and written, in f32.
            bytes: 4 * (taps * channels + 2 * (state + window)),
        }
    }

    /// Bytes of a position's key and value in one layer.
    fn kv_bytes(&self, kv: KvType) -> u64 {
        (2 * self.spec.attention.kv_dim() * kv.bytes()) as u64
    }
}

/// What a backend could do at most with some of its workers, as it measured it itself on this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Peaks {
    /// Threads, or devices.
    pub workers: usize,
    /// Products with quantised weights.
    pub quantised: Peak,
    /// Products of plain numbers.
    pub plain: Peak,
    /// Bytes read from memory a second.
    pub bytes: f64,
    /// Bytes a second from the host's pinned memory to the device's, if those are two.
    pub link: Option<f64>,
}

/// The highest rate of one kind of operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// What computes them, such as `int8`.
    pub unit: &'static str,
    /// Operations a second.
    pub rate: f64,
}

/// What bounds a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Products with quantised weights.
    Quantised,
    /// Products of plain numbers.
    Plain,
    /// Reading memory.
    Memory,
}

impl Peaks {
    /// Those of so many devices of this kind.
    pub fn times(&self, devices: usize) -> Peaks {
        let times = |rate: f64| rate * devices as f64;
        let of = |peak: Peak| Peak { rate: times(peak.rate), ..peak };
        Peaks {
            workers: self.workers * devices,
            quantised: of(self.quantised),
            plain: of(self.plain),
            bytes: times(self.bytes),
            link: self.link.map(times),
        }
    }

    /// The shortest time in which `cost` can be paid, in seconds, and what decides it: computing and reading
    /// overlap, operations of both kinds follow one another.
    pub fn least_seconds(&self, cost: &Cost) -> (f64, Bound) {
        let quantised = cost.quantised as f64 / self.quantised.rate;
        let plain = cost.plain as f64 / self.plain.rate;
        let memory = cost.bytes as f64 / self.bytes;
        if memory >= quantised + plain {
            return (memory, Bound::Memory);
        }
        (quantised + plain, if quantised >= plain { Bound::Quantised } else { Bound::Plain })
    }

    /// The name of a bound with these units.
    pub fn name(&self, bound: Bound) -> &'static str {
        match bound {
            Bound::Quantised => self.quantised.unit,
            Bound::Plain => self.plain.unit,
            Bound::Memory => "memory",
        }
    }
}
