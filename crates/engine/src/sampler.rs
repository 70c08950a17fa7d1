//! Choosing the next token: constraint → penalties → top-k → top-p → min-p → temperature.

use std::collections::HashMap;

use model::Candidate;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::constraint::TokenMask;
use crate::error::{Error, Result};
use crate::logits::{Logits, Needed, largest};

/// Settings of a sampler. The defaults are those the model family's authors recommend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token (ties to the lowest id).
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens less likely than this share of the most likely one; 0 drops none.
    pub min_p: f32,
    /// Subtracted from the logit of every token generated before.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it was generated before.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens generated before; 1 does nothing.
    pub repeat_penalty: f32,
    /// Same seed, same choices.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.8,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_penalty: 1.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// The most likely token, always.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// [`Error::Setting`] naming the first one outside its range.
    pub fn check(&self) -> Result<()> {
        let within = |name, value: f32, low: f32, high: f32, expected| {
            let ok = value.is_finite() && (low..=high).contains(&value);
            if ok { Ok(()) } else { Err(Error::Setting { name, found: value.to_string(), expected }) }
        };
        within("temperature", self.temperature, 0.0, 100.0, "a number from 0 to 100")?;
        within("top-p", self.top_p, f32::MIN_POSITIVE, 1.0, "a number above 0, up to 1")?;
        within("min-p", self.min_p, 0.0, 1.0, "a number from 0 to 1")?;
        within("presence-penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")?;
        within("frequency-penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")?;
        within("repeat-penalty", self.repeat_penalty, f32::MIN_POSITIVE, 100.0, "a number above 0")
    }

    /// Whether a choice depends on those before it.
    fn penalises(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repeat_penalty != 1.0
    }

    /// Whether penalties, if there are any, make no token likelier.
    fn never_raises(&self) -> bool {
        self.presence_penalty >= 0.0 && self.frequency_penalty >= 0.0 && self.repeat_penalty >= 1.0
    }

    /// The logit of a token that was chosen `count` times.
    fn penalised(&self, logit: f32, count: u32) -> f32 {
        let scaled = if logit > 0.0 { logit / self.repeat_penalty } else { logit * self.repeat_penalty };
        let less = self.presence_penalty + self.frequency_penalty * count as f32;
        // Only what a mask forbids is infinite.
        (scaled - less).clamp(f32::MIN, f32::MAX)
    }
}

/// Chooses tokens, remembering those it chose.
#[derive(Clone, Debug)]
pub struct Sampler {
    settings: Sampling,
    random: ChaCha8Rng,
    counts: HashMap<u32, u32>,
    candidates: Vec<Candidate>,
    /// Logits as penalties and constraint leave them.
    changed: Vec<f32>,
}

impl Sampler {
    /// A sampler that has chosen nothing yet.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn new(settings: Sampling) -> Result<Sampler> {
        settings.check()?;
        let random = ChaCha8Rng::seed_from_u64(settings.seed);
        Ok(Sampler { settings, random, counts: HashMap::new(), candidates: Vec::new(), changed: Vec::new() })
    }

    /// What of the logits the next choice depends on.
    pub fn needed(&self) -> Needed {
        // Each token that penalties may push down makes room for another.
        let pushed = if self.settings.penalises() { self.counts.len() } else { 0 };
        match self.kept() {
            Some(count) if self.settings.never_raises() => Needed::Largest(count + pushed),
            _ => Needed::All,
        }
    }

    /// How many of the largest logits, after penalties, a choice depends on; `None`: on all.
    fn kept(&self) -> Option<usize> {
        let Sampling { temperature, top_k, .. } = self.settings;
        if temperature == 0.0 { Some(1) } else { (top_k > 0).then_some(top_k) }
    }

    /// Chooses a token. `logits` are finite, one a token id.
    ///
    /// # Panics
    /// If there are no logits.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        self.choose_of_all(logits, None).expect("a vocabulary is not empty")
    }

    /// As [`Sampler::choose`], among the tokens of `mask`; `None` if there are none.
    pub fn choose_among(&mut self, logits: &[f32], mask: &TokenMask) -> Option<u32> {
        self.choose_of_all(logits, Some(mask))
    }

    /// As [`Sampler::choose`], from what was [`needed`](Sampler::needed) of the logits, or more.
    ///
    /// # Panics
    /// If there are none.
    pub fn choose_from(&mut self, logits: &Logits) -> u32 {
        match logits {
            Logits::All(logits) => self.choose(logits),
            Logits::Largest(candidates) => {
                self.candidates.clone_from(candidates);
                self.decide_penalised()
            }
        }
    }

    fn choose_of_all(&mut self, logits: &[f32], mask: Option<&TokenMask>) -> Option<u32> {
        if let (None, Needed::Largest(count)) = (mask, self.needed()) {
            largest(logits, count, &mut self.candidates);
            return (!self.candidates.is_empty()).then(|| self.decide_penalised());
        }
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        changed.extend_from_slice(logits);
        for (&id, &count) in &self.counts {
            if let Some(logit) = changed.get_mut(id as usize) {
                *logit = self.settings.penalised(*logit, count);
            }
        }
        mask.inspect(|mask| mask.forbid(&mut changed));
        largest(&changed, self.kept().unwrap_or(usize::MAX), &mut self.candidates);
        self.changed = changed;
        (!self.candidates.is_empty()).then(|| self.decide())
    }

    /// Chooses one of the candidates, whose logits are what the model said.
    fn decide_penalised(&mut self) -> u32 {
        if self.settings.penalises() {
            for Candidate { id, logit } in &mut self.candidates {
                if let Some(&count) = self.counts.get(id) {
                    *logit = self.settings.penalised(*logit, count);
                }
            }
        }
        self.decide()
    }

    /// Chooses one of the candidates, whose logits are what they are after penalties.
    fn decide(&mut self) -> u32 {
        let id = if self.settings.temperature == 0.0 { self.greedy() } else { self.draw() };
        *self.counts.entry(id).or_insert(0) += 1;
        id
    }

    fn greedy(&self) -> u32 {
        let better = |a: Candidate, b: Candidate| {
            if b.logit > a.logit || (b.logit == a.logit && b.id < a.id) { b } else { a }
        };
        self.candidates.iter().copied().reduce(better).expect("a vocabulary is not empty").id
    }

    fn draw(&mut self) -> u32 {
        self.keep_top_k();
        let weights = self.keep_probable();
        // Temperature comes last: it reshapes what the filters kept.
        let top = self.candidates[0].logit;
        let temperature = f64::from(self.settings.temperature);
        let mut sum = 0.0;
        let sums: Vec<f64> = (self.candidates.iter().take(weights))
            .map(|c| {
                sum += (f64::from(c.logit - top) / temperature).exp();
                sum
            })
            .collect();
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let drawn = sums.partition_point(|&s| s <= unit * sum).min(weights - 1);
        self.candidates[drawn].id
    }

    /// Sorts the candidates by falling logit (ties by id) and keeps `top_k` of them.
    fn keep_top_k(&mut self) {
        let order = |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id));
        let k = self.settings.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, order);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(order);
    }

    /// How many of the sorted candidates pass top-p and min-p; at least one.
    fn keep_probable(&self) -> usize {
        let top = self.candidates[0].logit;
        let weight = |c: &Candidate| f64::from(c.logit - top).exp();
        let total: f64 = self.candidates.iter().map(weight).sum();
        let mut sum = 0.0;
        let mut kept = 0;
        for candidate in &self.candidates {
            let share = weight(candidate);
            let improbable = share < f64::from(self.settings.min_p);
            if kept > 0 && (improbable || sum >= f64::from(self.settings.top_p) * total) {
                break;
            }
            sum += share;
            kept += 1;
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(settings: Sampling, logits: &[f32], draws: usize) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for seed in 0..draws as u64 {
            let mut sampler = Sampler::new(Sampling { seed, ..settings }).unwrap();
            counts[sampler.choose(logits) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
        let e: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|x| x / sum).collect()
    }

    const LOGITS: [f32; 6] = [1.0, 2.5, -1.0, 2.0, 0.0, 2.5];
    const OPEN: Sampling = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repeat_penalty: 1.0,
        seed: 0,
    };

    #[test]
    fn greedy_breaks_ties_to_the_lowest_id() {
        let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
        assert_eq!(sampler.choose(&LOGITS), 1);
        let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
        assert_eq!(sampler.choose(&[3.0; 5]), 0);
        assert_eq!(sampler.choose(&[-3.0]), 0);
    }

    #[test]
    fn draws_follow_the_softmax() {
        for temperature in [0.5, 1.0, 2.0] {
            let seen = histogram(Sampling { temperature, ..OPEN }, &LOGITS, 20_000);
            let expected = softmax(&LOGITS, temperature.into());
            for (s, e) in seen.iter().zip(&expected) {
                assert!((s - e).abs() < 0.015, "{seen:?} {expected:?}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let alive = |settings| -> Vec<usize> {
            let seen = histogram(settings, &LOGITS, 4000);
            (0..seen.len()).filter(|&i| seen[i] > 0.0).collect()
        };
        assert_eq!(alive(Sampling { top_k: 1, ..OPEN }), [1]);
        assert_eq!(alive(Sampling { top_k: 2, ..OPEN }), [1, 5]);
        assert_eq!(alive(Sampling { top_k: 3, ..OPEN }), [1, 3, 5]);
        // Shares: 0.340 (1), 0.340 (5), 0.206 (3), 0.076 (0) …
        assert_eq!(alive(Sampling { top_p: 0.3, ..OPEN }), [1]);
        assert_eq!(alive(Sampling { top_p: 0.6, ..OPEN }), [1, 5]);
        assert_eq!(alive(Sampling { top_p: 0.72, ..OPEN }), [1, 3, 5]);
        assert_eq!(alive(Sampling { min_p: 0.6, ..OPEN }), [1, 3, 5], "exp(-0.5) = 0.607");
        assert_eq!(alive(Sampling { min_p: 0.61, ..OPEN }), [1, 5]);
        assert_eq!(alive(Sampling { min_p: 1.0, ..OPEN }), [1, 5]);
    }

    #[test]
    fn penalties_push_repeated_tokens_down() {
        let choices = |settings: Sampling| {
            let mut sampler = Sampler::new(Sampling { temperature: 0.0, ..settings }).unwrap();
            (0..4).map(|_| sampler.choose(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(choices(OPEN), [1, 1, 1, 1]);
        assert_eq!(choices(Sampling { presence_penalty: 0.6, ..OPEN }), [1, 5, 3, 1]);
        // After 1, 5: both stand at 2.1, so 1 again, then 3 is passed by nobody.
        assert_eq!(choices(Sampling { frequency_penalty: 0.4, ..OPEN }), [1, 5, 1, 5]);
        assert_eq!(choices(Sampling { repeat_penalty: 2.0, ..OPEN }), [1, 5, 3, 1]);
        let mut negative = Sampler::new(Sampling { temperature: 0.0, repeat_penalty: 2.0, ..OPEN }).unwrap();
        assert_eq!([negative.choose(&[-1.0, -1.5]), negative.choose(&[-1.0, -1.5])], [0, 1]);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let draw = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..OPEN }).unwrap();
            (0..32).map(|_| sampler.choose(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn masks_come_before_everything_else() {
        let mask = TokenMask::of([0, 2, 4]);
        // Only what is allowed counts for the filters: 0 has 0.67 of the allowed ones, 4 has 0.24.
        for (settings, expected) in [
            (Sampling::greedy(), vec![0]),
            (Sampling { top_k: 1, ..OPEN }, vec![0]),
            (Sampling { top_k: 2, ..OPEN }, vec![0, 4]),
            (Sampling { top_p: 0.6, ..OPEN }, vec![0]),
            (Sampling { temperature: 3.0, ..OPEN }, vec![0, 2, 4]),
        ] {
            let draw =
                |seed| Sampler::new(Sampling { seed, ..settings }).unwrap().choose_among(&LOGITS, &mask);
            let seen: std::collections::BTreeSet<u32> = (0..400).map(|seed| draw(seed).unwrap()).collect();
            assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected, "{settings:?}");
        }
        let mut sampler = Sampler::new(Sampling { presence_penalty: 1.5, ..Sampling::greedy() }).unwrap();
        let drawn: Vec<_> = (0..3).map(|_| sampler.choose_among(&LOGITS, &mask)).collect();
        assert_eq!(drawn, [Some(0), Some(4), Some(0)], "penalties count what was chosen before");
        assert_eq!(sampler.choose_among(&LOGITS, &TokenMask::default()), None);
        let all = TokenMask::of(0..64);
        let settings = Sampling { seed: 3, ..OPEN };
        let [mut free, mut bound] = [(); 2].map(|()| Sampler::new(settings).unwrap());
        for _ in 0..32 {
            assert_eq!(Some(free.choose(&LOGITS)), bound.choose_among(&LOGITS, &all));
        }
    }

    #[test]
    fn bad_settings_are_named() {
        for (settings, name) in [
            (Sampling { temperature: f32::NAN, ..OPEN }, "temperature"),
            (Sampling { top_p: 0.0, ..OPEN }, "top-p"),
            (Sampling { min_p: 1.5, ..OPEN }, "min-p"),
            (Sampling { presence_penalty: 3.0, ..OPEN }, "presence-penalty"),
            (Sampling { repeat_penalty: 0.0, ..OPEN }, "repeat-penalty"),
        ] {
            assert!(Sampler::new(settings).unwrap_err().to_string().starts_with(name));
        }
    }
}
