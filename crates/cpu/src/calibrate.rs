//! What this machine can do at most, measured: products of integers, products of numbers, reading memory.
//!
//! Each kernel does nothing else: products come from registers, reads are of memory no cache holds. The best of
//! several short runs counts, since a peak is what nothing disturbed.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use model::{Peak, Peaks};

#[cfg(target_arch = "aarch64")]
use neon as best;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
use portable as best;
#[cfg(target_arch = "x86_64")]
use x86 as best;

use crate::memory::Out;
use crate::team::Team;

/// Does some rounds of products from registers; the result is of no interest, but depends on all of them.
type Kernel = fn(rounds: u64) -> u64;

/// A kernel and how many operations a round of it does; an addition and a multiplication are two.
struct Products {
    kernel: Kernel,
    operations: u64,
}

/// Time of a run of products: long beside the start of a region, short beside the patience of users.
const RUN: Duration = Duration::from_millis(12);

/// Runs of a kernel in a row, and how often its turn comes; the best one counts.
const RUNS: usize = 3;
const ROUNDS: usize = 3;

/// Bytes read: more than any last cache in use.
const BYTES: usize = 512 << 20;

/// Passes over them in a row.
const PASSES: usize = 2;

/// Peaks of one member, then those of the whole team. A team that does not round activations multiplies
/// quantised weights as numbers.
pub(crate) fn peaks(team: &mut Team) -> Vec<Peaks> {
    let mut counts = vec![1, team.threads()];
    counts.dedup();
    // Written once, or all of it would be the same page of zeros.
    let mut memory = vec![0u64; BYTES / 8];
    let (out, threads) = (Out::new(&mut memory, 1), team.threads());
    team.run(|member, _| {
        let (first, len) = part(BYTES / 8, member, threads);
        // SAFETY: parts of members do not meet.
        unsafe { out.part(first, 0, len) }.fill(1);
    });
    let one = |workers: usize| {
        let (mut integers, mut numbers, mut bytes) = (0.0_f64, 0.0_f64, 0.0_f64);
        // In turn, so that a disturbance does not hit all runs of one kernel.
        for _ in 0..ROUNDS {
            bytes = bytes.max(bandwidth(team, workers, &memory));
            numbers = numbers.max(rate(team, workers, &best::numbers()));
            if !team.exact {
                integers = integers.max(rate(team, workers, &best::integers()));
            }
        }
        let plain = Peak { unit: "f32", rate: numbers };
        let quantised = if team.exact { plain } else { Peak { unit: "int8", rate: integers } };
        Peaks { workers, quantised, plain, bytes, link: None }
    };
    counts.into_iter().map(one).collect()
}

/// First element and length of a member's part.
fn part(len: usize, member: usize, members: usize) -> (usize, usize) {
    let first = |member: usize| len * member / members;
    (first(member), first(member + 1) - first(member))
}

/// Seconds of one region in which the first `workers` members do `job`.
fn seconds(team: &mut Team, workers: usize, job: impl Fn(usize) -> u64 + Sync) -> f64 {
    let sink = AtomicU64::new(0);
    let began = Instant::now();
    team.run(|member, _| {
        if member < workers {
            sink.fetch_add(job(member), Ordering::Relaxed);
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    std::hint::black_box(sink.into_inner());
    seconds
}

/// Operations a second of `workers` members together.
fn rate(team: &mut Team, workers: usize, products: &Products) -> f64 {
    let run = |team: &mut Team, rounds: u64| seconds(team, workers, |_| (products.kernel)(rounds));
    // Also wakes the members and the wide units.
    let mut rounds = 1 << 14;
    while run(team, rounds) < RUN.as_secs_f64() / 2.0 {
        rounds *= 2;
    }
    let best = (0..RUNS).map(|_| run(team, rounds)).fold(f64::INFINITY, f64::min);
    (workers as u64 * rounds * products.operations) as f64 / best
}

/// Bytes a second that `workers` members read.
fn bandwidth(team: &mut Team, workers: usize, memory: &[u64]) -> f64 {
    let read = |member: usize| {
        let (first, len) = part(memory.len(), member, workers);
        best::sum(&memory[first..first + len])
    };
    let best = (0..PASSES).map(|_| seconds(team, workers, read)).fold(f64::INFINITY, f64::min);
    size_of_val(memory) as f64 / best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Kernels;
    use crate::pool::Pool;

    #[test]
    fn every_number_is_read() {
        for len in [0, 32, 64, 4096, 4128] {
            let numbers: Vec<u64> = (0..len).collect();
            assert_eq!(best::sum(&numbers), (0..len).sum::<u64>(), "{len}");
            assert_eq!(portable::sum(&numbers), (0..len).sum::<u64>(), "{len}");
        }
    }

    #[test]
    fn members_share_all_of_the_memory() {
        for members in [1, 2, 3, 7] {
            let parts: Vec<_> = (0..members).map(|member| part(1000, member, members)).collect();
            assert_eq!(parts.iter().map(|part| part.1).sum::<usize>(), 1000);
            assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0));
        }
    }

    #[test]
    fn rates_are_of_this_world() {
        let kernels = Kernels::choose(None).unwrap();
        let mut team = Team::new(Pool::new(1, false).unwrap(), kernels, false);
        for products in [best::integers(), best::numbers(), portable::integers(), portable::numbers()] {
            let rate = rate(&mut team, 1, &products);
            assert!((1e8..1e14).contains(&rate), "{rate:e}");
        }
    }
}
