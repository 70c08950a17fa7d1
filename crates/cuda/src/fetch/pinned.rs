//! All experts of a model in pinned memory of the host.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use model::{ExpertTensor, Model};

use crate::driver::{Device, Pinned, failed};
use crate::error::Result;
use crate::few_experts::LINE;

/// A matrix of a layer's experts in pinned memory, as the kernels see it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Home {
    pub(super) at: u64,
    pub(super) stride: i64,
    pub(super) bytes: i64,
}

/// All experts of a model in pinned memory.
pub struct PinnedExperts {
    /// Of each tensor: its number in the file, its bytes.
    tensors: Vec<(usize, Pinned)>,
    pub(super) model: Arc<Model>,
}

impl PinnedExperts {
    /// Reads them.
    ///
    /// # Errors
    /// If there is no GPU, or not so much memory.
    pub fn read(model: &Arc<Model>, device: i32) -> Result<PinnedExperts> {
        let device = Device::open(device)?;
        let all = model.experts.iter().flat_map(|layer| [&layer.gate, &layer.up, &layer.down]);
        let mut numbers: Vec<usize> = all.map(|tensor| tensor.tensor).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut tensors = Vec::with_capacity(numbers.len());
        for number in numbers {
            let len = model.gguf.bytes(&model.gguf.tensors()[number]).len();
            // The GPU copies whole lines.
            let pinned = device.pinned(len + LINE);
            tensors.push((number, pinned.map_err(failed("pinning memory of the host for all experts"))?));
        }
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(4, usize::from).min(16) {
                scope.spawn(|| {
                    while let Some((number, pinned)) =
                        tensors.get(next.fetch_add(1, Ordering::Relaxed) as usize)
                    {
                        let bytes = model.gguf.bytes(&model.gguf.tensors()[*number]);
                        // SAFETY: each tensor is filled by one thread, and nobody reads it yet.
                        unsafe { pinned.fill(bytes) };
                    }
                });
            }
        });
        Ok(PinnedExperts { tensors, model: model.clone() })
    }

    fn tensor(&self, number: usize) -> &Pinned {
        let found = self.tensors.iter().find(|(tensor, _)| *tensor == number);
        &found.expect("every tensor of experts was read").1
    }

    /// Whether addresses lie in it.
    pub(crate) fn holds(&self, range: Range<usize>) -> bool {
        self.tensors.iter().any(|(_, pinned)| {
            let start = pinned.host() as usize;
            range.start >= start && range.end <= start + pinned.bytes
        })
    }

    /// Every matrix: [layers, 3].
    pub(super) fn homes(&self) -> Vec<Home> {
        let layers = self.model.experts.iter().flat_map(|layer| [&layer.gate, &layer.up, &layer.down]);
        layers.map(|tensor| self.home(tensor)).collect()
    }

    fn home(&self, tensor: &ExpertTensor) -> Home {
        Home {
            at: self.tensor(tensor.tensor).host() as u64 + tensor.offset,
            stride: tensor.stride as i64,
            bytes: tensor.bytes() as i64,
        }
    }

    /// `len` bytes of file number `shard` from `offset` on, if they belong to experts.
    pub fn bytes(&self, shard: usize, offset: u64, len: usize) -> Option<&[u8]> {
        self.tensors.iter().find_map(|(number, pinned)| {
            let info = &self.model.gguf.tensors()[*number];
            let start = offset.checked_sub(info.offset).filter(|_| info.shard == shard)? as usize;
            pinned.as_slice().get(..pinned.bytes - LINE)?.get(start..start.checked_add(len)?)
        })
    }
}
