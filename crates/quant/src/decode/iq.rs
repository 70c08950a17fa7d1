//! The IQ types: groups of weights that are rows of a codebook, and two types with uneven 4-bit values.
//!
//! | type    | bytes | offset: field                                                                          |
//! |---------|-------|----------------------------------------------------------------------------------------|
//! | IQ1_S   | 50    | 0: `d` f16, 2: rows low 8 bits, 32 bytes, 34: 8 × u16: rows high bits 4 × 3, scale 3, delta sign 1 |
//! | IQ1_M   | 56    | 0: rows low 8 bits, 32 bytes, 32: 32 × (3 bits rows high, 1 bit delta sign), 48: 4 × u16: scales 4 × 3, quarter of `d` 4 bits |
//! | IQ2_XXS | 66    | 0: `d` f16, 2: 8 × (4 rows u8, u32: signs 4 × 7, scale 4)                              |
//! | IQ2_XS  | 74    | 0: `d` f16, 2: 32 × u16 (row 9, signs 7), 66: scales 16 × 4 bits                       |
//! | IQ2_S   | 82    | 0: `d` f16, 2: rows low 8 bits, 32 bytes, 34: signs 32 bytes, 66: rows high 32 × 2 bits, 74: scales 16 × 4 bits |
//! | IQ3_XXS | 98    | 0: `d` f16, 2: rows 64 × u8, 66: 8 × u32 (signs 4 × 7, scale 4)                        |
//! | IQ3_S   | 110   | 0: `d` f16, 2: rows low 8 bits, 64 bytes, 66: rows ninth bits 8 bytes, 74: signs 32 bytes, 106: scales 8 × 4 bits |
//! | IQ4_NL  | 18    | 0: `d` f16, 2: nibbles 16 bytes                                                        |
//! | IQ4_XS  | 136   | 0: `d` f16, 2: scales high 8 × 2 bits, 4: scales low 8 × 4 bits, 8: nibbles 8 × 16 bytes |
//!
//! IQ4_NL has blocks of 32 weights, all others of 256. A row covers eight weights (four in IQ3); signs are one
//! byte per eight weights, or seven bits of it ([`EVEN_SIGNS`]). Small fields fill their bytes from the
//! lowest bits. With `g` an entry of the row, `s` the scale field of the run and `n` its length, the weights are
//!
//! - IQ1_S (`n` 32), IQ1_M (`n` 16, delta signs per 8): `d * (2 * s + 1) * (g ± 1/8)`;
//! - IQ2_XXS (`n` 32), IQ2_XS and IQ2_S (`n` 16): `d * (s + 1/2) / 4 * ±g`;
//! - IQ3_XXS (`n` 32): `d * (s + 1/2) / 2 * ±g`;
//! - IQ3_S (`n` 32): `d * (2 * s + 1) * ±g`;
//! - IQ4_NL: `d * v[q]`, IQ4_XS (`n` 32): `d * (s - 32) * v[q]`, with `v` [`IQ4_NL_VALUES`].

use super::{f16_to_f32, half_at, word_at};
use crate::codebook::{
    EVEN_SIGNS, IQ1_DELTA, IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID,
    IQ4_NL_VALUES,
};

/// Decodes a block of IQ1_S: 1.56 bits per weight.
pub fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let field = u16_at(block, 34 + 2 * run);
        let scale = d * f32::from(2 * (field >> 12 & 7) + 1);
        let delta = if field & 0x8000 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let high = usize::from(field >> (3 * group) & 7);
            let row = usize::from(block[2 + 4 * run + group]) | high << 8;
            shifted(&IQ1_GRID[row], scale, delta, out);
        }
    }
}

/// Decodes a block of IQ1_M: 1.75 bits per weight. The f16 `d` is scattered over the tops of four `u16`.
pub fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let fields: [u16; 4] = std::array::from_fn(|i| u16_at(block, 48 + 2 * i));
    let d = f16_to_f32(fields[0] >> 12 | fields[1] >> 12 << 4 | fields[2] >> 12 << 8 | fields[3] >> 12 << 12);
    for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let run = group / 2;
        let scale = d * f32::from(2 * (fields[run / 4] >> (3 * (run % 4)) & 7) + 1);
        let high = nibble(&block[32..48], group);
        let delta = if high & 8 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        let row = usize::from(block[group]) | usize::from(high & 7) << 8;
        shifted(&IQ1_GRID[row], scale, delta, out);
    }
}

/// Decodes a block of IQ2_XXS: 2.06 bits per weight.
pub fn iq2_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + 8 * run;
        let field = word_at(block, at + 4);
        let scale = d * (0.5 + (field >> 28) as f32) * 0.25;
        for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = EVEN_SIGNS[(field >> (7 * group) & 127) as usize];
            let row = &IQ2_XXS_GRID[usize::from(block[at + group])];
            signed(row.map(i32::from), scale, signs, out);
        }
    }
}

/// Decodes a block of IQ2_XS: 2.31 bits per weight.
pub fn iq2_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = d * (0.5 + f32::from(nibble(&block[66..74], group / 2))) * 0.25;
        let field = u16_at(block, 2 + 2 * group);
        let row = &IQ2_XS_GRID[usize::from(field & 511)];
        signed(row.map(i32::from), scale, EVEN_SIGNS[usize::from(field >> 9)], out);
    }
}

/// Decodes a block of IQ2_S: 2.56 bits per weight.
pub fn iq2_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = d * (0.5 + f32::from(nibble(&block[74..82], group / 2))) * 0.25;
        let high = block[66 + group / 4] >> (group % 4 * 2) & 3;
        let row = &IQ2_S_GRID[usize::from(block[2 + group]) | usize::from(high) << 8];
        signed(row.map(i32::from), scale, block[34 + group], out);
    }
}

/// Decodes a block of IQ3_XXS: 3.06 bits per weight.
pub fn iq3_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let field = word_at(block, 66 + 4 * run);
        let scale = d * (0.5 + (field >> 28) as f32) * 0.5;
        for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = EVEN_SIGNS[(field >> (7 * group) & 127) as usize];
            let at = 2 + 8 * run + 2 * group;
            let rows = [IQ3_XXS_GRID[usize::from(block[at])], IQ3_XXS_GRID[usize::from(block[at + 1])]];
            signed(pair(rows), scale, signs, out);
        }
    }
}

/// Decodes a block of IQ3_S: 3.44 bits per weight.
pub fn iq3_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for (group, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let run = group / 4;
        let scale = d * f32::from(1 + 2 * nibble(&block[106..110], run));
        let ninth = usize::from(block[66 + run]) >> (group % 4 * 2);
        let row = |i: usize| IQ3_S_GRID[usize::from(block[2 + 2 * group + i]) | (ninth >> i & 1) << 8];
        signed(pair([row(0), row(1)]), scale, block[74 + group], out);
    }
}

/// Decodes a block of IQ4_NL: 4.5 bits per weight.
pub fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    uneven(&block[2..], d, out);
}

/// Decodes a block of IQ4_XS: 4.25 bits per weight.
pub fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let high = u16_at(block, 2);
    for (run, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = nibble(&block[4..8], run) | ((high >> (2 * run) & 3) as u8) << 4;
        let d = d * (i32::from(scale) - 32) as f32;
        uneven(&block[8 + 16 * run..24 + 16 * run], d, out);
    }
}

/// Eight weights of a ternary row: `scale * (entry + delta)`.
#[inline]
fn shifted(row: &[i8; 8], scale: f32, delta: f32, out: &mut [f32; 8]) {
    for (out, &entry) in out.iter_mut().zip(row) {
        *out = scale * (f32::from(entry) + delta);
    }
}

/// Eight weights of a row of magnitudes: bit `i` of `signs` negates weight `i`.
#[inline]
fn signed(row: [i32; 8], scale: f32, signs: u8, out: &mut [f32; 8]) {
    for (i, (out, entry)) in out.iter_mut().zip(row).enumerate() {
        let sign = u32::from(signs) << (31 - i) & 0x8000_0000;
        *out = f32::from_bits((scale * entry as f32).to_bits() ^ sign);
    }
}

/// 32 weights from nibbles into the table of uneven values; byte `i` holds the weights `i` and `i + 16`.
#[inline]
fn uneven(nibbles: &[u8], scale: f32, out: &mut [f32; 32]) {
    for (i, &byte) in nibbles.iter().enumerate() {
        out[i] = scale * f32::from(IQ4_NL_VALUES[usize::from(byte & 15)]);
        out[i + 16] = scale * f32::from(IQ4_NL_VALUES[usize::from(byte >> 4)]);
    }
}

/// Two rows of four as one of eight.
#[inline]
fn pair([a, b]: [[u8; 4]; 2]) -> [i32; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(i32::from)
}

/// The `i`-th four-bit number of a field.
#[inline]
fn nibble(field: &[u8], i: usize) -> u8 {
    field[i / 2] >> (i % 2 * 4) & 15
}

#[inline]
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}
