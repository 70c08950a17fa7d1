//! What a model takes of a GPU's memory, known before anything is copied.

use model::{Limits, Model};

use crate::driver::Device;
use crate::error::Result;
use crate::state::DeviceState;
use crate::{open, place, weights};

/// Bytes a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights of all layers but their experts, embedding, output matrix.
    pub dense: u64,
    /// All routed experts.
    pub experts: u64,
    /// Keys, values, and recurrent states of three sequences.
    pub state: u64,
    /// Activations of the largest pass, decoded weights.
    pub scratch: u64,
    /// Memory of the host that experts are copied from, if they come through slots; the GPU reads it without help,
    /// so it cannot be swapped out.
    pub pinned: u64,
}

impl Memory {
    /// Of `model` under `limits`.
    pub fn new(model: &Model, limits: &Limits) -> Memory {
        Memory {
            dense: weights::dense_bytes(model) as u64,
            experts: model.expert_bytes(),
            state: DeviceState::bytes(&model.spec, limits.kv, limits.positions, 3) as u64,
            scratch: open::bytes(&model.spec, limits) as u64,
            pinned: place::STAGING as u64,
        }
    }

    /// Bytes of the GPU's memory but for experts.
    pub fn rest(&self) -> u64 {
        self.dense + self.state + self.scratch
    }
}

/// Bytes of a GPU's memory that are free now.
///
/// # Errors
/// If there is no driver or no such GPU.
pub fn free_memory(device: i32) -> Result<u64> {
    Ok(Device::open(device)?.free_memory()? as u64)
}
