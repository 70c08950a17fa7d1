//! `f32` to blocks.

use crate::{Error, Type};

/// Whether [`encode`] can write this type.
pub fn can_encode(_ty: Type) -> bool {
    false
}

/// Appends `weights`, encoded as whole blocks of `ty`, to `out`.
pub fn encode(ty: Type, weights: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) -> Result<(), Error> {
    let _ = (weights, importance, out);
    Err(Error::NoEncoder(ty))
}
