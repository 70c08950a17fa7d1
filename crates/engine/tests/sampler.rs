//! A token chosen from some of the logits is the one that would be chosen from all of them, sorted.

use std::collections::HashMap;

use engine::{Logits, Needed, Sampler, Sampling, TokenMask};
use model::Candidate;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use testkit::Random;

/// The choice as it is defined: every allowed token is penalised, sorted and filtered.
struct Sorted {
    settings: Sampling,
    random: ChaCha8Rng,
    counts: HashMap<u32, u32>,
}

impl Sorted {
    fn new(settings: Sampling) -> Sorted {
        Sorted { settings, random: ChaCha8Rng::seed_from_u64(settings.seed), counts: HashMap::new() }
    }

    fn choose(&mut self, logits: &[f32], mask: Option<&TokenMask>) -> Option<u32> {
        let allowed = (0..).zip(logits).filter(|(id, _)| mask.is_none_or(|mask| mask.allows(*id)));
        let mut all: Vec<(u32, f32)> = allowed.map(|(id, &logit)| (id, self.penalised(id, logit))).collect();
        if all.is_empty() {
            return None;
        }
        let id = if self.settings.temperature == 0.0 {
            let best = all.iter().copied().reduce(|best, one| if one.1 > best.1 { one } else { best });
            best.unwrap().0
        } else {
            all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            all.truncate(if self.settings.top_k == 0 { usize::MAX } else { self.settings.top_k });
            self.draw(&all)
        };
        *self.counts.entry(id).or_insert(0) += 1;
        Some(id)
    }

    fn penalised(&self, id: u32, logit: f32) -> f32 {
        let Sampling { presence_penalty, frequency_penalty, repeat_penalty, .. } = self.settings;
        let Some(&count) = self.counts.get(&id) else { return logit };
        let scaled = if logit > 0.0 { logit / repeat_penalty } else { logit * repeat_penalty };
        scaled - (presence_penalty + frequency_penalty * count as f32)
    }

    fn draw(&mut self, sorted: &[(u32, f32)]) -> u32 {
        let Sampling { temperature, top_p, min_p, .. } = self.settings;
        let top = sorted[0].1;
        let share = |logit: f32| f64::from(logit - top).exp();
        let total: f64 = sorted.iter().map(|one| share(one.1)).sum();
        let (mut sum, mut kept) = (0.0, 0);
        for &(_, logit) in sorted {
            if kept > 0 && (share(logit) < f64::from(min_p) || sum >= f64::from(top_p) * total) {
                break;
            }
            sum += share(logit);
            kept += 1;
        }
        let weights =
            sorted[..kept].iter().map(|one| (f64::from(one.1 - top) / f64::from(temperature)).exp());
        let sums: Vec<f64> = weights
            .scan(0.0, |sum, weight| {
                *sum += weight;
                Some(*sum)
            })
            .collect();
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        sorted[sums.partition_point(|&s| s <= unit * sums[kept - 1]).min(kept - 1)].0
    }
}

/// Rows of logits: all different, many ties, almost alike, zeros of both signs, far apart.
fn rows(vocabulary: usize) -> Vec<Vec<f32>> {
    let normals = |seed| Random::new(seed, "logits").normals(vocabulary, 4.0);
    let rounded = normals(2).iter().map(|x| x.round()).collect();
    let near = normals(3).iter().map(|x| 20.0 + 1e-6 * x).collect();
    let zeros = normals(4).iter().map(|x| 0.0f32.copysign(*x)).collect();
    let far = normals(5).iter().map(|x| x * 1e4).collect();
    vec![normals(1), rounded, near, zeros, far, normals(6)]
}

fn settings() -> Vec<Sampling> {
    let open = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, ..Sampling::default() };
    let mut all = vec![Sampling::greedy(), Sampling::default(), open];
    for top_k in [0, 1, 64, 1000] {
        all.push(Sampling { top_k, ..open });
        all.push(Sampling { top_k, top_p: 0.9, min_p: 0.02, temperature: 0.6, seed: 5, ..open });
        all.push(Sampling { top_k, presence_penalty: 0.7, ..open });
    }
    for temperature in [0.0, 0.9] {
        all.push(Sampling {
            temperature,
            frequency_penalty: 0.9,
            repeat_penalty: 1.3,
            ..Sampling::default()
        });
        let plain = Sampling { temperature, ..Sampling::default() };
        all.push(Sampling { presence_penalty: -1.5, ..plain });
        all.push(Sampling { presence_penalty: 0.1, repeat_penalty: 0.4, ..plain });
        all.push(Sampling { frequency_penalty: -0.8, repeat_penalty: 1.1, ..plain });
    }
    all.push(Sampling { top_p: 0.3, ..open });
    all.push(Sampling { min_p: 0.3, ..open });
    all
}

/// What was needed of `logits`, the least that a backend may give: the largest and their equals, in another order.
fn needed(logits: &[f32], needed: Needed) -> Logits {
    let Needed::Largest(count) = needed else { return Logits::All(logits.to_vec()) };
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[count.min(logits.len()) - 1];
    let mut found: Vec<Candidate> = (0..)
        .zip(logits)
        .filter(|&(_, &logit)| logit >= least)
        .map(|(id, &logit)| Candidate { id, logit })
        .collect();
    found.reverse();
    Logits::Largest(found)
}

/// Chooses row after row, so that penalties have something to count.
fn check(vocabulary: usize, settings: Sampling, mask: Option<&TokenMask>) {
    let mut oracle = Sorted::new(settings);
    let [mut all, mut some] = [(); 2].map(|()| Sampler::new(settings).unwrap());
    let rows = rows(vocabulary);
    for turn in 0..3 {
        for (kind, row) in rows.iter().enumerate() {
            let what = format!("row {kind} of {vocabulary}, turn {turn}, {settings:?}");
            let expected = oracle.choose(row, mask);
            match mask {
                Some(mask) => assert_eq!(all.choose_among(row, mask), expected, "masked {what}"),
                None => {
                    assert_eq!(Some(all.choose(row)), expected, "{what}");
                    let logits = needed(row, some.needed());
                    assert_eq!(Some(some.choose_from(&logits)), expected, "what is needed of {what}");
                }
            }
        }
    }
}

#[test]
fn choices_are_those_from_all_logits_sorted() {
    for vocabulary in [1, 2, 63, 64, 65, 4097] {
        settings().into_iter().for_each(|settings| check(vocabulary, settings, None));
    }
    // Of the size of real ones.
    let [few, many] = [20, 1000].map(|top_k| Sampling { top_k, ..Sampling::default() });
    let penalised = Sampling { presence_penalty: 1.0, repeat_penalty: 1.2, ..few };
    let open = Sampling { top_k: 0, top_p: 0.95, ..few };
    for settings in [Sampling::greedy(), few, many, penalised, open] {
        check(151_936, settings, None);
    }
}

#[test]
fn choices_among_allowed_tokens_are_those_from_all_of_them_sorted() {
    for vocabulary in [1u32, 63, 64, 65, 4097] {
        let masks = [
            TokenMask::of((0..vocabulary).filter(|id| id % 3 != 1)),
            TokenMask::of([0, vocabulary - 1]),
            TokenMask::of(vocabulary / 2..vocabulary + 100),
            TokenMask::of(0..vocabulary),
            TokenMask::default(),
        ];
        for mask in &masks {
            settings().into_iter().for_each(|settings| check(vocabulary as usize, settings, Some(mask)));
        }
    }
}

#[test]
fn as_little_is_needed_as_the_choice_depends_on() {
    let needed = |settings| {
        let mut sampler = Sampler::new(settings).unwrap();
        let first = sampler.needed();
        // Three tokens, one of them twice.
        for best in [0, 2, 1, 2] {
            sampler.choose_from(&Logits::Largest(vec![Candidate { id: best, logit: 1.0 }]));
        }
        (first, sampler.needed())
    };
    let largest = |first, later| (Needed::Largest(first), Needed::Largest(later));
    let plain = Sampling::default();
    assert_eq!(needed(Sampling::greedy()), largest(1, 1));
    assert_eq!(needed(plain), largest(20, 20));
    assert_eq!(needed(Sampling { top_k: 1000, ..plain }), largest(1000, 1000));
    assert_eq!(needed(Sampling { presence_penalty: 0.1, ..plain }), largest(20, 23));
    assert_eq!(needed(Sampling { frequency_penalty: 0.1, ..plain }), largest(20, 23));
    assert_eq!(needed(Sampling { repeat_penalty: 1.1, ..Sampling::greedy() }), largest(1, 4));
    for settings in [
        Sampling { top_k: 0, ..plain },
        Sampling { presence_penalty: -0.1, repeat_penalty: 1.1, ..plain },
        Sampling { frequency_penalty: -0.1, ..plain },
        Sampling { repeat_penalty: 0.9, ..Sampling::greedy() },
    ] {
        assert_eq!(needed(settings), (Needed::All, Needed::All), "{settings:?}");
    }
}
