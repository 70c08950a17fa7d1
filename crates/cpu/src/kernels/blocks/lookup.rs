//! Tables of more than 64 bytes: a byte of the index picks from 64 entries at once, masks from its upper bits
//! join the pieces.

use super::super::lanes::{Int, Table, look, look_where, matrix, where_set};

/// Entries of a table of 128, from piece `first` on; the mask is the upper bit of the index.
#[inline(always)]
fn look_128<const N: usize>(table: &Table<N>, first: usize, index: Int, mask: u64) -> Int {
    look_where(look(table.piece(first), index), mask, table.piece(first + 1), index)
}

/// Entries of a table of 256, from piece `first` on; masks are the upper bits of the index.
#[inline(always)]
pub(super) fn look_256<const N: usize>(table: &Table<N>, first: usize, index: Int, masks: [u64; 2]) -> Int {
    let lower = look_128(table, first, index, masks[0]);
    where_set(lower, masks[1], look_128(table, first + 2, index, masks[0]))
}

/// Entries of a table of 512, from piece `first` on; masks are the upper bits of the index.
#[inline(always)]
pub(super) fn look_512<const N: usize>(table: &Table<N>, first: usize, index: Int, masks: [u64; 3]) -> Int {
    let lower = look_256(table, first, index, [masks[0], masks[1]]);
    where_set(lower, masks[2], look_256(table, first + 4, index, [masks[0], masks[1]]))
}

/// Entries of a table of 1024; masks are the upper bits of the index.
#[inline(always)]
pub(super) fn look_1024(table: &Table<1024>, index: Int, masks: [u64; 4]) -> Int {
    let [a, b, c, last] = masks;
    let lower = look_512(table, 0, index, [a, b, c]);
    where_set(lower, last, look_512(table, 8, index, [a, b, c]))
}

/// For [`super::super::lanes::fields`]: eight bits of a lane for each of its bytes, from the given bits on
/// (before the first bit, from the lane's neighbour: to be ignored).
pub(super) const fn bits_from(from: [i32; 4]) -> Table<64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (from[i % 4] + (i / 4 % 2 * 32) as i32).rem_euclid(64) as u8;
        i += 1;
    }
    Table(table)
}

/// For [`super::super::lanes::fields`]: of each word the four fields of seven bits.
pub(super) const EVEN_FIELDS: u64 = 0x352e_2720_150e_0700;

/// For [`super::super::lanes::affine`]: eight signs, of which the last makes the number of negative weights
/// even, from the seven bits at `first`.
pub(super) const fn even(first: u32) -> u64 {
    let mut bits = [0; 8];
    let mut bit = 0;
    while bit < 7 {
        bits[bit as usize] = 1 << (first + bit);
        bits[7] |= 1 << (first + bit);
        bit += 1;
    }
    matrix(bits)
}
