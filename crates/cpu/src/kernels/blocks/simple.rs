//! Blocks of 32 weights that are bytes.

use super::super::lanes::{Rows, bytes, xor, zero};
use super::{ORDERED, Sink};

/// A half, 32 signed bytes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q8_0(rows: &Rows, count: usize, sink: &mut impl Sink) {
    for at in (0..count).map(|block| block * 34) {
        // SAFETY: inside the block.
        let (d, words) = unsafe { (rows.halves(at), rows.words::<8>(at + 2, &ORDERED)) };
        let mut q = [zero(); 8];
        for s in 0..8 {
            q[s] = xor(words[s], bytes(0x80));
        }
        sink.full(q, d, []);
    }
}
