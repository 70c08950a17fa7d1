//! A model file, its tensors found and checked.

mod find;
mod part;

use std::path::Path;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType};

use crate::backend::{PlacedExpert, Slot};
use crate::error::{Error, Result};
use crate::pages::prefer_huge_pages;
use crate::spec::Spec;
use crate::weights::{ExpertLayout, ExpertTensor, MatrixInfo, ResidentMatrix, VectorInfo, Weights};

/// Dense weights in owned host memory.
pub type ResidentWeights = Weights<ResidentMatrix, Vec<f32>>;

/// A model: its file, shape, and the places of its weights. Nothing has been read but the header.
#[derive(Debug)]
pub struct Model {
    /// The file, shared by the parts of a model.
    pub gguf: Arc<Gguf>,
    /// The shape.
    pub spec: Spec,
    /// Token embedding [vocab, hidden]; rows are decoded from the mapping as tokens ask for them.
    pub embedding: MatrixInfo,
    /// Dense weights.
    pub weights: Weights<MatrixInfo, VectorInfo>,
    /// Routed experts of each layer.
    pub experts: Vec<ExpertLayout>,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// What is odd but harmless, for the user to see: tensors nobody uses.
    pub warnings: Vec<String>,
}

/// Bytes that are copied from the mapping before it is let go.
const PIECE: usize = 16 << 20;

impl Model {
    /// Opens a file, any shard of a split file, or a folder, and checks that it is a model we can run.
    ///
    /// # Errors
    /// [`Error::Gguf`] for a broken container; the other variants name the key or tensor at fault. Nothing
    /// of a tensor's size has been allocated by then.
    pub fn open(path: &Path) -> Result<Model> {
        Model::from_gguf(Gguf::open(path)?)
    }

    /// As [`Model::open`], for a container that is open already.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_gguf(gguf: Gguf) -> Result<Model> {
        find::model(gguf)
    }

    /// Decodes the embedding of `token` into `out`, hidden numbers.
    ///
    /// # Errors
    /// [`Error::Quant`].
    ///
    /// # Panics
    /// If the token is not in the vocabulary; [`Pass::check`](crate::Pass::check) has seen to that.
    pub fn embed(&self, token: u32, out: &mut [f32]) -> Result<()> {
        let bytes = self.row_bytes(&self.embedding, token as usize);
        decode(&self.embedding.name, self.embedding.ty, bytes, out)
    }

    /// Copies the dense weights to memory of our own. `progress` hears bytes done and bytes in all.
    ///
    /// # Errors
    /// [`Error::Quant`] for a vector that cannot be decoded.
    pub fn load(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<ResidentWeights> {
        let total = self.dense_bytes();
        let mut done = 0;
        let mut copy = |info: &MatrixInfo| {
            let matrix = self.copy_matrix(info);
            done += matrix.bytes.len() as u64;
            progress(done, total);
            Ok(matrix)
        };
        self.weights.map(&mut copy, &mut |info| self.read_vector(info))
    }

    /// Bytes of the dense matrices [`Model::load`] copies.
    pub fn dense_bytes(&self) -> u64 {
        let mut total = 0;
        let mut add = |info: &MatrixInfo| {
            total += info.bytes() as u64;
            Ok::<(), Error>(())
        };
        self.weights.map(&mut add, &mut |_| Ok(())).expect("counting cannot fail");
        total
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.iter().map(|layer| layer.triplet_bytes() as u64).sum::<u64>()
            * self.spec.moe.experts as u64
    }

    /// The slots of a layer's experts in the mapped file.
    pub fn mapped_experts(&self, layer: usize) -> Vec<PlacedExpert> {
        let layout = &self.experts[layer];
        let at = |tensor: &ExpertTensor, expert: u64| {
            let info = &self.gguf.tensors()[tensor.tensor];
            self.shard_base(info.shard) + info.offset + tensor.offset + expert * tensor.stride
        };
        let place = |expert: u32| PlacedExpert {
            expert,
            slot: Slot {
                arena: Slot::FILE,
                gate: at(&layout.gate, expert.into()),
                up: at(&layout.up, expert.into()),
                down: at(&layout.down, expert.into()),
            },
        };
        (0..self.spec.moe.experts as u32).map(place).collect()
    }

    /// `len` bytes at `offset` of the arena [`Slot::FILE`].
    ///
    /// # Panics
    /// If they do not lie in one shard; slots of [`Model::mapped_experts`] do.
    pub fn file_bytes(&self, offset: u64, len: usize) -> &[u8] {
        let mut offset = offset;
        for shard in self.gguf.shards() {
            if offset < shard.size() {
                return &shard.bytes()[offset as usize..][..len];
            }
            offset -= shard.size();
        }
        panic!("offset beyond the file");
    }

    fn shard_base(&self, shard: usize) -> u64 {
        self.gguf.shards()[..shard].iter().map(|shard| shard.size()).sum()
    }

    fn row_bytes(&self, info: &MatrixInfo, row: usize) -> &[u8] {
        let mut row = row;
        for part in &info.parts {
            if row < part.rows {
                let bytes = self.gguf.bytes(&self.gguf.tensors()[part.tensor]);
                return &bytes[(part.first + row) * info.row_bytes()..][..info.row_bytes()];
            }
            row -= part.rows;
        }
        panic!("row {row} beyond `{}`", info.name);
    }

    fn copy_matrix(&self, info: &MatrixInfo) -> ResidentMatrix {
        let mut bytes = Vec::with_capacity(info.bytes());
        prefer_huge_pages(bytes.spare_capacity_mut());
        for part in &info.parts {
            let tensor = &self.gguf.tensors()[part.tensor];
            let from = &self.gguf.bytes(tensor)[part.first * info.row_bytes()..];
            // A large one must not be in memory twice, not even for a moment.
            for piece in from[..part.rows * info.row_bytes()].chunks(PIECE) {
                bytes.extend_from_slice(piece);
                self.gguf.forget(tensor);
            }
        }
        ResidentMatrix {
            name: info.name.clone(),
            ty: info.ty,
            rows: info.rows,
            cols: info.cols,
            bytes: bytes.into_boxed_slice(),
        }
    }

    fn read_vector(&self, info: &VectorInfo) -> Result<Vec<f32>> {
        let tensor = &self.gguf.tensors()[info.tensor];
        let TensorType::Known(ty) = tensor.ty else { unreachable!("types were checked") };
        let mut out = vec![0.0; info.len];
        decode(&info.name, ty, self.gguf.bytes(tensor), &mut out)?;
        Ok(out)
    }
}

fn decode(tensor: &str, ty: quant::Type, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    quant::decode(ty, bytes, out).map_err(|source| Error::Quant { tensor: tensor.to_string(), source })
}

/// Shape of a tensor, row-major, as messages show it.
fn shape_text(info: &TensorInfo) -> String {
    let dims: Vec<String> = info.dims.iter().rev().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}
