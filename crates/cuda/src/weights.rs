//! Weights in the GPU's memory, in file form.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::{ExpertTensor, MatrixInfo, Model, ResidentMatrix, ResidentWeights, Weights};
use quant::Type;

use crate::driver::{Buffer, Device, failed};
use crate::error::Result;

/// A weight matrix: [rows = outputs, cols = inputs].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) ty: Type,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) at: u64,
}

/// The matrices of one kind of all experts of a layer: in the order of the file, or where a table says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    pub(crate) ty: Type,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Expert 0's.
    pub(crate) at: u64,
    /// Bytes from one expert to the next.
    pub(crate) stride: u64,
    /// The address of each expert's matrix, on the GPU: [experts] u64. 0: in the order of the file.
    pub(crate) places: u64,
}

/// gate, up, down of a layer.
pub(crate) type Triplet = [Experts; 3];

/// All weights of a model.
pub(crate) struct DeviceWeights {
    pub(crate) dense: Weights<Matrix, u64>,
    pub(crate) embedding: Matrix,
    pub(crate) experts: Vec<Triplet>,
    _buffers: Vec<Buffer>,
}

/// Parts of one allocation begin at multiples of this.
const ALIGN: usize = 256;

/// Bytes of all weights of a model but its experts.
pub(crate) fn dense_bytes(model: &Model) -> usize {
    model.dense_bytes() as usize + model.embedding.bytes() + (64 << 20)
}

impl DeviceWeights {
    /// Copies everything, or all but the experts, whose places then are up to each wave.
    pub(crate) fn new(
        device: &Arc<Device>,
        model: &Model,
        host: &ResidentWeights,
        with_experts: bool,
    ) -> Result<DeviceWeights> {
        let mut store = Store { device, buffers: Vec::new(), used: 0 };
        let cell = std::cell::RefCell::new(&mut store);
        let dense = host.map(
            &mut |matrix: &ResidentMatrix| {
                let at = cell.borrow_mut().put(&matrix.bytes)?;
                Ok(Matrix { ty: matrix.ty, rows: matrix.rows, cols: matrix.cols, at })
            },
            &mut |vector: &Vec<f32>| cell.borrow_mut().put(vector),
        )?;
        let embedding = store.embedding(model, &model.embedding)?;
        let mut tensors = BTreeMap::new();
        let experts = (model.experts.iter())
            .map(|layer| {
                let mut place = |tensor: &ExpertTensor| {
                    let at = match tensors.get(&tensor.tensor) {
                        Some(&at) => at,
                        None if !with_experts => 0,
                        None => {
                            let at = store.put(model.gguf.bytes(&model.gguf.tensors()[tensor.tensor]))?;
                            tensors.insert(tensor.tensor, at);
                            at
                        }
                    };
                    let ExpertTensor { ty, rows, cols, offset, stride, .. } = *tensor;
                    let (at, stride) = if with_experts { (at + offset, stride) } else { (0, 0) };
                    Ok(Experts { ty, rows, cols, at, stride, places: 0 })
                };
                Ok([place(&layer.gate)?, place(&layer.up)?, place(&layer.down)?])
            })
            .collect::<Result<_>>()?;
        device.wait().map_err(failed("copying the weights"))?;
        Ok(DeviceWeights { dense, embedding, experts, _buffers: store.buffers })
    }
}

/// Puts things one after the other into a few large allocations.
struct Store<'a> {
    device: &'a Arc<Device>,
    buffers: Vec<Buffer>,
    /// Bytes of the last buffer that are taken.
    used: usize,
}

impl Store<'_> {
    fn room(&mut self, bytes: usize) -> Result<u64> {
        const LEAST: usize = 32 << 20;
        if self.buffers.last().is_none_or(|buffer| buffer.bytes < self.used + bytes) {
            let buffer =
                self.device.allocate(bytes.max(LEAST)).map_err(failed("taking memory for the weights"))?;
            self.buffers.push(buffer);
            self.used = 0;
        }
        let at = self.buffers.last().expect("just made").at + self.used as u64;
        self.used += bytes.next_multiple_of(ALIGN);
        Ok(at)
    }

    fn put<T: Copy>(&mut self, numbers: &[T]) -> Result<u64> {
        let at = self.room(size_of_val(numbers))?;
        self.device.upload(numbers, at).map_err(failed("copying the weights"))?;
        Ok(at)
    }

    fn embedding(&mut self, model: &Model, info: &MatrixInfo) -> Result<Matrix> {
        let at = self.room(info.bytes())?;
        let mut to = at;
        for part in &info.parts {
            let bytes = model.gguf.bytes(&model.gguf.tensors()[part.tensor]);
            let bytes = &bytes[part.first * info.row_bytes()..][..part.rows * info.row_bytes()];
            self.device.upload(bytes, to).map_err(failed("copying the embedding"))?;
            to += bytes.len() as u64;
        }
        Ok(Matrix { ty: info.ty, rows: info.rows, cols: info.cols, at })
    }
}
