//! Made-up routing traces of a given hit rate, for measuring what a cache costs where real text cannot be had:
//! random weights choose experts evenly, which no cache likes.

use super::{Chosen, Recent};
use crate::layout::Layout;

/// What a trace should be like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likeness {
    /// Share of a token's experts that a cache of the least recently used finds.
    pub hits: f64,
    /// Share of a token's experts that the look-ahead names.
    pub recall: f64,
    /// Experts beyond a token's own that it names.
    pub margin: usize,
    /// Same seed, same trace.
    pub seed: u64,
}

/// Makes one token after the other.
#[derive(Debug)]
pub struct Generator {
    layout: Layout,
    used: usize,
    like: Likeness,
    /// Of each class, what a cache would hold.
    caches: Vec<Recent>,
    random: u64,
}

impl Generator {
    /// For a cache cut as `layout`, which is full at the beginning, and `used` experts of a token.
    pub fn new(layout: Layout, used: usize, like: Likeness) -> Generator {
        let caches = layout.classes.iter().map(|_| Recent::default()).collect();
        let mut this = Generator { layout, used, like, caches, random: like.seed };
        let layers = this.layout.layers.len();
        for expert in 0..this.layout.experts as u32 {
            for layer in 0..layers {
                let class = this.layout.layers[layer].class;
                if this.caches[class].order.len() < this.layout.classes[class].slots {
                    this.touch(layer, expert);
                }
            }
        }
        this
    }

    /// The next token's experts, by layer, ascending.
    pub fn next_token(&mut self) -> Vec<Chosen> {
        (0..self.layout.layers.len())
            .map(|layer| {
                let mut used = Vec::with_capacity(self.used);
                while used.len() < self.used {
                    let expert = self.pick(layer, &used);
                    used.push(expert);
                }
                let mut predicted: Vec<u32> = Vec::new();
                for &expert in &used {
                    if layer > 0 && self.number() < self.like.recall {
                        predicted.push(expert);
                    }
                }
                // What it names in vain is as likely to be there as what it should have named.
                let (named, others) = (predicted.len(), self.layout.experts - used.len());
                let most = (self.used + self.like.margin).min(named + others);
                let mut taken = used.clone();
                while layer > 0 && predicted.len() < most {
                    let expert = self.pick(layer, &taken);
                    taken.push(expert);
                    predicted.push(expert);
                }
                let there = |this: &Generator, expert: &u32| this.is_there(layer, *expert);
                let (hits, misses): (Vec<u32>, Vec<u32>) =
                    used.iter().partition(|expert| there(self, expert));
                hits.iter().chain(&misses).for_each(|&expert| self.touch(layer, expert));
                used.sort_unstable();
                predicted.sort_unstable();
                Chosen { used, predicted }
            })
            .collect()
    }

    fn touch(&mut self, layer: usize, expert: u32) {
        let class = self.layout.layers[layer].class;
        let slots = self.layout.classes[class].slots;
        self.caches[class].touch((layer * self.layout.experts) as u32 + expert, slots);
    }

    fn is_there(&self, layer: usize, expert: u32) -> bool {
        let cache = &self.caches[self.layout.layers[layer].class];
        cache.last.contains_key(&((layer * self.layout.experts) as u32 + expert))
    }

    /// An expert that is not among `taken`: one that is there, with the probability asked for, else one that is not.
    fn pick(&mut self, layer: usize, taken: &[u32]) -> u32 {
        let experts = self.layout.experts as u64;
        let wanted = self.number() < self.like.hits;
        let first = (self.next() % experts) as u32;
        let all = (0..experts as u32).map(|step| (first + step) % experts as u32);
        let free = all.filter(|expert| !taken.contains(expert));
        let mut fallback = None;
        for expert in free {
            if self.is_there(layer, expert) == wanted {
                return expert;
            }
            fallback.get_or_insert(expert);
        }
        fallback.expect("a token does not use every expert and more")
    }

    /// A number from 0 to 1.
    fn number(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The next of a SplitMix64 sequence.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Replacement, Trace, simulate};
    use super::*;
    use crate::layout::{Class, LayerParts, Part};

    /// Six layers of 64 experts in two classes, with slots for a quarter of them.
    fn layout() -> Layout {
        let part = || Part { tensor: String::new(), shard: 0, offset: 0, stride: 1, bytes: 1, at: 0 };
        let layer = |class| LayerParts { class, parts: [part(), part(), part()] };
        let class = |slots, layers| Class { base: 0, slot_bytes: 1, slots, stay: slots, layers };
        Layout {
            experts: 64,
            alignment: 1,
            layers: [0, 0, 1, 0, 1, 0].map(layer).into(),
            classes: vec![class(64, 4), class(32, 2)],
        }
    }

    #[test]
    fn a_trace_has_the_hit_rate_and_the_recall_asked_for() {
        for (hits, recall) in [(0.8, 0.7), (0.5, 1.0), (0.95, 0.0)] {
            let like = Likeness { hits, recall, margin: 3, seed: 7 };
            let mut generator = Generator::new(layout(), 6, like);
            let trace = Trace { tokens: (0..600).map(|_| generator.next_token()).collect() };
            let found = simulate(&trace, &layout(), 100, Replacement::LeastRecent);
            assert!((found.rate() - hits).abs() < 0.02, "{hits}: {}", found.rate());
            assert_eq!(found.wanted, 500 * 6 * 6);
            let (mut named, mut all) = (0, 0);
            for chosen in trace.tokens.iter().flat_map(|layers| &layers[1..]) {
                assert!(chosen.used.windows(2).all(|pair| pair[0] < pair[1]));
                assert_eq!(chosen.predicted.len(), 9);
                named += chosen.used.iter().filter(|expert| chosen.predicted.contains(expert)).count();
                all += chosen.used.len();
            }
            let found = named as f64 / f64::from(all as u32);
            assert!((found - recall).abs() < 0.02, "{recall}: {found}");
        }
    }
}
