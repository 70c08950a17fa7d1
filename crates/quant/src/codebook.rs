//! Codebooks of the IQ and MXFP4 formats, as defined by their decoders.
//!
//! An IQ block stores, for a group of eight (IQ1, IQ2) or four (IQ3) weights, the index of a codebook row;
//! the row holds the group's magnitudes (IQ2, IQ3: signs are stored apart) or its values (IQ1). The rows are
//! facts of the formats. They are kept packed in the source and expanded at compile time.

mod packed;

/// Rows of IQ1_S and IQ1_M: values -1, 0, 1, to which the block adds ±1/8.
pub static IQ1_GRID: [[i8; 8]; 2048] = expand_pairs(&packed::IQ1, [-1, 0, 1]);

/// Rows of IQ2_XXS: magnitudes 8, 25, 43.
pub static IQ2_XXS_GRID: [[i8; 8]; 256] = expand_pairs(&packed::IQ2_XXS, IQ2_MAGNITUDES);

/// Rows of IQ2_XS: magnitudes 8, 25, 43.
pub static IQ2_XS_GRID: [[i8; 8]; 512] = expand_pairs(&packed::IQ2_XS, IQ2_MAGNITUDES);

/// Rows of IQ2_S: magnitudes 8, 25, 43.
pub static IQ2_S_GRID: [[i8; 8]; 1024] = expand_pairs(&packed::IQ2_S, IQ2_MAGNITUDES);

/// Rows of IQ3_XXS: magnitudes [`IQ3_XXS_MAGNITUDES`].
pub static IQ3_XXS_GRID: [[u8; 4]; 256] = expand_octal(&packed::IQ3_XXS, IQ3_XXS_MAGNITUDES);

/// Rows of IQ3_S: magnitudes [`IQ3_S_MAGNITUDES`].
pub static IQ3_S_GRID: [[u8; 4]; 512] = expand_octal(&packed::IQ3_S, IQ3_S_MAGNITUDES);

/// What the rows of the three IQ2 codebooks are made of.
pub const IQ2_MAGNITUDES: [i8; 3] = [8, 25, 43];

/// What the rows of IQ3_XXS are made of.
pub const IQ3_XXS_MAGNITUDES: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

/// What the rows of IQ3_S are made of.
pub const IQ3_S_MAGNITUDES: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// What IQ1_S and IQ1_M add to (or subtract from) the values of a row.
pub const IQ1_DELTA: f32 = 0.125;

/// The signs of eight weights from the seven bits that IQ2_XXS, IQ2_XS and IQ3_XXS store: bit `j` set means
/// weight `j` is negative. The eighth bit makes the number of negative weights even.
pub static EVEN_SIGNS: [u8; 128] = even_signs();

/// The sixteen values of IQ4_NL and IQ4_XS, ascending, denser around zero.
pub static IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The sixteen values of MXFP4 (E2M1: sign, two bits of exponent, one of mantissa), doubled to be whole.
/// The block's scale is halved to match.
pub static MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Expands rows of eight two-bit entries, the first in the lowest bits.
const fn expand_pairs<const N: usize>(packed: &[u16; N], values: [i8; 3]) -> [[i8; 8]; N] {
    let mut grid = [[0; 8]; N];
    let mut row = 0;
    while row < N {
        let mut j = 0;
        while j < 8 {
            grid[row][j] = values[(packed[row] >> (2 * j)) as usize & 3];
            j += 1;
        }
        row += 1;
    }
    grid
}

/// Expands rows of four octal digits, the first entry in the highest digit.
const fn expand_octal<const N: usize>(packed: &[u16; N], values: [u8; 8]) -> [[u8; 4]; N] {
    let mut grid = [[0; 4]; N];
    let mut row = 0;
    while row < N {
        let mut j = 0;
        while j < 4 {
            grid[row][j] = values[(packed[row] >> (9 - 3 * j)) as usize & 7];
            j += 1;
        }
        row += 1;
    }
    grid
}

const fn even_signs() -> [u8; 128] {
    let mut signs = [0; 128];
    let mut stored = 0;
    while stored < 128 {
        let parity = (stored as u8).count_ones() as u8 & 1;
        signs[stored] = stored as u8 | parity << 7;
        stored += 1;
    }
    signs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of all codebooks one after the other, from an independent decoder (`tests/make_golden.py`).
    const GOLDEN: &[u8] = include_bytes!("../tests/golden/codebooks.bin");

    #[test]
    fn every_row_is_that_of_the_independent_decoder() {
        let two_bit = [&IQ2_XXS_GRID[..], &IQ2_XS_GRID, &IQ2_S_GRID].concat();
        let bytes = |rows: &[[i8; 8]]| rows.as_flattened().iter().map(|&v| v as u8).collect::<Vec<_>>();
        let three_bit = [&IQ3_XXS_GRID[..], &IQ3_S_GRID].concat();
        let all = [bytes(&IQ1_GRID), bytes(&two_bit), three_bit.into_flattened()].concat();
        assert!(all == GOLDEN);
    }

    #[test]
    fn the_negative_weights_are_even_in_number() {
        for (stored, signs) in EVEN_SIGNS.iter().enumerate() {
            assert_eq!(usize::from(signs & 127), stored);
            assert_eq!(signs.count_ones() % 2, 0);
        }
    }
}
