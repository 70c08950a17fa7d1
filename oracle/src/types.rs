//! The weight types that llama.cpp's quantiser can write.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use llama_cpp_sys_2 as sys;

/// A weight type, an index into the table below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightType(usize);

/// Name, ggml's number, file label (none for floats), needs an importance matrix.
type Row = (&'static str, sys::ggml_type, Option<sys::llama_ftype>, bool);

const TABLE: &[Row] = &[
    ("F32", sys::GGML_TYPE_F32, None, false),
    ("F16", sys::GGML_TYPE_F16, None, false),
    ("BF16", sys::GGML_TYPE_BF16, None, false),
    ("Q4_0", sys::GGML_TYPE_Q4_0, Some(sys::LLAMA_FTYPE_MOSTLY_Q4_0), false),
    ("Q4_1", sys::GGML_TYPE_Q4_1, Some(sys::LLAMA_FTYPE_MOSTLY_Q4_1), false),
    ("Q5_0", sys::GGML_TYPE_Q5_0, Some(sys::LLAMA_FTYPE_MOSTLY_Q5_0), false),
    ("Q5_1", sys::GGML_TYPE_Q5_1, Some(sys::LLAMA_FTYPE_MOSTLY_Q5_1), false),
    ("Q8_0", sys::GGML_TYPE_Q8_0, Some(sys::LLAMA_FTYPE_MOSTLY_Q8_0), false),
    ("Q2_K", sys::GGML_TYPE_Q2_K, Some(sys::LLAMA_FTYPE_MOSTLY_Q2_K), false),
    ("Q3_K", sys::GGML_TYPE_Q3_K, Some(sys::LLAMA_FTYPE_MOSTLY_Q3_K_M), false),
    ("Q4_K", sys::GGML_TYPE_Q4_K, Some(sys::LLAMA_FTYPE_MOSTLY_Q4_K_M), false),
    ("Q5_K", sys::GGML_TYPE_Q5_K, Some(sys::LLAMA_FTYPE_MOSTLY_Q5_K_M), false),
    ("Q6_K", sys::GGML_TYPE_Q6_K, Some(sys::LLAMA_FTYPE_MOSTLY_Q6_K), false),
    ("IQ1_S", sys::GGML_TYPE_IQ1_S, Some(sys::LLAMA_FTYPE_MOSTLY_IQ1_S), true),
    ("IQ1_M", sys::GGML_TYPE_IQ1_M, Some(sys::LLAMA_FTYPE_MOSTLY_IQ1_M), true),
    ("IQ2_XXS", sys::GGML_TYPE_IQ2_XXS, Some(sys::LLAMA_FTYPE_MOSTLY_IQ2_XXS), true),
    ("IQ2_XS", sys::GGML_TYPE_IQ2_XS, Some(sys::LLAMA_FTYPE_MOSTLY_IQ2_XS), true),
    ("IQ2_S", sys::GGML_TYPE_IQ2_S, Some(sys::LLAMA_FTYPE_MOSTLY_IQ2_M), true),
    ("IQ3_XXS", sys::GGML_TYPE_IQ3_XXS, Some(sys::LLAMA_FTYPE_MOSTLY_IQ3_XXS), true),
    ("IQ3_S", sys::GGML_TYPE_IQ3_S, Some(sys::LLAMA_FTYPE_MOSTLY_IQ3_S), false),
    ("IQ4_NL", sys::GGML_TYPE_IQ4_NL, Some(sys::LLAMA_FTYPE_MOSTLY_IQ4_NL), false),
    ("IQ4_XS", sys::GGML_TYPE_IQ4_XS, Some(sys::LLAMA_FTYPE_MOSTLY_IQ4_XS), false),
    ("MXFP4", sys::GGML_TYPE_MXFP4, Some(sys::LLAMA_FTYPE_MOSTLY_MXFP4_MOE), false),
];

const ALL: [WeightType; TABLE.len()] = {
    let mut all = [WeightType(0); TABLE.len()];
    let mut index = 0;
    while index < all.len() {
        all[index] = WeightType(index);
        index += 1;
    }
    all
};

impl WeightType {
    /// The type of a name, in any case.
    pub fn parse(name: &str) -> Result<WeightType, String> {
        <WeightType as ValueEnum>::from_str(name, true).map_err(|_| {
            let known: Vec<&str> = TABLE.iter().map(|row| row.0).collect();
            format!("unknown type {name:?}; known are {}", known.join(", "))
        })
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        TABLE[self.0].0
    }

    /// Its number in ggml.
    pub fn ggml(self) -> sys::ggml_type {
        TABLE[self.0].1
    }

    /// The label of a file that consists mostly of it; none for float types.
    pub fn file_type(self) -> Option<sys::llama_ftype> {
        TABLE[self.0].2
    }

    /// Does the quantiser demand an importance matrix?
    pub fn needs_importance(self) -> bool {
        TABLE[self.0].3
    }

    /// Weights per block; a row must hold whole blocks.
    pub fn block(self) -> usize {
        // SAFETY: a valid type number; reads a constant table.
        usize::try_from(unsafe { sys::ggml_blck_size(self.ggml()) }).unwrap_or(1)
    }
}

impl ValueEnum for WeightType {
    fn value_variants<'a>() -> &'a [WeightType] {
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::type_name;

    #[test]
    fn names_are_those_of_ggml_and_parse_in_any_case() {
        for &ty in &ALL {
            assert_eq!(type_name(ty.ggml()), ty.name());
            assert_eq!(WeightType::parse(&ty.name().to_lowercase()), Ok(ty));
        }
        assert!(WeightType::parse("Q9_K").unwrap_err().contains("MXFP4"));
    }
}
