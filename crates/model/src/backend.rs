//! The interface every backend implements: the stages of the model over a pass.

use std::ops::Range;
use std::sync::Arc;

use crate::cost::Peaks;
use crate::error::{Error, Result};
use crate::pass::Pass;
use crate::slots::SlotMemory;
use crate::stage::{Intermediate, Stage};
use crate::state::{KvType, SequenceId, Snapshot};

/// What a backend is and what it wants, asked once after it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name on the command line, such as `cpu`.
    pub name: &'static str,
    /// The kernels chosen for this machine, such as `avx512`.
    pub variant: String,
    /// Grows whenever a change alters the bits of a result.
    pub kernel_version: u32,
    /// Rows of a mixer block.
    pub block_rows: usize,
    /// Chunks of a prompt smaller than this are merged into their neighbour, because a smaller one would
    /// be computed by other kernels. 1 where every row is computed alike.
    pub smallest_chunk: usize,
}

/// What the plan allows a backend to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows of the largest pass.
    pub pass_rows: usize,
    /// Positions of keys and values, over all sequences.
    pub positions: usize,
    /// How keys and values are stored.
    pub kv: KvType,
}

/// Names an open pass of a backend. Several may be open at once: a long chunk waits between two stages
/// while a decode step of other sequences goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PassId(pub u32);

/// Room that holds the file bytes of one expert: offsets of its three matrices in an arena. Never a
/// pointer: a device's memory has none to give, and arenas are split anew as phases change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Which arena. Arena [`Slot::FILE`] is the mapped file itself (all shards, one after the other).
    pub arena: u32,
    /// Offset of the gate matrix in bytes.
    pub gate: u64,
    /// Offset of the up matrix in bytes.
    pub up: u64,
    /// Offset of the down matrix in bytes.
    pub down: u64,
}

impl Slot {
    /// The arena that is the mapped file.
    pub const FILE: u32 = 0;
}

/// An expert whose bytes are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedExpert {
    /// Its number in the layer.
    pub expert: u32,
    /// Where its bytes are.
    pub slot: Slot,
}

/// Part of a layer's experts, computed together. Waves ascend, so that a row's outputs are summed in
/// ascending expert id however many waves there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wave {
    /// Ascending; may name experts no row has chosen.
    pub experts: Arc<[PlacedExpert]>,
    /// Whether this is the layer's last wave: the sum is complete and joins the residual.
    pub last: bool,
}

/// Rows read from a backend, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// rows · cols numbers.
    pub data: Vec<f32>,
}

impl Matrix {
    /// Row `index`.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.cols..(index + 1) * self.cols]
    }

    /// All of it, lent.
    pub fn view(&self) -> MatrixView<'_> {
        MatrixView { rows: self.rows, cols: self.cols, data: &self.data }
    }
}

/// Rows lent by a backend, row-major.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MatrixView<'a> {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// rows · cols numbers.
    pub data: &'a [f32],
}

impl<'a> MatrixView<'a> {
    /// Row `index`.
    pub fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.cols..(index + 1) * self.cols]
    }

    /// A copy.
    pub fn to_matrix(&self) -> Matrix {
        Matrix { rows: self.rows, cols: self.cols, data: self.data.to_vec() }
    }
}

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// The stages of the model over a pass.
///
/// Activations live in the backend and are named by the pass; a call enqueues work and may return before
/// it is done. Only [`Backend::routes`], [`Backend::logits`], [`Backend::largest`], [`Backend::hidden`],
/// [`Backend::read`], [`Backend::snapshot`] and [`Backend::sync`] wait.
///
/// Stages of one pass are called in the order of [`Driver`](crate::Driver). `rows` are rows of the pass
/// and a block of [`Pass::blocks`].
pub trait Backend: Send {
    /// What it is and what it wants.
    fn capabilities(&self) -> &Capabilities;

    /// Whether calls return before their work is done, so that watching a stage means waiting for it.
    fn enqueues(&self) -> bool {
        false
    }

    /// What the machine could do at most, measured now, in well under two seconds: with one worker first, with all
    /// of them last. Nothing from backends that are not built for speed.
    fn peaks(&mut self) -> Vec<Peaks> {
        Vec::new()
    }

    /// A new, empty sequence.
    fn create(&mut self) -> SequenceId;

    /// A new sequence that shares the state of another.
    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId>;

    /// Forgets a sequence. No open pass may name it: commit or abort that first.
    fn free(&mut self, sequence: SequenceId);

    /// Tokens in a sequence.
    fn position(&self, sequence: SequenceId) -> Result<usize>;

    /// Copies the state of a sequence to the host.
    fn snapshot(&mut self, sequence: SequenceId) -> Result<Snapshot>;

    /// A new sequence in a state copied to the host before.
    fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId>;

    /// Opens a pass: checks it, takes buffers and state. Its sequences stay what they were until
    /// [`Backend::commit`].
    fn begin(&mut self, pass: &Pass) -> Result<PassId>;

    /// Ends a pass: its sequences are now longer by their runs.
    fn commit(&mut self, pass: PassId) -> Result<()>;

    /// Gives a pass up: its sequences are what they were before [`Backend::begin`].
    fn abort(&mut self, pass: PassId);

    /// Hidden rows from the embedding.
    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()>;

    /// Norm and input projections of a DeltaNet layer.
    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Convolution, delta rule, gated norm. Advances the recurrent state; emits wanted snapshots.
    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Output projection of a DeltaNet layer and residual.
    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Norm, input projections, q/k norms, RoPE of an attention layer; writes keys and values.
    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Attention over the cache, gated.
    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Output projection of an attention layer and residual.
    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Norm, router, top-k.
    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Shared expert; starts the sum the routed experts join.
    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()>;

    /// Experts chosen by at least one row of the pass in the layer routed last, ascending. Waits.
    fn routes(&mut self, pass: PassId, layer: usize) -> Result<Vec<u32>>;

    /// Routed experts of one wave, over all rows of the pass.
    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()>;

    /// Calls all stages of a pass just begun at once, every expert where it was in the passes before. `false`, and nothing
    /// done, if the backend would have them called one by one (the default).
    ///
    /// # Errors
    /// Those of the stages.
    fn repeat(&mut self, _pass: PassId) -> Result<bool> {
        Ok(false)
    }

    /// No pass of more than `rows` rows is open or will begin soon: memory that only those need goes back to the system
    /// (by default nothing does).
    fn shrink(&mut self, _rows: usize) {}

    /// A new arena of `bytes` bytes for expert slots, and its number ([`Slot::arena`]).
    ///
    /// # Errors
    /// If the memory is not there, or the backend computes from the mapped file alone (the default).
    fn slot_memory(&mut self, _bytes: usize) -> Result<(u32, Arc<dyn SlotMemory>)> {
        let message = "it computes from the mapped file alone; start it without a cache".to_string();
        Err(Error::Backend { backend: self.capabilities().name, stage: "experts", layer: 0, message })
    }

    /// The experts that `layer` is likely to choose, ascending: its norm and router on the hidden rows as they
    /// are now, before the experts of the layer before it; each row's choice and the `margin` next likely ones.
    /// Waits. `None` if the backend does not predict (the default).
    ///
    /// # Errors
    /// Those of the kernels. The pass is as it was.
    fn predict(&mut self, _pass: PassId, _layer: usize, _margin: usize) -> Result<Option<Vec<u32>>> {
        Ok(None)
    }

    /// Adds a number for each expert to the router's logits of the next call of [`Backend::route`], for the choice
    /// alone: weights stay those of the logits as they are, over the experts chosen. Changes results.
    ///
    /// # Errors
    /// If the backend cannot (the default).
    fn bias_routes(&mut self, layer: usize, _bias: &[f32]) -> Result<()> {
        let message =
            "it cannot prefer experts that are in the cache; start it without --route-bias".to_string();
        Err(Error::Backend { backend: self.capabilities().name, stage: "route", layer, message })
    }

    /// Final norm and output projection, for the rows that want logits or hidden states.
    fn head(&mut self, pass: PassId) -> Result<()>;

    /// Logits of the rows that wanted them: [wanted rows, vocabulary], in memory of the backend. Waits.
    fn logits(&mut self, pass: PassId) -> Result<MatrixView<'_>>;

    /// Of each row that wanted logits, candidates among which are as many of the largest as `counts` says for it and their
    /// equals, in any order. Numbers that are not finite count as larger than all others, so that they are among the
    /// candidates. Waits. `None` for a row if [`Backend::logits`] is as short a way (the default), or none are wanted.
    ///
    /// # Panics
    /// May do so if there are not as many counts as rows.
    fn largest(&mut self, _pass: PassId, counts: &[usize]) -> Result<Vec<Option<Vec<Candidate>>>> {
        Ok(vec![None; counts.len()])
    }

    /// Final hidden states (after the output norm) of the rows that wanted them. Waits.
    fn hidden(&mut self, pass: PassId) -> Result<Matrix>;

    /// A value left by the stage called last on this pass: [rows of that call, columns]. Waits.
    /// `None` if the backend does not keep it (it fused the stages around it).
    fn read(&mut self, pass: PassId, what: Intermediate) -> Result<Option<Matrix>>;

    /// Waits for everything enqueued. An error of an earlier call may surface here.
    fn sync(&mut self) -> Result<()>;

    /// Waits, between the chunks of a prompt, until the backend has little enough before it: for everything, unless it
    /// says otherwise. A backend whose parts work on different chunks at the same time needs some ahead. An error of an
    /// earlier call may surface here.
    fn keep_pace(&mut self) -> Result<()> {
        self.sync()
    }

    /// Calls the method of `stage`; `experts` needs a wave and is not among them.
    ///
    /// # Panics
    /// For [`Stage::Experts`].
    fn run_stage(&mut self, pass: PassId, stage: Stage, layer: usize, rows: Range<usize>) -> Result<()> {
        match stage {
            Stage::Embed => self.embed(pass, rows),
            Stage::DeltaProject => self.delta_project(pass, layer, rows),
            Stage::DeltaMix => self.delta_mix(pass, layer, rows),
            Stage::DeltaOut => self.delta_out(pass, layer, rows),
            Stage::AttnProject => self.attn_project(pass, layer, rows),
            Stage::AttnMix => self.attn_mix(pass, layer, rows),
            Stage::AttnOut => self.attn_out(pass, layer, rows),
            Stage::Route => self.route(pass, layer, rows),
            Stage::Shared => self.shared(pass, layer, rows),
            Stage::Experts => unreachable!("experts are called with a wave"),
            Stage::Head => self.head(pass),
        }
    }
}
