//! Products as every compiler can make them.

use std::hint::black_box;

use super::Products;

/// Products of bytes, summed in words: 16 lanes of four products.
pub(super) fn integers() -> Products {
    Products { kernel: dots, operations: 2 * 64 }
}

/// Multiply-adds of 64 independent numbers.
#[cfg_attr(target_arch = "aarch64", allow(dead_code))] // which always has better ones
pub(super) fn numbers() -> Products {
    Products { kernel: multiply_adds, operations: 2 * 64 }
}

fn dots(rounds: u64) -> u64 {
    let a: [i8; 64] = black_box(std::array::from_fn(|i| i as i8));
    let mut b: [i8; 64] = black_box(std::array::from_fn(|i| 3 * i as i8));
    let mut sums = [0i32; 16];
    for _ in 0..rounds {
        b = black_box(b);
        for (lane, sum) in sums.iter_mut().enumerate() {
            for i in 4 * lane..4 * lane + 4 {
                *sum = sum.wrapping_add(i32::from(a[i]) * i32::from(b[i]));
            }
        }
    }
    sums.iter().fold(0, |a, &b| a ^ b as u64)
}

#[cfg_attr(target_arch = "aarch64", allow(dead_code))]
fn multiply_adds(rounds: u64) -> u64 {
    let (a, b) = (black_box(0.999_f32), black_box(1e-3_f32));
    let mut sums: [f32; 64] = black_box(std::array::from_fn(|i| i as f32));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * a + b;
        }
    }
    u64::from(sums.iter().sum::<f32>().to_bits())
}

/// Streams read side by side: one alone does not keep enough lines on their way.
const STREAMS: usize = 4;

/// The sum of all numbers, which should be whole lines of every stream.
pub(super) fn sum(numbers: &[u64]) -> u64 {
    streams(numbers, |_| ())
}

/// As [`sum`]; `ahead` hears the lines that will be read soon.
#[inline(always)]
pub(super) fn streams(numbers: &[u64], ahead: impl Fn(*const u64)) -> u64 {
    /// Lines from a prefetch to its use.
    const DISTANCE: usize = 16;
    let len = numbers.len() / STREAMS;
    let streams: [&[[u64; 8]]; STREAMS] =
        std::array::from_fn(|stream| numbers[stream * len..(stream + 1) * len].as_chunks().0);
    let mut sums = [[0u64; 8]; STREAMS];
    for line in 0..streams[0].len() {
        for (sums, stream) in sums.iter_mut().zip(&streams) {
            ahead(stream[line].as_ptr().wrapping_add(8 * DISTANCE));
            for (sum, number) in sums.iter_mut().zip(&stream[line]) {
                *sum = sum.wrapping_add(*number);
            }
        }
    }
    sums.iter().flatten().fold(0, |a: u64, b| a.wrapping_add(*b))
}
