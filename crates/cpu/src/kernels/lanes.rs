//! Words of AVX-512 with VBMI, VBMI2 and GFNI.
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
    /// Words rotated left.
    fn rotated<const BY: i32>(a: Int) -> Int { _mm512_rol_epi32::<BY>(a) }
    /// The lower halves of words from a, the upper ones from b.
    fn low_high(a: Int, b: Int) -> Int { _mm512_mask_mov_epi16(a, 0xaaaa_aaaa, b) }
    /// The lower halves of words from a's upper ones, the upper ones from b's lower ones.
    fn high_low(a: Int, b: Int) -> Int { _mm512_shrdi_epi32::<16>(a, b) }
    /// A byte's bits through a matrix, see [`matrix`], then through xor.
    fn affine<const XOR: i32>(a: Int, matrix: u64) -> Int {
        _mm512_gf2p8affine_epi64_epi8::<XOR>(a, _mm512_set1_epi64(matrix as i64))
    }
    /// The lower 16 bits of products of half-words.
    fn times_halves(a: Int, b: Int) -> Int { _mm512_mullo_epi16(a, b) }
    /// Bytes of a table of 16 of each four lanes; zero where the upper bit of the index is set.
    fn look_near(table: Int, index: Int) -> Int { _mm512_shuffle_epi8(table, index) }
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

/// Bits of bytes, by their number. (Shifts and [`high_bits`] share no port with table look-ups, comparisons do.)
#[inline(always)]
pub(super) fn bits<const INDEX: u32>(a: Int) -> u64 {
    high_bits(if INDEX == 7 { a } else { left(a, 7 - INDEX) })
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

/// From quarters of vectors, q of vector i for row 4q + i, to words: [word][row].
#[inline(always)]
pub(super) fn transposed(fours: [Int; 4]) -> [Int; 4] {
    // SAFETY: only reached from functions compiled with the features, chosen after detection.
    unsafe {
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

/// 16 bytes.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn quarter(from: *const u8) -> __m128i {
    // SAFETY: the caller's promise; features as everywhere here.
    unsafe { _mm_loadu_si128(from.cast()) }
}

/// Where the blocks of 16 weight rows begin. Reads are at the same distance from the beginning of each.
#[derive(Clone, Copy)]
pub(super) struct Rows([*const u8; 16]);

impl Rows {
    /// The given rows; behind the last one, the last one again.
    pub(super) fn new(rows: &[&[u8]]) -> Rows {
        let last = rows.len() - 1;
        Rows(std::array::from_fn(|row| rows[row.min(last)].as_ptr()))
    }

    /// 16 bytes of every row: quarter q of vector i is row 4q + i.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    unsafe fn fours(&self, at: usize) -> [Int; 4] {
        let mut fours = [zero(); 4];
        for i in 0..4 {
            // SAFETY: the caller's promise; features as everywhere here. Broadcasts under a mask need no port of
            // the shuffles.
            unsafe {
                let first = _mm512_zextsi128_si512(quarter(self.0[i].add(at)));
                let second = _mm512_mask_broadcast_i32x4(first, 0x00f0, quarter(self.0[4 + i].add(at)));
                let third = _mm512_mask_broadcast_i32x4(second, 0x0f00, quarter(self.0[8 + i].add(at)));
                fours[i] = _mm512_mask_broadcast_i32x4(third, 0xf000, quarter(self.0[12 + i].add(at)));
            }
        }
        fours
    }

    /// Four words of every row: [word][row].
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn four_words(&self, at: usize) -> [Int; 4] {
        // SAFETY: the caller's promise.
        transposed(unsafe { self.fours(at) })
    }

    /// As [`Rows::four_words`], the 16 bytes of every row first brought into an order, the same for every
    /// quarter of `index`.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn ordered_words(&self, at: usize, index: &Table<64>) -> [Int; 4] {
        // SAFETY: the caller's promise; features as everywhere here.
        unsafe {
            let mut fours = self.fours(at);
            for i in 0..4 {
                fours[i] = _mm512_shuffle_epi8(fours[i], index.piece(0));
            }
            transposed(fours)
        }
    }

    /// `N` words of every row, a multiple of four: [word][row]. Of 16 bytes each, in the order of `index`.
    ///
    /// # Safety
    /// The bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn words<const N: usize>(&self, at: usize, index: &Table<64>) -> [Int; N] {
        let mut words = [zero(); N];
        for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *four = unsafe { self.ordered_words(at + 16 * i, index) };
        }
        words
    }

    /// The half of every row at `at`, the first of 16 bytes.
    ///
    /// # Safety
    /// The 16 bytes must lie inside all rows.
    #[inline(always)]
    pub(super) unsafe fn halves(&self, at: usize) -> Float {
        // SAFETY: the caller's promise.
        let [first, ..] = unsafe { self.four_words(at) };
        half_to_float(first)
    }
}
