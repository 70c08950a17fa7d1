//! The types a GGUF tensor may have, with the geometry of their blocks.

use std::fmt;

/// A weight format, numbered as in GGUF files (the `ggml_type` of the GGUF document).
///
/// A row of a tensor is a whole number of blocks: [`Type::block_len`] weights stored in
/// [`Type::block_bytes`] bytes. All fields are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[allow(missing_docs, non_camel_case_types)] // the names of the format document
pub enum Type {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    MXFP4 = 39,
}

/// One line of the table behind [`Type`]: the type, its name, weights and bytes of a block.
type Row = (Type, &'static str, usize, usize);

const TABLE: [Row; 23] = [
    (Type::F32, "F32", 1, 4),
    (Type::F16, "F16", 1, 2),
    (Type::Q4_0, "Q4_0", 32, 18),
    (Type::Q4_1, "Q4_1", 32, 20),
    (Type::Q5_0, "Q5_0", 32, 22),
    (Type::Q5_1, "Q5_1", 32, 24),
    (Type::Q8_0, "Q8_0", 32, 34),
    (Type::Q2_K, "Q2_K", 256, 84),
    (Type::Q3_K, "Q3_K", 256, 110),
    (Type::Q4_K, "Q4_K", 256, 144),
    (Type::Q5_K, "Q5_K", 256, 176),
    (Type::Q6_K, "Q6_K", 256, 210),
    (Type::IQ2_XXS, "IQ2_XXS", 256, 66),
    (Type::IQ2_XS, "IQ2_XS", 256, 74),
    (Type::IQ3_XXS, "IQ3_XXS", 256, 98),
    (Type::IQ1_S, "IQ1_S", 256, 50),
    (Type::IQ4_NL, "IQ4_NL", 32, 18),
    (Type::IQ3_S, "IQ3_S", 256, 110),
    (Type::IQ2_S, "IQ2_S", 256, 82),
    (Type::IQ4_XS, "IQ4_XS", 256, 136),
    (Type::IQ1_M, "IQ1_M", 256, 56),
    (Type::BF16, "BF16", 1, 2),
    (Type::MXFP4, "MXFP4", 32, 17),
];

impl Type {
    /// Every supported type, in ascending id.
    pub fn all() -> impl Iterator<Item = Type> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type with this id in a GGUF file, if it is one we can decode.
    pub fn from_id(id: u32) -> Option<Type> {
        Type::all().find(|ty| ty.id() == id)
    }

    /// The type called `name` (`IQ2_XXS`, `q6_k`, …), whatever the case of its letters.
    pub fn from_name(name: &str) -> Option<Type> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// The id stored in GGUF files.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The usual name, as tools print it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Weights in one block.
    pub fn block_len(self) -> usize {
        self.row().2
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Bytes of `len` consecutive weights, or `None` if `len` is not a whole number of blocks or the
    /// result does not fit.
    pub fn bytes(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }

    fn row(self) -> &'static Row {
        TABLE.iter().find(|row| row.0 == self).expect("every variant has a row")
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_lead_back_to_their_type() {
        for ty in Type::all() {
            assert_eq!(Type::from_id(ty.id()), Some(ty));
            assert_eq!(Type::from_name(&ty.name().to_lowercase()), Some(ty));
            assert_eq!(ty.bytes(ty.block_len() * 3), Some(ty.block_bytes() * 3));
        }
        assert_eq!(Type::from_id(4), None, "id 4 was retired");
        assert_eq!(Type::IQ2_XXS.bytes(255), None);
    }
}
