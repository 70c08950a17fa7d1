//! Threads with kernels and scratch: what every stage works with.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Pieces of a member's share, at most.
const PIECES: usize = 4;

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
        self.split_costs(&[(units, 1)], 1, |_, range, scratch| job(range, scratch));
    }

    /// Cuts groups of units, given as (units, cost of each), so that every member has about the same cost.
    /// `job` hears the group and a range of its units.
    ///
    /// A member's share is several pieces, of about `least` units or more; who is done early takes pieces from
    /// the end of another's share, since cores are not equally fast and not always there.
    pub(crate) fn split_costs(
        &mut self,
        groups: &[(usize, u64)],
        least: usize,
        job: impl Fn(usize, Range<usize>, &mut Scratch) + Sync,
    ) {
        let units = groups.iter().map(|group| group.0).sum::<usize>();
        if units <= 1 {
            let scratch = self.scratch[0].get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some(group) = groups.iter().position(|group| group.0 == 1) {
                job(group, 0..1, scratch);
            }
            return;
        }
        let threads = self.threads();
        let each = (units / (threads * least)).clamp(1, PIECES);
        let shares: Vec<Pieces> = (0..threads).map(|member| Pieces::new(member * each, each)).collect();
        self.run(|member, scratch| {
            let own = std::iter::from_fn(|| shares[member].first());
            let others = (1..threads).map(|next| &shares[(member + next) % threads]);
            let theirs = others.flat_map(|share| std::iter::from_fn(|| share.last()));
            for piece in own.chain(theirs) {
                for (group, range) in share(groups, piece, threads * each) {
                    job(group, range, scratch);
                }
            }
        });
    }
}

/// Pieces of a share that nobody has taken yet: the first one, and the one behind the last.
struct Pieces(AtomicU64);

impl Pieces {
    fn new(first: usize, count: usize) -> Pieces {
        Pieces(AtomicU64::new((first as u64) << 32 | (first + count) as u64))
    }

    /// Takes the first one.
    fn first(&self) -> Option<usize> {
        self.take(|first, end| (first, (first + 1, end)))
    }

    /// Takes the last one.
    fn last(&self) -> Option<usize> {
        self.take(|first, end| (end - 1, (first, end - 1)))
    }

    fn take(&self, choose: impl Fn(u64, u64) -> (u64, (u64, u64))) -> Option<usize> {
        let split = |both: u64| (both >> 32, both & u64::from(u32::MAX));
        let some = |(first, end): (u64, u64)| (first < end).then(|| choose(first, end));
        // Pieces are handed out once; what they are about is ordered by the start and the end of the region.
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |both| {
            some(split(both)).map(|(_, (first, end))| first << 32 | end)
        });
        before.ok().and_then(|both| some(split(both))).map(|(piece, _)| piece as usize)
    }
}

/// The units of a piece: those whose cost begins in its part of the total.
fn share(
    groups: &[(usize, u64)],
    piece: usize,
    pieces: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let total: u64 = groups.iter().map(|&(units, cost)| units as u64 * cost).sum();
    let pieces = pieces as u64;
    let (low, high) = (piece as u64 * total, (piece as u64 + 1) * total);
    let mut before = 0;
    groups.iter().enumerate().filter_map(move |(group, &(units, cost))| {
        let first = |bound: u64| {
            let from = bound.saturating_sub(before * pieces).div_ceil((cost * pieces).max(1));
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
    fn pieces_are_handed_out_once_whoever_takes_them() {
        let mut team = Team::new(Pool::new(3, false).unwrap(), Kernels::choose(None).unwrap(), false);
        for units in [0, 1, 2, 3, 11, 12, 13, 100, 1000] {
            for least in [1, 8, 64] {
                let seen: Vec<AtomicU64> = (0..units).map(|_| AtomicU64::new(0)).collect();
                let groups = [(units / 3, 5), (0, 1), (units - units / 3, 2)];
                let taken = AtomicU64::new(0);
                team.split_costs(&groups, least, |group, range, _| {
                    let first = if group == 0 { 0 } else { units / 3 };
                    taken.fetch_add(range.len() as u64, Ordering::Relaxed);
                    range.for_each(|unit| {
                        seen[first + unit].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{units} {least}");
                assert_eq!(taken.into_inner(), units as u64);
            }
        }
        let pieces = Pieces::new(5, 4);
        let order =
            [pieces.first(), pieces.last(), pieces.first(), pieces.last(), pieces.last(), pieces.first()];
        assert_eq!(order, [Some(5), Some(8), Some(6), Some(7), None, None]);
    }

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
