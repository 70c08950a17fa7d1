//! Why a slice of weights or bytes was refused.

use crate::Type;

/// A refused call: the lengths do not fit the type, or the type has no encoder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of weights is not a whole number of blocks.
    #[error("{len} weights are not a whole number of {ty} blocks of {}", ty.block_len())]
    PartialBlock {
        /// The type of the blocks.
        ty: Type,
        /// The number of weights given.
        len: usize,
    },
    /// The number of bytes is not what that many weights take.
    #[error("{len} weights of {ty} take {expected} bytes, {actual} were given")]
    ByteLength {
        /// The type of the blocks.
        ty: Type,
        /// The number of weights asked for.
        len: usize,
        /// Bytes which `len` weights take.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// The type can be decoded but not written.
    #[error("{0} can be read but not written; encode to another type")]
    NoEncoder(Type),
    /// The importance does not cover whole rows of the weights.
    #[error("an importance of {importance} columns does not fit {len} weights: give one value per column")]
    Importance {
        /// The number of weights given.
        len: usize,
        /// The number of importance values given.
        importance: usize,
    },
    /// A value of the importance is negative, NaN or infinite.
    #[error("the importance of column {column} is negative or not finite; measure it anew")]
    BadImportance {
        /// The column.
        column: usize,
    },
    /// A weight is NaN or infinite, which blocks cannot hold.
    #[error("weight {index} is not finite, {ty} cannot hold it; is the source damaged?")]
    NotFinite {
        /// The type asked for.
        ty: Type,
        /// Which of the weights given.
        index: usize,
    },
    /// A weight is beyond what the type can stand for.
    #[error("weight {index} is too large for {ty}; keep this tensor in F32 or BF16")]
    TooLarge {
        /// The type asked for.
        ty: Type,
        /// Which of the weights given.
        index: usize,
    },
}
