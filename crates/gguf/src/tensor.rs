//! A line of the tensor directory, and the arithmetic of its size.

use std::fmt;

use crate::error::{ErrorKind, label};

/// The weight type of a tensor as the file gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// A type whose blocks we know.
    Known(quant::Type),
    /// A type id we cannot size or decode. The file opens all the same, so that the whole list of such
    /// tensors can be reported.
    Unknown(u32),
}

impl TensorType {
    /// The type with this id.
    pub fn from_id(id: u32) -> TensorType {
        quant::Type::from_id(id).map_or(TensorType::Unknown(id), TensorType::Known)
    }

    /// The type, if we know it.
    pub fn known(self) -> Option<quant::Type> {
        match self {
            TensorType::Known(ty) => Some(ty),
            TensorType::Unknown(_) => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorType::Known(ty) => ty.fmt(f),
            TensorType::Unknown(id) => f.pad(&format!("type {id}")),
        }
    }
}

/// Where a tensor is and what it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the model.
    pub name: String,
    /// One to four dimensions, the fastest first, none of them zero: a row has `dims[0]` weights.
    pub dims: Vec<u64>,
    /// The type of its weights.
    pub ty: TensorType,
    /// Which of [`Gguf::shards`](crate::Gguf::shards) holds it.
    pub shard: usize,
    /// Bytes from the start of that file.
    pub offset: u64,
    /// Bytes it occupies, all of them inside the file; 0 if the type is unknown.
    pub len: u64,
}

impl TensorInfo {
    /// Number of weights.
    pub fn elements(&self) -> u64 {
        self.dims.iter().fold(1, |product, &dim| product.saturating_mul(dim))
    }
}

/// Checks the shape of tensor `name` and returns its length in bytes; 0 for an unknown type.
pub(crate) fn byte_len(name: &str, dims: &[u64], ty: TensorType) -> Result<u64, ErrorKind> {
    if dims.is_empty() || dims.len() > 4 {
        return Err(ErrorKind::DimCount { tensor: label(name), found: dims.len() as u32 });
    }
    if dims.contains(&0) {
        return Err(ErrorKind::ZeroDim { tensor: label(name), dims: dims.to_owned() });
    }
    // 63 bits, because other readers hold sizes in signed integers.
    let fits = |size: &u64| *size <= i64::MAX as u64;
    let overflow = || ErrorKind::Overflow { tensor: label(name), dims: dims.to_owned() };
    let elements = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim).filter(fits))
        .ok_or_else(overflow)?;
    let TensorType::Known(ty) = ty else { return Ok(0) };
    let (row, block) = (dims[0], ty.block_len() as u64);
    if !row.is_multiple_of(block) {
        return Err(ErrorKind::PartialBlock { tensor: label(name), ty, row, block });
    }
    (elements / block).checked_mul(ty.block_bytes() as u64).filter(fits).ok_or_else(overflow)
}
