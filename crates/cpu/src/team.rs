//! Threads with kernels and scratch: what every stage works with.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::kernels::{Kernels, Panel};
use crate::memory::Aligned;
use crate::pool::Pool;

/// What one thread works in. Its contents mean nothing between regions.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Decoded weights of the panels at hand.
    pub(crate) panel: Aligned,
    /// The same as integers.
    pub(crate) panels: Vec<Panel>,
    /// Products of the rows at hand.
    pub(crate) tile: Aligned,
    /// Whatever a mixer needs.
    pub(crate) work: Aligned,
}

/// The threads of a backend.
pub(crate) struct Team {
    pool: Pool,
    scratch: Vec<Mutex<Scratch>>,
    /// The kernels of this machine.
    pub(crate) kernels: &'static Kernels,
    /// Whether activations are never rounded.
    pub(crate) exact: bool,
}

impl Team {
    /// A team on a pool.
    pub(crate) fn new(pool: Pool, kernels: &'static Kernels, exact: bool) -> Team {
        let scratch = (0..pool.threads()).map(|_| Mutex::default()).collect();
        Team { pool, scratch, kernels, exact }
    }

    /// Members.
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Calls `job` with each member's number and scratch.
    pub(crate) fn run(&mut self, job: impl Fn(usize, &mut Scratch) + Sync) {
        let scratch = &self.scratch;
        self.pool
            .run(&|member| job(member, &mut scratch[member].lock().unwrap_or_else(PoisonError::into_inner)));
    }

    /// Cuts `units` of equal cost into one range a member. A single unit is done without waking anybody.
    pub(crate) fn split(&mut self, units: usize, job: impl Fn(Range<usize>, &mut Scratch) + Sync) {
        self.split_costs(&[(units, 1)], |_, range, scratch| job(range, scratch));
    }

    /// Cuts groups of units, given as (units, cost of each), so that every member has about the same cost.
    /// `job` hears the group and a range of its units.
    pub(crate) fn split_costs(
        &mut self,
        groups: &[(usize, u64)],
        job: impl Fn(usize, Range<usize>, &mut Scratch) + Sync,
    ) {
        if groups.iter().map(|group| group.0).sum::<usize>() <= 1 {
            let scratch = self.scratch[0].get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some(group) = groups.iter().position(|group| group.0 == 1) {
                job(group, 0..1, scratch);
            }
            return;
        }
        let threads = self.threads();
        self.run(|member, scratch| {
            for (group, range) in share(groups, member, threads) {
                job(group, range, scratch);
            }
        });
    }
}

/// The units of `member`: those whose cost begins in its part of the total.
fn share(
    groups: &[(usize, u64)],
    member: usize,
    threads: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let total: u64 = groups.iter().map(|&(units, cost)| units as u64 * cost).sum();
    let threads = threads as u64;
    let (low, high) = (member as u64 * total, (member as u64 + 1) * total);
    let mut before = 0;
    groups.iter().enumerate().filter_map(move |(group, &(units, cost))| {
        let first = |bound: u64| {
            let from = bound.saturating_sub(before * threads).div_ceil((cost * threads).max(1));
            from.min(units as u64) as usize
        };
        let range = first(low)..first(high);
        before += units as u64 * cost;
        (!range.is_empty()).then_some((group, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_unit_once_and_are_fair() {
        for groups in [vec![(1, 7)], vec![(100, 1)], vec![(3, 10), (0, 5), (50, 2), (1, 400), (7, 1)]] {
            for threads in [1, 2, 3, 7, 64] {
                let mut seen: Vec<Vec<usize>> = groups.iter().map(|&(units, _)| vec![0; units]).collect();
                let total: u64 = groups.iter().map(|&(units, cost)| units as u64 * cost).sum();
                let largest = groups.iter().map(|group| group.1).max().unwrap();
                for member in 0..threads {
                    let mut cost = 0;
                    for (group, range) in share(&groups, member, threads) {
                        cost += range.len() as u64 * groups[group].1;
                        range.for_each(|unit| seen[group][unit] += 1);
                    }
                    assert!(
                        cost <= total.div_ceil(threads as u64) + largest,
                        "{groups:?} {threads} {member}"
                    );
                }
                assert!(seen.iter().flatten().all(|&count| count == 1), "{groups:?} {threads}");
            }
        }
    }
}
