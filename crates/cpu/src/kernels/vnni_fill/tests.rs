//! Panels against those of the portable decoder, for blocks of any bits: scales of every kind, too.

use quant::Type;

use super::super::int8::GROUP;
use super::super::unpack;
use super::super::{Kernels, Variant};
use super::*;

/// Bytes that repeat nowhere near.
fn bytes(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    };
    (0..count).map(step).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn panels_of_any_bits_are_those_of_the_portable_decoder() {
    let (Ok(vnni), Ok(portable)) =
        (Kernels::choose(Some(Variant::Vnni)), Kernels::choose(Some(Variant::Portable)))
    else {
        return;
    };
    let (mut found, mut expected) = (Box::new(Panel::ZERO), Box::new(Panel::ZERO));
    for ty in Type::all().filter(|&ty| unpack::is_integer(ty)) {
        let form = unpack::form(ty);
        // Every number of blocks and of rows.
        for count in 1..=COLUMNS / ty.block_len() {
            for rows in [1 + count % PANEL, 1 + 7 * count % PANEL, PANEL] {
                let (len, columns) = (count * ty.block_bytes(), count * ty.block_len());
                let bytes = bytes(rows * len, ty.id() + (count * 100 + rows) as u32);
                let rows: Vec<&[u8]> = bytes.chunks_exact(len).collect();
                (vnni.fill)(ty, &rows, columns, &mut found);
                (portable.fill)(ty, &rows, columns, &mut expected);
                for (found, expected) in found.q.iter().zip(&expected.q).take(columns / 4) {
                    assert_eq!(found[..4 * rows.len()], expected[..4 * rows.len()], "{ty}, {count} blocks");
                }
                let (scales, offsets) =
                    (columns / GROUP * (1 + usize::from(form.halves)), columns / GROUP * form.offsets);
                let numbers = [
                    (&found.scales[..scales], &expected.scales[..scales]),
                    (&found.offsets[..offsets], &expected.offsets[..offsets]),
                ];
                for (found, expected) in numbers {
                    for (run, (found, expected)) in found.iter().zip(expected).enumerate() {
                        let equal = found.iter().zip(expected).take(rows.len()).all(|(a, b)| same(*a, *b));
                        assert!(equal, "{ty}, {count} blocks, run {run}: {found:?}, {expected:?}");
                    }
                }
            }
        }
    }
}
