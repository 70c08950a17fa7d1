//! What tests of several kernels share.

use super::Kernels;
use crate::Variant;

/// The tables of every variant that this machine runs.
pub(super) fn tables() -> impl Iterator<Item = &'static Kernels> {
    Variant::ALL.into_iter().filter_map(|variant| Kernels::choose(Some(variant)).ok())
}

/// Numbers in [−1, 1), always the same.
pub(super) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
