//! Models of random weights: any size, valid in every reader, numerically well-behaved.
//!
//! Every matrix has the deviation 1/√(row length), which keeps unit-sized activations unit-sized; matrices that
//! write into the residual stream are smaller by √(layers), so that it neither explodes nor starves over the depth;
//! norms are near 1, decays spread from a few to a few thousand positions. Quantised tensors are drawn as blocks, not
//! encoded from floats, so the disk is the limit. Every piece has its own random stream, found by seed, tensor and
//! position.

mod blocks;
mod recipe;
mod rng;

use std::path::Path;

use gguf::Metadata;
use quant::Type;

use crate::error::Error;
use crate::mix::Mix;
use crate::output::{Output, Planned, piece_blocks, with_threads};
use crate::progress::OnProgress;
use crate::shape::{ARCHITECTURE, Shape};
use crate::summary::Summary;
use crate::tensors::{Role, Tensor, tensors};
use crate::vocabulary::{describe_vocabulary, synthetic};

use blocks::Blocks;
pub use recipe::Recipe;
use rng::Rng;

/// What to make up.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// The shape; the 80B by default.
    pub shape: Shape,
    /// Types by tensor class; what is not chosen is F32. Any type will do, encoder or not.
    pub mix: Mix,
    /// Equal seeds (with equal shapes and types) make equal files.
    pub seed: u64,
    /// How unevenly experts are used: the deviation of the logarithm of the router's row norms. 0 is even; at 0.5
    /// popular experts are several times as busy as rare ones.
    pub skew: f32,
    /// `general.name`.
    pub name: String,
    /// Threads that generate; 0 for the ambient rayon pool.
    pub threads: usize,
}

impl Default for SynthOptions {
    fn default() -> SynthOptions {
        SynthOptions {
            shape: Shape::default(),
            mix: Recipe::Iq2Xxs.mix(Shape::default().layers),
            seed: 1,
            skew: 0.0,
            name: "synthetic".to_owned(),
            threads: 0,
        }
    }
}

/// Writes a synthetic model to `out`, which appears only when it is complete.
///
/// # Errors
///
/// A shape that makes no model, a failed write, [`Error::Cancelled`].
pub fn synth(out: &Path, options: &SynthOptions, progress: &mut OnProgress<'_>) -> Result<Summary, Error> {
    let shape = &options.shape;
    shape.check()?;
    options.mix.check_layers(shape.blocks())?;
    if !(0.0..=3.0).contains(&options.skew) {
        return Err(Error::option("skew", format!("{} is not between 0 and 3", options.skew)));
    }
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", ARCHITECTURE);
    metadata.set("general.type", "model");
    metadata.set("general.name", options.name.as_str());
    shape.describe(&mut metadata);
    describe_vocabulary(&synthetic(shape.vocab)?, &mut metadata);

    let tensors = tensors(shape);
    let plan: Vec<Planned> = tensors
        .iter()
        .map(|tensor| {
            let class = tensor.role.class();
            let ty = options.mix.choose(class, tensor.block).unwrap_or(Type::F32);
            Planned::new(tensor.name(), class, tensor.dims.clone(), ty)
        })
        .collect();
    with_threads(options.threads, || {
        let mut output = Output::create(out, metadata, &plan, progress)?;
        for (planned, tensor) in plan.iter().zip(&tensors) {
            generate(&mut output, planned, tensor, options)?;
        }
        output.finish()
    })
}

/// Draws one tensor.
fn generate(
    output: &mut Output<'_, '_>,
    planned: &Planned,
    tensor: &Tensor,
    options: &SynthOptions,
) -> Result<(), Error> {
    let (ty, name) = (planned.ty, planned.name.as_str());
    let rng = |piece| Rng::new(options.seed, name, piece);
    let law = Law::of(tensor, options);
    match law {
        Law::Normal { std } if ty.block_len() > 1 => {
            let blocks = Blocks::new(ty, std)?;
            output.generate(planned, |piece, count| Ok(blocks.make(&mut rng(piece), count)))
        }
        _ => {
            let per_piece = piece_blocks(ty) as u64;
            output.generate(planned, |piece, count| {
                let weights = law.draw(&mut rng(piece), piece * per_piece, count);
                let mut bytes = Vec::new();
                quant::encode(ty, &weights, None, &mut bytes)
                    .map_err(|source| Error::Quant { name: name.to_owned(), source })?;
                Ok(bytes)
            })
        }
    }
}

/// How the weights of a tensor are distributed.
#[derive(Clone, Debug)]
enum Law {
    /// Normal around 0.
    Normal { std: f32 },
    /// Normal with its own deviation in every row of `columns` weights.
    Rows { columns: u64, std: Vec<f32> },
    /// Near 1, as norm weights are.
    NearOne,
    /// −A with A uniform in 1..16, as training starts from.
    Decay,
    /// softplus⁻¹ of a step log-uniform in 0.001..0.1, as training starts from.
    Step,
}

impl Law {
    fn of(tensor: &Tensor, options: &SynthOptions) -> Law {
        let shape = &options.shape;
        let row = tensor.dims[0] as f32;
        let normal = |gain: f32| Law::Normal { std: gain / row.sqrt() };
        // Contributions of 2·layers parts, each of about half the size of its input, sum to about 1.
        let residual = 1.0 / (shape.layers as f32).sqrt();
        match tensor.role {
            Role::AttnNorm
            | Role::PostNorm
            | Role::OutputNorm
            | Role::QueryNorm
            | Role::KeyNorm
            | Role::StateNorm
            | Role::MtpEmbeddingNorm
            | Role::MtpHiddenNorm
            | Role::MtpHeadNorm => Law::NearOne,
            Role::A => Law::Decay,
            Role::DtBias => Law::Step,
            // Logits of deviation 3: a distribution with favourites, but no certainty.
            Role::Output => normal(3.0),
            Role::Embedding if shape.tied => normal(3.0),
            Role::Embedding => Law::Normal { std: 0.5 },
            Role::AttnOut | Role::DeltaOut | Role::SharedDown => normal(residual),
            // The routed experts' weighted sum is smaller than one of them.
            Role::Down => normal(2.0 * residual),
            Role::Router => Law::router(tensor, options),
            _ => normal(1.0),
        }
    }

    /// Router rows of deviation 1.5/√hidden, times a log-normal factor of mean square 1: a longer row has larger
    /// logits, so its expert is among the best more often.
    fn router(tensor: &Tensor, options: &SynthOptions) -> Law {
        let mut rng = Rng::new(options.seed, &tensor.name(), u64::MAX);
        let base = 1.5 / (tensor.dims[0] as f32).sqrt() * (-options.skew * options.skew).exp();
        let std = (0..tensor.dims[1]).map(|_| base * (options.skew * rng.normal()).exp()).collect();
        Law::Rows { columns: tensor.dims[0], std }
    }

    /// Weights `first..first + count`.
    fn draw(&self, rng: &mut Rng, first: u64, count: usize) -> Vec<f32> {
        let weights = (first..).take(count);
        match self {
            Law::Normal { std } => weights.map(|_| std * rng.normal()).collect(),
            Law::Rows { columns, std } => {
                weights.map(|at| std[(at / columns) as usize] * rng.normal()).collect()
            }
            Law::NearOne => weights.map(|_| 1.0 + 0.1 * rng.normal()).collect(),
            Law::Decay => weights.map(|_| -1.0 - 15.0 * rng.uniform()).collect(),
            Law::Step => weights
                .map(|_| {
                    let step = 0.001 * 100f32.powf(rng.uniform());
                    // softplus⁻¹(y) = ln(eʸ − 1)
                    step.exp_m1().ln()
                })
                .collect(),
        }
    }
}
