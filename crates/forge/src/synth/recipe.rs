//! Named mixes of types, as published files have them.

use std::str::FromStr;

use quant::Type;

use crate::error::Error;
use crate::mix::{ExpertPart, LayerType, Mix};

/// A named mix of types for a synthetic model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// Experts IQ2_XXS, dense Q5_K, output Q6_K, shared expert Q8_0: 21.8 GB for the 80B.
    Iq2Xxs,
    /// Experts IQ1_M, IQ2_XS on the last 8 layers, dense Q4_K, output Q5_K: 19.3 GB for the 80B.
    F2,
    /// Experts IQ3_XXS with down IQ3_S, dense Q5_K and better: 32.6 GB for the 80B.
    Iq3Xxs,
    /// Everything F32, for numerical comparisons.
    F32,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Recipe; 4] = [Recipe::Iq2Xxs, Recipe::F2, Recipe::Iq3Xxs, Recipe::F32];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::Iq2Xxs => "iq2xxs",
            Recipe::F2 => "f2",
            Recipe::Iq3Xxs => "iq3xxs",
            Recipe::F32 => "f32",
        }
    }

    /// The types for a model with a trunk of `layers` layers.
    pub fn mix(self, layers: u32) -> Mix {
        let eight_bits = Some(Type::Q8_0);
        match self {
            Recipe::Iq2Xxs => Mix {
                output: Some(Type::Q6_K),
                shared: eight_bits,
                beta_alpha: eight_bits,
                ..Mix::new(Some(Type::IQ2_XXS), Some(Type::Q5_K))
            },
            Recipe::F2 => {
                let last = LayerType {
                    part: ExpertPart::All,
                    first: layers.saturating_sub(8),
                    last: layers.saturating_sub(1),
                    ty: Type::IQ2_XS,
                };
                Mix {
                    embedding: Some(Type::Q2_K),
                    output: Some(Type::Q5_K),
                    beta_alpha: eight_bits,
                    layers: vec![last],
                    ..Mix::new(Some(Type::IQ1_M), Some(Type::Q4_K))
                }
            }
            Recipe::Iq3Xxs => Mix {
                down: Some(Type::IQ3_S),
                attention: Some(Type::Q6_K),
                shared: eight_bits,
                beta_alpha: eight_bits,
                embedding: Some(Type::IQ3_S),
                ..Mix::new(Some(Type::IQ3_XXS), Some(Type::Q5_K))
            },
            Recipe::F32 => Mix::new(Some(Type::F32), Some(Type::F32)),
        }
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Recipe, Error> {
        Recipe::ALL.into_iter().find(|recipe| recipe.name() == text).ok_or_else(|| {
            let names = Recipe::ALL.map(Recipe::name).join(", ");
            Error::option("recipe", format!("\"{text}\" is unknown; there are {names}"))
        })
    }
}
