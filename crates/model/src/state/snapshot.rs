//! A sequence's state on the host, in a layout every backend understands.

use super::KvType;
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

/// The state of a sequence, copied to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The dimensions.
    pub shape: SnapshotShape,
    /// Tokens the state stands for.
    pub position: usize,
    /// For each DeltaNet layer: window [taps − 1][channels], oldest first, then state
    /// [value_heads][key_dim][value_dim]. Empty at position 0.
    pub recurrent: Vec<f32>,
    /// [attention layer][key, value][kv head][position][head_dim], little-endian numbers of the KV type.
    pub kv: Vec<u8>,
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
        let kv =
            shape.position_len().checked_mul(shape.kv.bytes()).and_then(|n| n.checked_mul(self.position));
        if self.recurrent.len() != recurrent || Some(self.kv.len()) != kv {
            return Err(Error::Snapshot(format!(
                "{} numbers and {} bytes do not make {} positions",
                self.recurrent.len(),
                self.kv.len(),
                self.position
            )));
        }
        Ok(())
    }
}
