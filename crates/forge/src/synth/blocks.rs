//! Random blocks of a quantised type: random indices, valid scales, weights of a chosen deviation.
//!
//! A block is filled with random bytes, which every format reads as codes, signs and small scales. What is left is
//! the float scale: random bits there could be huge, infinite or NaN, so it is replaced by one of sixteen values
//! around the one that gives the weights their deviation. Formats with a minimum get one that centres them.

use half::f16;
use quant::Type;

use crate::error::Error;
use crate::synth::rng::Rng;

/// The float scales of one block, as stored.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    /// The scale: an f16, or the exponent of MXFP4.
    d: u16,
    /// What the minimum (or offset) is multiplied with, where there is one: an f16.
    min: u16,
}

/// Makes blocks of one type and deviation.
#[derive(Debug)]
pub(crate) struct Blocks {
    ty: Type,
    scales: [Scale; 16],
}

impl Blocks {
    /// Blocks whose weights have the root mean square `std`.
    pub(crate) fn new(ty: Type, std: f32) -> Result<Blocks, Error> {
        let unit = std / rms_at_unit_scale(ty)?;
        let scales = match ty {
            Type::MXFP4 => exponents(unit),
            _ => spread().map(|factor| Scale::of(ty, unit * factor)),
        };
        Ok(Blocks { ty, scales })
    }

    /// `count` blocks.
    pub(crate) fn make(&self, rng: &mut Rng, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * self.ty.block_bytes()];
        rng.fill(&mut bytes);
        for block in bytes.chunks_exact_mut(self.ty.block_bytes()) {
            // The random bytes where the scale will be choose which scale.
            let choice = block[scale_offset(self.ty)];
            let mut scale = self.scales[usize::from(choice & 15)];
            if has_signed_scale(self.ty) {
                scale.d ^= u16::from(choice & 16) << 11;
            }
            finish(self.ty, block, scale);
        }
        bytes
    }
}

impl Scale {
    fn of(ty: Type, d: f32) -> Scale {
        Scale { d: f16::from_f32(d).to_bits(), min: f16::from_f32(d * centre(ty)).to_bits() }
    }
}

/// What the format subtracts (or, if negative, adds) so that codes drawn evenly have the mean 0, in units of the
/// scale.
fn centre(ty: Type) -> f32 {
    match ty {
        Type::Q2_K => 1.5,
        Type::Q4_K => 7.5,
        Type::Q5_K => 15.5,
        // Here the stored offset is added.
        Type::Q4_1 => -7.5,
        Type::Q5_1 => -15.5,
        _ => 0.0,
    }
}

/// Codes that reach one further below zero than above get scales of both signs, so that the mean is 0.
fn has_signed_scale(ty: Type) -> bool {
    matches!(ty, Type::Q4_0 | Type::Q5_0 | Type::IQ4_NL)
}

/// Where in a block the scale starts. For IQ1_M, whose scale is scattered, a byte that holds a part of it.
fn scale_offset(ty: Type) -> usize {
    match ty {
        Type::Q2_K => 80,
        Type::Q3_K => 108,
        Type::Q6_K => 208,
        Type::IQ1_M => 49,
        _ => 0,
    }
}

/// Replaces what must not be random in a block.
fn finish(ty: Type, block: &mut [u8], scale: Scale) {
    let put =
        |block: &mut [u8], at: usize, value: u16| block[at..at + 2].copy_from_slice(&value.to_le_bytes());
    match ty {
        Type::MXFP4 => block[0] = scale.d as u8,
        Type::IQ1_M => {
            // A nibble of the scale on top of each of the four 16-bit groups of small scales, lowest first.
            for part in 0..4 {
                let high = &mut block[49 + 2 * part];
                *high = *high & 0x0f | ((scale.d >> (4 * part)) as u8 & 0x0f) << 4;
            }
        }
        Type::Q2_K => {
            // Equal factors for scale and minimum keep every group centred.
            block[..16].iter_mut().for_each(|pair| *pair = *pair & 0x0f | *pair << 4);
            put(block, 80, scale.d);
            put(block, 82, scale.min);
        }
        Type::Q4_K | Type::Q5_K => {
            // Likewise: bytes 4-7 hold four scales, 8-11 their minima, 12-15 a nibble of each of the other four.
            block.copy_within(4..8, 8);
            block[12..16].iter_mut().for_each(|pair| *pair = *pair & 0x0f | *pair << 4);
            put(block, 0, scale.d);
            put(block, 2, scale.min);
        }
        Type::Q4_1 | Type::Q5_1 => {
            put(block, 0, scale.d);
            put(block, 2, scale.min);
        }
        Type::Q8_0 => {
            // -128 has no opposite; encoders never write it.
            block[2..].iter_mut().for_each(|code| *code = if *code == 0x80 { 0 } else { *code });
            put(block, 0, scale.d);
        }
        _ => put(block, scale_offset(ty), scale.d),
    }
}

/// Sixteen factors between 0.6 and 1.4 of their root mean square, which is 1.
fn spread() -> [f32; 16] {
    let factors: [f32; 16] = std::array::from_fn(|i| 0.6 + 0.8 * i as f32 / 15.0);
    let rms = (factors.iter().map(|f| f * f).sum::<f32>() / 16.0).sqrt();
    factors.map(|f| f / rms)
}

/// The exponents of MXFP4, whose scales are powers of two: a mixture of two neighbours with the mean square of
/// `unit`, in units of the exponent 127.
fn exponents(unit: f32) -> [Scale; 16] {
    let below = unit.log2().floor();
    let excess = (unit / below.exp2()).powi(2);
    let larger = (16.0 * (excess - 1.0) / 3.0).round() as usize;
    std::array::from_fn(|i| {
        let exponent = 127.0 + below + f32::from(i < larger);
        Scale { d: exponent.clamp(1.0, 254.0) as u16, min: 0 }
    })
}

/// The root mean square of random weights whose float scale is 1, measured on blocks of a fixed seed.
fn rms_at_unit_scale(ty: Type) -> Result<f32, Error> {
    const SAMPLE: usize = 512;
    let unit = match ty {
        Type::MXFP4 => Scale { d: 127, min: 0 },
        _ => Scale::of(ty, 1.0),
    };
    let blocks = Blocks { ty, scales: [unit; 16] };
    let bytes = blocks.make(&mut Rng::new(0, ty.name(), 0), SAMPLE);
    let mut weights = vec![0.0; SAMPLE * ty.block_len()];
    quant::decode(ty, &bytes, &mut weights)
        .map_err(|source| Error::Quant { name: format!("(sample of {ty})"), source })?;
    let square: f64 = weights.iter().map(|&w| f64::from(w).powi(2)).sum();
    Ok((square / weights.len() as f64).sqrt() as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_type_has_the_deviation_asked_for_and_no_mean() {
        for ty in Type::all().filter(|ty| ty.block_len() > 1) {
            for std in [0.005, 0.022, 1.0] {
                let count = (1 << 18) / ty.block_len();
                let bytes = Blocks::new(ty, std).unwrap().make(&mut Rng::new(7, "x", 3), count);
                let mut weights = vec![0.0; 1 << 18];
                quant::decode(ty, &bytes, &mut weights).unwrap();
                assert!(weights.iter().all(|w| w.is_finite()), "{ty}");
                let n = weights.len() as f64;
                let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / n;
                let rms = (weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / n).sqrt();
                assert!((rms / f64::from(std) - 1.0).abs() < 0.04, "{ty}: rms {rms} for {std}");
                assert!(mean.abs() < 0.02 * f64::from(std), "{ty}: mean {mean} for {std}");
                // Not even a small group may be off centre, as it is if scale and minimum do not belong together.
                let means = weights.chunks(32).map(|group| f64::from(group.iter().sum::<f32>()) / 32.0);
                let off = (means.map(|mean| mean * mean).sum::<f64>() / (n / 32.0)).sqrt();
                assert!(off < 0.3 * f64::from(std), "{ty}: groups are {off} off centre for {std}");
                let largest = weights.iter().fold(0f32, |max, w| max.max(w.abs()));
                assert!(largest < 8.0 * std, "{ty}: a weight of {largest} for {std}");
            }
        }
    }
}
