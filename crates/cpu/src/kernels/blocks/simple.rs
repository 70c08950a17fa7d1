//! Blocks of 32 weights.

use super::super::lanes::{Rows, bytes, xor, zero};
use super::{ORDERED, Sink};

/// A half, 32 signed bytes.
///
/// # Safety
/// Every row has `count` blocks.
#[inline(always)]
pub(super) unsafe fn q8_0(rows: &Rows, count: usize, sink: &mut impl Sink) {
    const BYTES: usize = 34;
    for first in (0..count).step_by(2) {
        // Behind the last block, the last one again.
        let at = [first * BYTES, (first + 1).min(count - 1) * BYTES];
        // SAFETY: inside the blocks.
        let words = unsafe { rows.two_pieces([at[0] + 2, at[1] + 2], &ORDERED) };
        for (block, &at) in at.iter().enumerate().take(count - first) {
            let mut q = [zero(); 8];
            for s in 0..8 {
                q[s] = xor(words[8 * block + s], bytes(0x80));
            }
            // SAFETY: inside the block.
            sink.full(q, unsafe { rows.halves(at) }, None);
        }
    }
}
