//! The scale of a super-block and the small integers that multiply it for each sub-block.
//!
//! Every sub-block has a scale it would choose if it were free. The format stores one `f16` for all and a
//! level of 3 to 8 bits for each. A few values of the `f16` are tried; for each of them every sub-block takes
//! the level that costs least *after* its codes are chosen anew; the best is refitted by least squares until
//! that stops helping.

use std::ops::Range;

use half::f16;

use super::block::Block;

/// Passes of least squares after the best start is known.
const REFITS: usize = 4;

/// A sub-block with its codes chosen for one scale.
#[derive(Clone, Copy)]
pub(super) struct Fit {
    /// Weighted squared error, up to a constant of the sub-block.
    pub(super) cost: f32,
    /// Σ w·x·code.
    pub(super) xq: f32,
    /// Σ w·code².
    pub(super) qq: f32,
}

impl Fit {
    /// A sub-block of no weights.
    pub(super) const NOTHING: Self = Self { cost: 0.0, xq: 0.0, qq: 0.0 };

    /// The scale that suits the codes best; `s` where no code is other than zero.
    pub(super) fn refit(&self, s: f32) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { s }
    }
}

impl std::ops::Add for Fit {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { cost: self.cost + other.cost, xq: self.xq + other.xq, qq: self.qq + other.qq }
    }
}

/// What was chosen for a super-block of `S` sub-blocks.
#[derive(Clone)]
pub(super) struct Levels<const S: usize> {
    /// The scale as stored.
    pub(super) stored: f16,
    /// What the stored scale stands for, in units of the block.
    pub(super) d: f32,
    /// For each sub-block an index into the multipliers of the format.
    pub(super) index: [usize; S],
    cost: f32,
    /// The scale that suits the chosen levels and codes best.
    refit: f32,
}

/// How a format multiplies the scale of its super-block, and what is worth trying.
pub(super) struct Plan<'a> {
    /// What the levels multiply the scale by, ascending.
    pub(super) multipliers: &'a [f32],
    /// First tries of the scale: the largest free scale divided by these.
    pub(super) divisors: &'a [f32],
    /// Levels tried on either side of the free scale.
    pub(super) reach: usize,
}

/// Chooses scale and levels. `free` are the scales the sub-blocks would take; `fit(j, s)` is sub-block `j`
/// with its codes chosen for the scale `s`.
pub(super) fn choose<const N: usize, const S: usize>(
    block: &Block<N>,
    plan: &Plan<'_>,
    free: &[f32; S],
    fit: impl Fn(usize, f32) -> Fit,
) -> Levels<S> {
    let largest = free.iter().fold(0.0f32, |m, &s| if s.abs() > m.abs() { s } else { m });
    let at = |d: f32| {
        let (stored, d) = block.stored(d);
        levels_at(plan, free, stored, d, &fit)
    };
    let mut best = at(largest / plan.divisors[0]);
    for divisor in &plan.divisors[1..] {
        let next = at(largest / divisor);
        if next.cost < best.cost {
            best = next;
        }
    }
    for _ in 0..REFITS {
        let next = at(best.refit);
        if next.stored == best.stored || next.cost >= best.cost {
            break;
        }
        best = next;
    }
    best
}

/// The best level of every sub-block for one scale.
fn levels_at<const S: usize>(
    plan: &Plan<'_>,
    free: &[f32; S],
    stored: f16,
    d: f32,
    fit: &impl Fn(usize, f32) -> Fit,
) -> Levels<S> {
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let (mut index, mut cost, mut xq, mut qq) = ([0; S], 0.0, 0.0, 0.0);
    for (j, index) in index.iter_mut().enumerate() {
        let wanted = free[j] * inverse;
        let above = plan.multipliers.partition_point(|&m| m < wanted);
        let from = above.saturating_sub(plan.reach).min(plan.multipliers.len() - 1);
        let to = (above + plan.reach).clamp(from + 1, plan.multipliers.len());
        let mut best = Fit { cost: f32::INFINITY, xq: 0.0, qq: 0.0 };
        for (i, &multiplier) in plan.multipliers.iter().enumerate().take(to).skip(from) {
            let next = fit(j, d * multiplier);
            if next.cost < best.cost {
                (best, *index) = (next, i);
            }
        }
        let multiplier = plan.multipliers[*index];
        cost += best.cost;
        xq += multiplier * best.xq;
        qq += multiplier * multiplier * best.qq;
    }
    let sums = Fit { cost, xq, qq };
    Levels { stored, d, index, cost, refit: sums.refit(d) }
}

/// The scale that serves a sub-block best: the best of a geometric range, refitted by least squares.
pub(super) fn free_scale(range: &Range<f32>, fit: impl Fn(f32) -> Fit) -> f32 {
    const STEP: f32 = 0.93;

    let better = |a: (f32, Fit), b: (f32, Fit)| if b.1.cost < a.1.cost { b } else { a };
    let at = |s: f32| (s, fit(s));
    let steps = std::iter::successors(Some(range.end), |s| Some(s * STEP)).take_while(|&s| s > range.start);
    let mut best = steps.map(at).fold(at(range.start), better);
    for _ in 0..2 {
        best = better(best, at(best.1.refit(best.0)));
    }
    best.0
}

/// `N` multipliers `from`, `from + 1`, …
pub(super) const fn whole<const N: usize>(from: i32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    while i < N {
        values[i] = (from + i as i32) as f32;
        i += 1;
    }
    values
}

/// `N` divisors from `from` on, `step` apart.
pub(super) const fn spaced<const N: usize>(from: f32, step: f32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    while i < N {
        values[i] = from + step * i as f32;
        i += 1;
    }
    values
}
