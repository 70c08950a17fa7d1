//! What caches of different sizes and policies would have found, from a recorded routing trace.

mod generate;

use std::collections::{BTreeSet, HashMap};

use crate::layout::Layout;
pub use generate::{Generator, Likeness};

/// Which experts each token chose, and which the look-ahead named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Tokens in the order they were computed; of each, by layer.
    pub tokens: Vec<Vec<Chosen>>,
}

/// A token in a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Experts it used.
    pub used: Vec<u32>,
    /// Experts that were named before, while the layer before it computed; none where nobody was asked.
    pub predicted: Vec<u32>,
}

/// How a cache decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The least recently used expert goes; experts are read when they are missing.
    LeastRecent,
    /// As the store does it: also what the look-ahead names is read, before it is needed.
    LookAhead,
    /// The expert needed again last goes: nobody can do better without reading ahead, and nobody knows.
    Clairvoyant,
}

/// What a policy found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Experts that tokens used.
    pub wanted: u64,
    /// Of these, how many were there or on their way.
    pub found: u64,
    /// Experts read.
    pub loads: u64,
}

impl Found {
    /// Share of the wanted experts that were found.
    pub fn rate(&self) -> f64 {
        self.found as f64 / self.wanted.max(1) as f64
    }
}

/// Replays `trace` through a cache cut as `layout`. The first `warm` tokens fill it and are not counted.
pub fn simulate(trace: &Trace, layout: &Layout, warm: usize, policy: Replacement) -> Found {
    (0..layout.classes.len()).fold(Found::default(), |sum, class| {
        let accesses = accesses(trace, layout, class);
        let slots = layout.classes[class].slots;
        let found = match policy {
            Replacement::Clairvoyant => clairvoyant(&accesses, slots, warm),
            _ => recent(&accesses, slots, warm, policy == Replacement::LookAhead),
        };
        Found {
            wanted: sum.wanted + found.wanted,
            found: sum.found + found.found,
            loads: sum.loads + found.loads,
        }
    })
}

/// What a layer of a class asks for: the token, keys it uses, keys named for the next layer of the class.
struct Access {
    token: usize,
    used: Vec<u32>,
    predicted: Vec<u32>,
}

/// The accesses of a class of slots, in order.
fn accesses(trace: &Trace, layout: &Layout, class: usize) -> Vec<Access> {
    let mut list: Vec<Access> = Vec::new();
    for (token, layers) in trace.tokens.iter().enumerate() {
        for (layer, chosen) in layers.iter().enumerate() {
            if layout.layers[layer].class != class {
                continue;
            }
            let keys = |experts: &[u32]| -> Vec<u32> {
                experts.iter().map(|&expert| (layer * layout.experts) as u32 + expert).collect()
            };
            // Named while the layer before computes, after it had what it needs.
            if let Some(before) = list.last_mut().filter(|before| before.token == token) {
                before.predicted = keys(&chosen.predicted);
            }
            list.push(Access { token, used: keys(&chosen.used), predicted: Vec::new() });
        }
    }
    list
}

/// Keys in the order of their last use.
#[derive(Debug, Default)]
struct Recent {
    time: u64,
    last: HashMap<u32, u64>,
    order: BTreeSet<(u64, u32)>,
}

impl Recent {
    /// Makes a key the most recent; true if it was there.
    fn touch(&mut self, key: u32, slots: usize) -> bool {
        self.time += 1;
        let known = self.last.insert(key, self.time);
        if let Some(before) = known {
            self.order.remove(&(before, key));
        } else if self.order.len() >= slots
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.last.remove(&oldest);
        }
        self.order.insert((self.time, key));
        known.is_some()
    }
}

fn recent(accesses: &[Access], slots: usize, warm: usize, ahead: bool) -> Found {
    let (mut cache, mut found) = (Recent::default(), Found::default());
    for access in accesses {
        let counts = access.token >= warm;
        // What is there is kept before anything goes.
        let (there, missing): (Vec<u32>, Vec<u32>) =
            access.used.iter().partition(|key| cache.last.contains_key(key));
        for &key in there.iter().chain(&missing) {
            let hit = cache.touch(key, slots);
            found.wanted += u64::from(counts);
            found.found += u64::from(counts && hit);
            found.loads += u64::from(counts && !hit);
        }
        for &key in access.predicted.iter().filter(|_| ahead) {
            if !cache.last.contains_key(&key) {
                cache.touch(key, slots);
                found.loads += u64::from(counts);
            }
        }
    }
    found
}

fn clairvoyant(accesses: &[Access], slots: usize, warm: usize) -> Found {
    // When each use is followed by another of the same key, from behind.
    let mut next: HashMap<u32, usize> = HashMap::new();
    let mut after: Vec<Vec<usize>> = Vec::with_capacity(accesses.len());
    for (time, access) in accesses.iter().enumerate().rev() {
        after.push(access.used.iter().map(|&key| next.insert(key, time).unwrap_or(usize::MAX)).collect());
    }
    let (mut cache, mut order) = (HashMap::new(), BTreeSet::new());
    let mut found = Found::default();
    for (access, after) in accesses.iter().zip(after.iter().rev()) {
        let counts = access.token >= warm;
        for (&key, &again) in access.used.iter().zip(after) {
            let hit = match cache.insert(key, again) {
                Some(before) => order.remove(&(before, key)),
                None => false,
            };
            order.insert((again, key));
            if order.len() > slots
                && let Some((_, last)) = order.pop_last()
            {
                cache.remove(&last);
            }
            found.wanted += u64::from(counts);
            found.found += u64::from(counts && hit);
            found.loads += u64::from(counts && !hit);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One layer, one expert a token.
    fn accesses(keys: &[u32]) -> Vec<Access> {
        let one = |(token, &key): (usize, &u32)| Access { token, used: vec![key], predicted: Vec::new() };
        keys.iter().enumerate().map(one).collect()
    }

    #[test]
    fn the_textbook_example() {
        // Three slots: seven loads at least, ten for the least recent.
        let list = accesses(&[1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]);
        assert_eq!(clairvoyant(&list, 3, 0), Found { wanted: 12, found: 5, loads: 7 });
        assert_eq!(recent(&list, 3, 0, false), Found { wanted: 12, found: 2, loads: 10 });
        assert_eq!(recent(&list, 5, 0, false).loads, 5, "everything once");
        assert_eq!(clairvoyant(&list, 5, 5), Found { wanted: 7, found: 6, loads: 1 }, "only what is new");
    }

    #[test]
    fn a_cyclic_scan_defeats_the_least_recent() {
        let keys: Vec<u32> = (0..5).cycle().take(50).collect();
        let list = accesses(&keys);
        assert_eq!(recent(&list, 4, 0, false).found, 0);
        assert!(clairvoyant(&list, 4, 0).found >= 30);
    }

    #[test]
    fn what_is_named_in_time_is_found() {
        let two = |token, used: u32, predicted: &[u32]| Access {
            token,
            used: vec![used],
            predicted: predicted.to_vec(),
        };
        let list = [two(0, 1, &[7, 8]), two(0, 7, &[]), two(1, 2, &[9]), two(1, 8, &[])];
        assert_eq!(recent(&list, 10, 0, true), Found { wanted: 4, found: 2, loads: 5 });
        assert_eq!(recent(&list, 10, 0, false), Found { wanted: 4, found: 0, loads: 4 });
        // Two slots: 8 is gone before it is used.
        assert_eq!(recent(&list, 2, 0, true).found, 1);
    }
}
