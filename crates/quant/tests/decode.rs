//! Decoding against the vectors made by an independent decoder (see `make_golden.py`).

use std::path::Path;

use redlite_quant::{self as quant, Error, Type};

/// The blocks of `ty` in the golden file, and the weights they stand for.
fn golden(ty: Type) -> (Vec<u8>, Vec<f32>) {
    let file = format!("tests/golden/{}.bin", ty.name().to_lowercase());
    let mut blocks = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let pair = ty.block_bytes() + 4 * ty.block_len();
    assert!(blocks.len().is_multiple_of(pair) && blocks.len() >= 7 * pair);
    let weights = blocks.split_off(blocks.len() / pair * ty.block_bytes());
    (blocks, weights.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// The same bits; NaNs of any payload are alike, except where weights are copies.
fn same(ty: Type, a: f32, b: f32) -> bool {
    let copied = matches!(ty, Type::F32 | Type::BF16);
    a.to_bits() == b.to_bits() || (!copied && a.is_nan() && b.is_nan())
}

/// Bytes without pattern, the same on every run.
fn noise(len: usize, mut state: u64) -> Vec<u8> {
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
    .take(len)
    .collect()
}

#[test]
fn every_type_decodes_to_the_bits_of_the_independent_decoder() {
    for ty in Type::all() {
        let (blocks, expected) = golden(ty);
        let mut weights = vec![f32::NAN; expected.len()];
        quant::decode(ty, &blocks, &mut weights).unwrap();
        for (i, (&ours, &theirs)) in weights.iter().zip(&expected).enumerate() {
            let block = i / ty.block_len();
            assert!(
                same(ty, ours, theirs),
                "{ty}, block {block}, weight {i}: {ours:e} instead of {theirs:e}"
            );
        }
        assert!(expected.iter().filter(|w| w.is_finite() && **w != 0.0).count() > expected.len() / 4);
    }
}

#[test]
fn any_number_of_blocks_decodes_like_its_parts() {
    for ty in Type::all() {
        let (blocks, expected) = golden(ty);
        for count in [0, 1, 2, 3, 5] {
            let (len, bytes) = (count * ty.block_len(), count * ty.block_bytes());
            for skip in [0, 1] {
                let (from, at) = (skip * ty.block_bytes(), skip * ty.block_len());
                let mut weights = vec![0.5; len];
                quant::decode(ty, &blocks[from..from + bytes], &mut weights).unwrap();
                assert!(weights.iter().zip(&expected[at..at + len]).all(|(&a, &b)| same(ty, a, b)), "{ty}");
            }
        }
    }
}

#[test]
fn any_bytes_decode() {
    for ty in Type::all() {
        let count = 4096 / ty.block_len();
        let mut weights = vec![0.0; count * ty.block_len()];
        for seed in 1..=20 {
            quant::decode(ty, &noise(count * ty.block_bytes(), seed), &mut weights).unwrap();
        }
        for byte in [0, 0x7f, 0x80, 0xff] {
            quant::decode(ty, &vec![byte; count * ty.block_bytes()], &mut weights).unwrap();
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_and_nothing_is_written() {
    for ty in Type::all() {
        let (len, bytes) = (3 * ty.block_len(), 3 * ty.block_bytes());
        let mut weights = vec![7.0; len];
        for actual in [0, bytes - 1, bytes + 1, bytes + ty.block_bytes()] {
            let refused = quant::decode(ty, &vec![0; actual], &mut weights);
            assert_eq!(refused, Err(Error::ByteLength { ty, len, expected: bytes, actual }));
        }
        if ty.block_len() > 1 {
            let refused = quant::decode(ty, &vec![0; bytes], &mut weights[..len - 1]);
            assert_eq!(refused, Err(Error::PartialBlock { ty, len: len - 1 }));
        }
        assert!(weights.iter().all(|&w| w == 7.0));
    }
    let message = quant::decode(Type::Q6_K, &[], &mut [0.0; 100]).unwrap_err().to_string();
    assert_eq!(message, "100 weights are not a whole number of Q6_K blocks of 256");
}
