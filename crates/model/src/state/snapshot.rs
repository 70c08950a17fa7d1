//! A sequence's state on the host, in a layout every backend understands.

use std::ops::Range;
use std::sync::Arc;

use super::host::Page;
use super::{KvType, PAGE};
use crate::error::{Error, Result};
use crate::spec::Spec;

/// The dimensions state depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotShape {
    /// DeltaNet layers.
    pub delta_layers: usize,
    /// Numbers in one layer's convolution window: (taps − 1) · channels.
    pub window: usize,
    /// Numbers in one layer's state: value_heads · key_dim · value_dim.
    pub state: usize,
    /// Attention layers.
    pub attention_layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Numbers in one head's key.
    pub head_dim: usize,
    /// How keys and values are stored.
    pub kv: KvType,
}

impl SnapshotShape {
    /// The shape of the state of a model.
    pub fn new(spec: &Spec, kv: KvType) -> SnapshotShape {
        SnapshotShape {
            delta_layers: spec.delta_layers(),
            window: (spec.delta.taps - 1) * spec.delta.channels(),
            state: spec.delta.value_heads * spec.delta.head_dim * spec.delta.head_dim,
            attention_layers: spec.attention_layers(),
            kv_heads: spec.attention.kv_heads,
            head_dim: spec.attention.head_dim,
            kv,
        }
    }

    /// Numbers in a recurrent slot: for each DeltaNet layer its window, then its state.
    pub fn slot_len(&self) -> usize {
        self.delta_layers * (self.window + self.state)
    }

    /// Numbers in the keys and values of one position.
    pub fn position_len(&self) -> usize {
        self.attention_layers * 2 * self.kv_heads * self.head_dim
    }
}

/// The state of a sequence on the host. Its parts are shared, with other snapshots and with the sequence itself where that
/// lives on the host: taking one copies nothing, and whoever writes on copies what it changes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The dimensions.
    pub shape: SnapshotShape,
    /// Tokens the state stands for.
    pub position: usize,
    /// For each DeltaNet layer: window [taps − 1][channels], oldest first, then state
    /// [value_heads][key_dim][value_dim]. Empty at position 0.
    pub recurrent: Arc<Vec<f32>>,
    /// Keys and values of [`PAGE`] positions each; what lies behind `position` in the last one means nothing.
    pub pages: Vec<Arc<Page>>,
}

impl Snapshot {
    /// Checks that the state belongs to a model of this shape and is whole.
    ///
    /// # Errors
    /// [`Error::Snapshot`].
    pub fn check(&self, shape: &SnapshotShape) -> Result<()> {
        if self.shape != *shape {
            return Err(Error::Snapshot(format!("it was made for {:?}, the model is {shape:?}", self.shape)));
        }
        let recurrent = if self.position == 0 { 0 } else { shape.slot_len() };
        let numbers = PAGE * shape.position_len();
        let whole = |page: &Arc<Page>| page.kv() == shape.kv && page.len() == numbers;
        let pages = self.pages.len() == self.position.div_ceil(PAGE) && self.pages.iter().all(whole);
        if self.recurrent.len() != recurrent || !pages {
            return Err(Error::Snapshot(format!(
                "{} numbers and {} pages do not make {} positions",
                self.recurrent.len(),
                self.pages.len(),
                self.position
            )));
        }
        Ok(())
    }

    /// Appends keys or values of one head (counted over [attention layer][key, value][kv head]) at some positions to
    /// `out`, as little-endian numbers of the KV type.
    ///
    /// # Panics
    /// If there are no such head or positions.
    pub fn append_rows(&self, head: usize, positions: Range<usize>, out: &mut Vec<u8>) {
        let dim = self.shape.head_dim;
        let mut at = positions.start;
        while at < positions.end {
            let end = positions.end.min((at / PAGE + 1) * PAGE);
            let start = (head * PAGE + at % PAGE) * dim;
            self.pages[at / PAGE].append_bytes(start..start + (end - at) * dim, out);
            at = end;
        }
    }

    /// The state of a model of the states of its parts, in the order of their layers, all after the same tokens.
    ///
    /// # Panics
    /// If there are none, or their tokens differ.
    pub fn join(parts: &[Snapshot]) -> Snapshot {
        let first = &parts[0];
        let count = |of: &dyn Fn(&SnapshotShape) -> usize| parts.iter().map(|part| of(&part.shape)).sum();
        let shape = SnapshotShape {
            delta_layers: count(&|shape| shape.delta_layers),
            attention_layers: count(&|shape| shape.attention_layers),
            ..first.shape
        };
        assert!(parts.iter().all(|part| part.position == first.position), "states after the same tokens");
        let recurrent: Vec<f32> = parts.iter().flat_map(|part| part.recurrent.iter().copied()).collect();
        let page = |index: usize| {
            let (mut page, mut at) = (Page::new(&shape), 0);
            for part in parts.iter().map(|part| &part.pages[index]) {
                let mut bytes = Vec::new();
                part.append_bytes(0..part.len(), &mut bytes);
                page.write_bytes(at, &bytes);
                at += part.len();
            }
            Arc::new(page)
        };
        let pages = (0..first.pages.len()).map(page).collect();
        Snapshot { shape, position: first.position, recurrent: Arc::new(recurrent), pages }
    }

    /// The states of the parts of a model, whose shapes are `shapes`: what [`Snapshot::join`] made one of.
    ///
    /// # Panics
    /// If the shapes are not those of parts of its model; [`Snapshot::check`] sees to that.
    pub fn split(&self, shapes: &[SnapshotShape]) -> Vec<Snapshot> {
        let (mut slot, mut head) = (0, 0);
        let part = |shape: &SnapshotShape| {
            let slots = slot..slot + if self.position == 0 { 0 } else { shape.slot_len() };
            let numbers = head..head + PAGE * shape.position_len();
            (slot, head) = (slots.end, numbers.end);
            let page = |whole: &Arc<Page>| {
                let (mut page, mut bytes) = (Page::new(shape), Vec::new());
                whole.append_bytes(numbers.clone(), &mut bytes);
                page.write_bytes(0, &bytes);
                Arc::new(page)
            };
            Snapshot {
                shape: *shape,
                position: self.position,
                recurrent: Arc::new(self.recurrent[slots].to_vec()),
                pages: self.pages.iter().map(page).collect(),
            }
        };
        shapes.iter().map(part).collect()
    }

    /// Bytes of the numbers, wherever they are shared.
    pub fn bytes(&self) -> usize {
        let pages: usize = self.pages.iter().map(|page| page.len() * page.kv().bytes()).sum();
        size_of_val(&self.recurrent[..]) + pages
    }
}

impl PartialEq for Snapshot {
    /// The same numbers, to the bit where they are keys and values.
    fn eq(&self, other: &Snapshot) -> bool {
        let rows = |snapshot: &Snapshot, head| {
            let mut out = Vec::new();
            snapshot.append_rows(head, 0..snapshot.position, &mut out);
            out
        };
        let heads = self.shape.attention_layers * 2 * self.shape.kv_heads;
        self.shape == other.shape
            && self.position == other.position
            && self.recurrent == other.recurrent
            && self.pages.len() == other.pages.len()
            && (0..heads).all(|head| rows(self, head) == rows(other, head))
    }
}
