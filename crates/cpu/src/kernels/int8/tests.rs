//! The integer kernels of every variant of this machine against the functions of this module, for every type.

use super::*;
use crate::kernels::is_integer;
use crate::kernels::testing::tables;

fn types() -> impl Iterator<Item = Type> {
    Type::all().filter(|&ty| is_integer(ty))
}

fn random(seed: u32) -> impl FnMut() -> u8 {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    }
}

/// Columns and rows of panels: whole ones, parts, as short as the type allows.
fn shapes(ty: Type) -> Vec<(usize, usize)> {
    let columns = if ty.block_len() == 32 { vec![32, 96, 512] } else { vec![256, 512] };
    columns.into_iter().flat_map(|columns| [1, 5, 15, 16].map(|rows| (columns, rows))).collect()
}

#[test]
fn panels_of_any_bits() {
    for ty in types() {
        let form = unpack::form(ty);
        for (columns, rows) in shapes(ty) {
            let mut next = random((ty.id() << 9) + (16 * columns + rows) as u32);
            let len = columns / ty.block_len() * ty.block_bytes();
            let bytes: Vec<Vec<u8>> = (0..rows).map(|_| (0..len).map(|_| next()).collect()).collect();
            let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
            let mut expected = Box::new(Panel::ZERO);
            fill(ty, &bytes, columns, &mut expected);
            for kernels in tables() {
                let what = format!("{}: {ty}, {rows} × {columns}", kernels.variant);
                let mut found = Box::new(Panel::ZERO);
                (kernels.fill)(ty, &bytes, columns, &mut found);
                for step in 0..columns / 4 {
                    let (found, expected) = (&found.q[step][..4 * rows], &expected.q[step][..4 * rows]);
                    assert_eq!(found, expected, "{what}: columns from {}", 4 * step);
                    let in_range = |q: &u8| (0..=form.span).contains(&q.wrapping_sub(form.zero()));
                    assert!(found.iter().all(in_range), "{what}: {found:?} are not all in {form:?}");
                }
                // One NaN is as good as another.
                let bits_of = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
                let bits = |numbers: &[[f32; PANEL]], per_group: usize| -> Vec<u32> {
                    let runs = &numbers[..columns / GROUP * per_group];
                    runs.iter().flat_map(|run| &run[..rows]).map(bits_of).collect()
                };
                let (scales, offsets) = (1 + usize::from(form.halves), form.offsets);
                assert_eq!(bits(&found.scales, scales), bits(&expected.scales, scales), "{what}: scales");
                assert_eq!(
                    bits(&found.offsets, offsets),
                    bits(&expected.offsets, offsets),
                    "{what}: offsets"
                );
            }
        }
    }
}

/// The largest sums there can be, which must not be cut off on the way, and others.
#[test]
fn products_of_the_extremes_of_every_type() {
    for ty in types() {
        let form = unpack::form(ty);
        for (case, rows) in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 17, 48].into_iter().enumerate() {
            let groups = [1, 3, 16][case % 3];
            let mut next = random(77 * case as u32 + ty.id());
            let x: Vec<Codes> = (0..rows)
                .map(|_| {
                    let mut numbers = vec![0.0; groups * GROUP];
                    for group in numbers.chunks_exact_mut(GROUP) {
                        let signs = usize::from(next() % 4);
                        group.iter_mut().for_each(|x| {
                            let number = f32::from(next() as i8);
                            *x = [127.0, -127.0, f32::from(next() as i8).signum() * 127.0, number][signs];
                        });
                    }
                    let mut codes = [Codes::ZERO];
                    round(&numbers, &mut codes);
                    codes[0]
                })
                .collect();
            let mut panel = Box::new(Panel::ZERO);
            let (low, span) = (form.zero(), u16::from(form.span));
            for (row, q) in (0..PANEL).cycle().zip(panel.q.as_flattened_mut().chunks_exact_mut(4)) {
                q.iter_mut().for_each(|q| {
                    let above = match row % 4 {
                        0 => 0,
                        1 => span,
                        2 => u16::from(next() % 2) * span,
                        _ => u16::from(next()) % (span + 1),
                    };
                    *q = low.wrapping_add(above as u8);
                });
            }
            for x in [&mut panel.scales, &mut panel.offsets] {
                x.as_flattened_mut().iter_mut().for_each(|x| *x = f32::from(next()) / 100.0 - 1.0);
            }
            let starts: Vec<*const Codes> = x.iter().map(|codes| &raw const *codes).collect();
            for add in [false, true] {
                let run = |kernel: super::super::IntProduct| {
                    // Two panels, and three numbers that belong to nobody, in a row.
                    let stride = 2 * PANEL + 3;
                    let mut out = vec![0.37; rows * stride];
                    let to = (out.as_mut_ptr(), stride);
                    // SAFETY: `groups` groups at every start; room for the products of both panels.
                    unsafe { kernel(&starts, &[&panel, &panel], to, (groups, form), add, Ahead::NONE) };
                    out.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
                };
                let expected = run(product);
                for kernels in tables() {
                    let found = run(kernels.int_product);
                    assert!(found == expected, "{}: {ty}, {rows} rows, {groups} groups", kernels.variant);
                }
            }
        }
    }
}
