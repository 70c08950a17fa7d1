//! Which type each class of tensors gets.

use std::collections::BTreeMap;
use std::str::FromStr;

use quant::Type;

use crate::error::Error;
use crate::tensors::Class;

/// Which experts a [`LayerType`] applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPart {
    /// Gate, up and down.
    All,
    /// Gate and up.
    GateUp,
    /// Down.
    Down,
}

/// Another type for the routed experts of some layers, written `[gate_up:|down:]FIRST[-LAST]=TYPE`, for
/// example `40-47=IQ2_XS` or `down:0=Q4_K`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerType {
    /// Which matrices.
    pub part: ExpertPart,
    /// The first layer.
    pub first: u32,
    /// The last layer, inclusive.
    pub last: u32,
    /// Their type.
    pub ty: Type,
}

impl FromStr for LayerType {
    type Err = Error;

    fn from_str(text: &str) -> Result<LayerType, Error> {
        let bad = |what: &str| Error::option(text, what);
        let (layers, ty) = text
            .split_once('=')
            .ok_or_else(|| bad("expected [gate_up:|down:]FIRST[-LAST]=TYPE, as in 40-47=IQ2_XS"))?;
        let (part, layers) = match layers.split_once(':') {
            None => (ExpertPart::All, layers),
            Some(("gate_up", layers)) => (ExpertPart::GateUp, layers),
            Some(("down", layers)) => (ExpertPart::Down, layers),
            Some(_) => return Err(bad("expected gate_up or down before the colon")),
        };
        let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| bad("expected layer numbers"));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(bad("the first layer is behind the last"));
        }
        let ty = Type::from_name(ty.trim()).ok_or_else(|| bad("unknown type"))?;
        Ok(LayerType { part, first, last, ty })
    }
}

/// The types of a file by tensor class. What is `None` follows the broader choice: the shared expert,
/// attention, DeltaNet, embedding and output follow `dense`; `dense` and the experts follow the operation's own
/// default (BF16 for a conversion, the type in the input for a requantisation, F32 for a synthetic model).
///
/// Norms, the router, the convolution and other single rows are F32 whatever is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix {
    /// Gate and up matrices of the routed experts.
    pub gate_up: Option<Type>,
    /// Down matrices of the routed experts.
    pub down: Option<Type>,
    /// Exceptions for the experts of some layers; a later one wins.
    pub layers: Vec<LayerType>,
    /// Every other matrix that has no choice of its own.
    pub dense: Option<Type>,
    /// The token embedding.
    pub embedding: Option<Type>,
    /// The output projection.
    pub output: Option<Type>,
    /// Attention projections.
    pub attention: Option<Type>,
    /// DeltaNet projections.
    pub delta: Option<Type>,
    /// The beta/alpha projection; where not chosen it follows `dense` but stays at 8 bits or more, because it is
    /// tiny and sets the decay of the state.
    pub beta_alpha: Option<Type>,
    /// The shared expert.
    pub shared: Option<Type>,
}

impl Mix {
    /// One type for the experts and one for everything else.
    pub fn new(experts: Option<Type>, dense: Option<Type>) -> Mix {
        Mix { gate_up: experts, down: experts, dense, ..Mix::default() }
    }

    /// The type chosen for a class in a layer, before it is known whether its rows fit.
    pub fn choose(&self, class: Class, layer: Option<u32>) -> Option<Type> {
        match class {
            Class::Embedding => self.embedding.or(self.dense),
            Class::Output => self.output.or(self.dense),
            Class::Attention => self.attention.or(self.dense),
            Class::Delta => self.delta.or(self.dense),
            Class::Shared => self.shared.or(self.dense),
            Class::Other => self.dense,
            Class::Fixed => Some(Type::F32),
            Class::BetaAlpha => self.beta_alpha.or(self.dense.map(at_least_8_bits)),
            Class::GateUp => self.exception(ExpertPart::GateUp, layer).or(self.gate_up),
            Class::Down => self.exception(ExpertPart::Down, layer).or(self.down),
        }
    }

    fn exception(&self, part: ExpertPart, layer: Option<u32>) -> Option<Type> {
        let layer = layer?;
        let applies = |rule: &&LayerType| {
            (rule.part == part || rule.part == ExpertPart::All) && (rule.first..=rule.last).contains(&layer)
        };
        self.layers.iter().rev().find(applies).map(|rule| rule.ty)
    }

    /// Every type this mix can lead to.
    pub(crate) fn types(&self) -> impl Iterator<Item = Type> + '_ {
        let single = [
            self.gate_up,
            self.down,
            self.dense,
            self.embedding,
            self.output,
            self.attention,
            self.delta,
            self.beta_alpha,
            self.shared,
        ];
        single.into_iter().flatten().chain(self.layers.iter().map(|rule| rule.ty))
    }

    /// Refuses exceptions for layers that a model of `blocks` blocks does not have.
    pub(crate) fn check_layers(&self, blocks: u32) -> Result<(), Error> {
        match self.layers.iter().find(|rule| rule.last >= blocks) {
            None => Ok(()),
            Some(LayerType { first, last, ty, .. }) => {
                let what = format!("the model has {blocks} blocks, numbered from 0");
                Err(Error::option(format!("{first}-{last}={ty}"), what))
            }
        }
    }

    /// Refuses types nobody can write, before any work is done.
    pub(crate) fn check_encodable(&self) -> Result<(), Error> {
        match self.types().find(|&ty| !quant::can_encode(ty)) {
            None => Ok(()),
            Some(ty) => Err(cannot_encode(ty)),
        }
    }
}

pub(crate) fn cannot_encode(ty: Type) -> Error {
    let known = Type::all().filter(|&ty| quant::can_encode(ty)).map(Type::name).collect::<Vec<_>>();
    Error::CannotEncode { ty, known: known.join(", ") }
}

fn at_least_8_bits(ty: Type) -> Type {
    if ty.block_bytes() * 8 < ty.block_len() * 8 { Type::Q8_0 } else { ty }
}

/// The type a tensor with rows of `columns` weights really gets: rows that are no whole number of blocks of
/// `wanted` become Q8_0, or F16 where even that does not fit.
pub(crate) fn fit(wanted: Type, columns: u64) -> Type {
    let fits = |ty: Type| columns.is_multiple_of(ty.block_len() as u64);
    [wanted, Type::Q8_0].into_iter().find(|&ty| fits(ty)).unwrap_or(Type::F16)
}

/// The number for `general.file_type`: the type most bytes have, as tools name whole files.
pub(crate) fn file_type(bytes: &BTreeMap<Type, u64>) -> Option<u32> {
    let (&ty, _) = bytes.iter().max_by_key(|(ty, bytes)| (**bytes, std::cmp::Reverse(**ty)))?;
    Some(match ty {
        Type::F32 => 0,
        Type::F16 => 1,
        Type::Q4_0 => 2,
        Type::Q4_1 => 3,
        Type::Q8_0 => 7,
        Type::Q5_0 => 8,
        Type::Q5_1 => 9,
        Type::Q2_K => 10,
        Type::Q3_K => 11,
        Type::Q4_K => 14,
        Type::Q5_K => 16,
        Type::Q6_K => 18,
        Type::IQ2_XXS => 19,
        Type::IQ2_XS => 20,
        Type::IQ3_XXS => 23,
        Type::IQ1_S => 24,
        Type::IQ4_NL => 25,
        Type::IQ3_S => 26,
        Type::IQ2_S => 28,
        Type::IQ4_XS => 30,
        Type::IQ1_M => 31,
        Type::BF16 => 32,
        Type::MXFP4 => 38,
    })
}
