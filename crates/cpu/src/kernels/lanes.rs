//! Words of AVX-512 with VBMI and GFNI.
//!
//! Every function is inlined into one that is compiled with the features it uses; see [`super::table`]. A lane
//! is a word of 32 bits and belongs to one of 16 weight rows.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

/// Integers: 64 bytes, 16 lanes.
pub(super) type Int = __m512i;

/// Numbers: 16 lanes.
pub(super) type Float = __m512;

/// Bytes of a vector load.
#[repr(C, align(64))]
pub(super) struct Table<const N: usize>(pub(super) [u8; N]);

impl<const N: usize> Table<N> {
    /// Piece `index` of 64 bytes.
    #[inline(always)]
    pub(super) fn piece(&self, index: usize) -> Int {
        // SAFETY: only reached from functions compiled with the features, chosen after detection; 64 bytes of
        // the table.
        unsafe { _mm512_loadu_si512(self.0[64 * index..][..64].as_ptr().cast()) }
    }
}

/// Wraps an expression of intrinsics.
macro_rules! lanes {
    ($($(#[$doc:meta])* fn $name:ident$(<$(const $n:ident: $t:ty),+>)?($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name$(<$(const $n: $t),+>)?($($arg: $ty),*) -> $out {
            // SAFETY: only reached from functions compiled with the features, chosen after detection.
            unsafe { $body }
        }
    )*};
}

lanes! {
    /// No bits.
    fn zero() -> Int { _mm512_setzero_si512() }
    /// The same byte everywhere.
    fn bytes(x: u8) -> Int { _mm512_set1_epi8(x as i8) }
    /// The same word everywhere.
    fn words(x: u32) -> Int { _mm512_set1_epi32(x as i32) }
    /// The same pair of words everywhere.
    fn pairs(x: u64) -> Int { _mm512_set1_epi64(x as i64) }
    /// The same number everywhere.
    fn number(x: f32) -> Float { _mm512_set1_ps(x) }
    /// a and b.
    fn and(a: Int, b: Int) -> Int { _mm512_and_si512(a, b) }
    /// a or b.
    fn or(a: Int, b: Int) -> Int { _mm512_or_si512(a, b) }
    /// Either a or b.
    fn xor(a: Int, b: Int) -> Int { _mm512_xor_si512(a, b) }
    /// (a and mask) or b.
    fn and_or(a: Int, mask: Int, b: Int) -> Int { _mm512_ternarylogic_epi32::<0xea>(a, mask, b) }
    /// Bits of a where the mask is set, of b elsewhere.
    fn select(mask: Int, a: Int, b: Int) -> Int { _mm512_ternarylogic_epi32::<0xca>(mask, a, b) }
    /// Words shifted right.
    fn right(a: Int, by: u32) -> Int { _mm512_srlv_epi32(a, _mm512_set1_epi32(by as i32)) }
    /// Words shifted left.
    fn left(a: Int, by: u32) -> Int { _mm512_sllv_epi32(a, _mm512_set1_epi32(by as i32)) }
    /// The upper halves of words from a's lower ones, the lower ones from b.
    fn upper_from(a: Int, b: Int) -> Int { _mm512_mask_mov_epi16(b, 0xaaaa_aaaa, _mm512_slli_epi32::<16>(a)) }
    /// The upper halves of words from a, the lower ones from b's upper ones.
    fn lower_from(a: Int, b: Int) -> Int { _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(b), 0xaaaa_aaaa, a) }
    /// A byte's bits through a matrix, see [`matrix`], then through xor.
    fn affine<const XOR: i32>(a: Int, matrix: u64) -> Int {
        _mm512_gf2p8affine_epi64_epi8::<XOR>(a, _mm512_set1_epi64(matrix as i64))
    }
    /// Bytes of a table of 64.
    fn look(table: Int, index: Int) -> Int { _mm512_permutexvar_epi8(index, table) }
    /// Bytes of a table of 64 where the mask is set, of `other` elsewhere.
    fn look_where(other: Int, mask: u64, table: Int, index: Int) -> Int {
        _mm512_mask_permutexvar_epi8(other, mask, index, table)
    }
    /// Bytes of a where the mask is set, of `other` elsewhere.
    fn where_set(other: Int, mask: u64, a: Int) -> Int { _mm512_mask_mov_epi8(other, mask, a) }
    /// Highest bits of bytes.
    fn high_bits(a: Int) -> u64 { _mm512_movepi8_mask(a) }
    /// Second highest bits of bytes.
    fn second_bits(a: Int) -> u64 { _mm512_movepi8_mask(_mm512_add_epi8(a, a)) }
    /// Bytes that share a set bit with those of the mask.
    fn test(a: Int, mask: Int) -> u64 { _mm512_test_epi8_mask(a, mask) }
    /// Eight bits of each pair of words, from the bit on that a byte of `from` says.
    fn fields(a: Int, from: Int) -> Int { _mm512_multishift_epi64_epi8(from, a) }
    /// All ones in words that are negative.
    fn sign_words(a: Int) -> Int { _mm512_srai_epi32::<31>(a) }
    /// Words as numbers.
    fn to_float(a: Int) -> Float { _mm512_cvtepi32_ps(a) }
    /// Lower halves of words, as numbers.
    fn half_to_float(a: Int) -> Float { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)) }
    /// a · b.
    fn times(a: Float, b: Float) -> Float { _mm512_mul_ps(a, b) }
    /// a + b.
    fn sum(a: Float, b: Float) -> Float { _mm512_add_ps(a, b) }
    /// −a.
    fn minus(a: Float) -> Float {
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(i32::MIN)))
    }
}

/// Byte `index` of every word, as a number.
#[inline(always)]
pub(super) fn byte(a: Int, index: u32) -> Float {
    to_float(and(right(a, 8 * index), words(0xff)))
}

/// Signed byte `index` of every word, as a number.
#[inline(always)]
pub(super) fn signed_byte(a: Int, index: u32) -> Float {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    to_float(unsafe { _mm512_srai_epi32::<24>(left(a, 24 - 8 * index)) })
}

/// Half-byte `index` of every word, as a number.
#[inline(always)]
pub(super) fn half_byte(a: Int, index: u32) -> Float {
    to_float(and(right(a, 4 * index), words(15)))
}

/// Entries of a table, by the lower eleven bits of words.
#[inline(always)]
pub(super) fn gather(table: &[u32; 2048], index: Int) -> Int {
    // SAFETY: only reached from functions compiled with the features, chosen after detection; the mask keeps
    // indices inside the table.
    unsafe { _mm512_i32gather_epi32::<4>(and(index, words(2047)), table.as_ptr().cast()) }
}

/// 2^(e − 128), for e below 256; the lowest two are subnormal.
#[inline(always)]
pub(super) fn half_power(e: Int) -> Float {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    unsafe {
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, words(1)));
        let subnormal = _mm512_sllv_epi32(words(1 << 21), e);
        let low = _mm512_cmplt_epu32_mask(e, words(2));
        _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, low, subnormal))
    }
}

/// What [`affine`] takes: for each bit of the result the bits whose parity it is.
pub(super) const fn matrix(bits: [u8; 8]) -> u64 {
    u64::from_le_bytes([bits[7], bits[6], bits[5], bits[4], bits[3], bits[2], bits[1], bits[0]])
}

/// The matrix that moves `count` bits from `from` to `to` and clears all others.
pub(super) const fn moving(count: usize, from: usize, to: usize) -> u64 {
    let mut bits = [0; 8];
    let mut bit = 0;
    while bit < count {
        bits[to + bit] = 1 << (from + bit);
        bit += 1;
    }
    matrix(bits)
}

/// 16 × 16 words, rows to columns.
#[inline(always)]
pub(super) fn transposed(rows: [Int; 16]) -> [Int; 16] {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    unsafe {
        let mut pairs = [zero(); 16];
        for i in 0..8 {
            // Words c and c + 1 (of every four) of the rows 2i, 2i + 1.
            pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
        }
        let mut fours = [zero(); 16];
        for i in 0..4 {
            // fours[4i + c]: word c of every four, of the rows 4i .. 4i + 4.
            fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
            fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
            fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
            fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        }
        let mut out = [zero(); 16];
        for c in 0..4 {
            // Quarters: [quarter of the columns], each of four rows.
            let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
            let low = _mm512_shuffle_i32x4::<0x44>(a, b);
            let high = _mm512_shuffle_i32x4::<0xee>(a, b);
            let low2 = _mm512_shuffle_i32x4::<0x44>(d, e);
            let high2 = _mm512_shuffle_i32x4::<0xee>(d, e);
            out[c] = _mm512_shuffle_i32x4::<0x88>(low, low2);
            out[4 + c] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
            out[8 + c] = _mm512_shuffle_i32x4::<0x88>(high, high2);
            out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
        }
        out
    }
}

/// 16 bytes.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn quarter(from: *const u8) -> __m128i {
    // SAFETY: the caller's promise; features as everywhere here.
    unsafe { _mm_loadu_si128(from.cast()) }
}

/// Where the blocks of 16 weight rows begin.
#[derive(Clone, Copy)]
pub(super) struct Rows([*const u8; 16]);

/// Reads from all rows at the same distance `at` from their beginning. Callers stay inside the rows' blocks,
/// whose number [`super::blocks::decode`] has checked.
impl Rows {
    /// The given rows; behind the last one, the last one again.
    pub(super) fn new(rows: &[&[u8]]) -> Rows {
        let last = rows.len() - 1;
        Rows(std::array::from_fn(|row| rows[row.min(last)].as_ptr()))
    }

    /// 16 words of every row, its 64 bytes first brought into the order `index` says: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn words(&self, at: usize, index: &Table<64>) -> [Int; 16] {
        let mut rows = [zero(); 16];
        for row in 0..16 {
            // SAFETY: the caller's promise; features as everywhere here.
            let bytes = unsafe { _mm512_loadu_si512(self.0[row].add(at).cast()) };
            rows[row] = look(bytes, index.piece(0));
        }
        transposed(rows)
    }

    /// 16 words of every row, as they lie: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn plain_words(&self, at: usize) -> [Int; 16] {
        let mut rows = [zero(); 16];
        for row in 0..16 {
            // SAFETY: the caller's promise; features as everywhere here.
            rows[row] = unsafe { _mm512_loadu_si512(self.0[row].add(at).cast()) };
        }
        transposed(rows)
    }

    /// Four words of every row: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn four_words(&self, at: usize) -> [Int; 4] {
        // SAFETY: the caller's promise; features as everywhere here.
        unsafe {
            // Quarter q of vector i: row 4q + i.
            let mut fours = [zero(); 4];
            for i in 0..4 {
                let first = _mm512_zextsi128_si512(quarter(self.0[i].add(at)));
                let second = _mm512_mask_broadcast_i32x4(first, 0x00f0, quarter(self.0[4 + i].add(at)));
                let third = _mm512_mask_broadcast_i32x4(second, 0x0f00, quarter(self.0[8 + i].add(at)));
                fours[i] = _mm512_mask_broadcast_i32x4(third, 0xf000, quarter(self.0[12 + i].add(at)));
            }
            let low = [_mm512_unpacklo_epi32(fours[0], fours[1]), _mm512_unpacklo_epi32(fours[2], fours[3])];
            let high = [_mm512_unpackhi_epi32(fours[0], fours[1]), _mm512_unpackhi_epi32(fours[2], fours[3])];
            [
                _mm512_unpacklo_epi64(low[0], low[1]),
                _mm512_unpackhi_epi64(low[0], low[1]),
                _mm512_unpacklo_epi64(high[0], high[1]),
                _mm512_unpackhi_epi64(high[0], high[1]),
            ]
        }
    }

    /// 16 words of every row from pieces of 32 bytes, ordered as `index` says: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn two_pieces(&self, at: [usize; 2], index: &Table<64>) -> [Int; 16] {
        let mut rows = [zero(); 16];
        for row in 0..16 {
            // SAFETY: the caller's promise; features as everywhere here.
            let bytes = unsafe {
                let first = _mm256_loadu_si256(self.0[row].add(at[0]).cast());
                let second = _mm256_loadu_si256(self.0[row].add(at[1]).cast());
                _mm512_inserti64x4::<1>(_mm512_zextsi256_si512(first), second)
            };
            rows[row] = look(bytes, index.piece(0));
        }
        transposed(rows)
    }

    /// 16 words of every row from pieces of 16 bytes, ordered as `index` says: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn four_pieces(&self, at: [usize; 4], index: &Table<64>) -> [Int; 16] {
        let mut rows = [zero(); 16];
        for row in 0..16 {
            // SAFETY: the caller's promise; features as everywhere here.
            let bytes = unsafe {
                let first = _mm512_zextsi128_si512(quarter(self.0[row].add(at[0])));
                let second = _mm512_mask_broadcast_i32x4(first, 0x00f0, quarter(self.0[row].add(at[1])));
                let third = _mm512_mask_broadcast_i32x4(second, 0x0f00, quarter(self.0[row].add(at[2])));
                _mm512_mask_broadcast_i32x4(third, 0xf000, quarter(self.0[row].add(at[3])))
            };
            rows[row] = look(bytes, index.piece(0));
        }
        transposed(rows)
    }

    /// The half-precision number of every row at `at`.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn halves(&self, at: usize) -> Float {
        let mut halves = [0u16; 16];
        for row in 0..16 {
            // SAFETY: the caller's promise.
            halves[row] = unsafe { self.0[row].add(at).cast::<u16>().read_unaligned() };
        }
        // SAFETY: 32 bytes; features as everywhere here.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast())) }
    }

    /// The word of every row at `at`.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn word(&self, at: usize) -> Int {
        let mut words = [0u32; 16];
        for row in 0..16 {
            // SAFETY: the caller's promise.
            words[row] = unsafe { self.0[row].add(at).cast::<u32>().read_unaligned() };
        }
        // SAFETY: 64 bytes; features as everywhere here.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    /// The byte of every row at `at`, as a word.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn byte(&self, at: usize) -> Int {
        let mut words = [0u32; 16];
        for row in 0..16 {
            // SAFETY: the caller's promise.
            words[row] = unsafe { self.0[row].add(at).read() }.into();
        }
        // SAFETY: 64 bytes; features as everywhere here.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }
}
