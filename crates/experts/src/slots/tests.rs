//! Random operations against books kept the slow way.

use std::collections::VecDeque;

use testkit::Random;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Simple {
    Loading { reserved: bool },
    Reserved,
    Pinned,
    Listed,
}

/// One class, as lists of keys.
struct SimpleClass {
    slots: usize,
    held: Vec<(u32, SlotId, Simple)>,
    /// Coldest first.
    list: VecDeque<u32>,
}

const EXPERTS: usize = 6;
const LAYERS: [usize; 4] = [0, 1, 0, 1];
const COUNTS: [usize; 2] = [5, 3];

fn check(slots: &Slots, simple: &[SimpleClass]) {
    for (class, books) in simple.iter().enumerate() {
        assert_eq!(slots.free(class), books.slots - books.held.len());
        assert_eq!(slots.evictable(class), books.list.len());
        let mut ids: Vec<SlotId> = books.held.iter().map(|held| held.1).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), books.held.len(), "no slot has two experts");
        assert!(ids.iter().all(|&id| slots.classes[class].slots.contains(&id)));
    }
    for layer in 0..LAYERS.len() {
        let class = &simple[LAYERS[layer]];
        let of_layer = |key: u32| key as usize / EXPERTS == layer;
        let kept = class
            .held
            .iter()
            .filter(|(key, _, state)| of_layer(*key) && matches!(state, Simple::Pinned | Simple::Listed));
        assert_eq!(slots.kept(layer), kept.count());
        for expert in 0..EXPERTS as u32 {
            let key = slots.key(layer, expert);
            let held = class.held.iter().find(|held| held.0 == key);
            assert_eq!(slots.find(key), held.map(|held| held.1));
            let ready = held.filter(|held| !matches!(held.2, Simple::Loading { .. }));
            assert_eq!(slots.ready(key), ready.map(|held| held.1));
        }
    }
}

#[test]
fn random_operations_keep_the_books_right() {
    let mut evictions = 0;
    for seed in 0..20 {
        let mut rng = Random::from_seed(seed);
        let mut slots = Slots::new(&COUNTS, LAYERS.to_vec(), EXPERTS);
        let mut simple: Vec<SimpleClass> = COUNTS
            .iter()
            .map(|&slots| SimpleClass { slots, held: Vec::new(), list: VecDeque::new() })
            .collect();
        for _ in 0..2_000 {
            let key = rng.below(LAYERS.len() * EXPERTS) as u32;
            let class = &mut simple[LAYERS[key as usize / EXPERTS]];
            let at = class.held.iter().position(|held| held.0 == key);
            let place = [Place::Hot, Place::Cold, Place::Free][rng.below(3)];
            match at.map(|at| class.held[at].2) {
                None => {
                    let reserved = rng.below(3) == 0;
                    let full = class.held.len() == class.slots;
                    let found = slots.take(key, Origin::Demand, reserved);
                    if full && class.list.is_empty() {
                        assert_eq!(found, None, "nothing may be evicted");
                    } else {
                        if full {
                            let victim = class.list.pop_front().unwrap();
                            class.held.retain(|held| held.0 != victim);
                            evictions += 1;
                        }
                        class.held.push((key, found.unwrap(), Simple::Loading { reserved }));
                    }
                }
                Some(Simple::Loading { reserved }) => {
                    let (_, slot, _) = class.held[at.unwrap()];
                    if rng.below(4) == 0 {
                        slots.cancel(slot);
                        class.held.remove(at.unwrap());
                    } else {
                        slots.publish(slot);
                        class.held[at.unwrap()].2 = if reserved { Simple::Reserved } else { Simple::Listed };
                        class.list.extend((!reserved).then_some(key));
                    }
                }
                Some(Simple::Reserved | Simple::Listed) => {
                    slots.pin(class.held[at.unwrap()].1);
                    class.held[at.unwrap()].2 = Simple::Pinned;
                    class.list.retain(|&listed| listed != key);
                }
                Some(Simple::Pinned) => {
                    slots.unpin(class.held[at.unwrap()].1, place);
                    class.held[at.unwrap()].2 = Simple::Listed;
                    match place {
                        Place::Hot => class.list.push_back(key),
                        Place::Cold => class.list.push_front(key),
                        Place::Free => drop(class.held.remove(at.unwrap())),
                    }
                }
            }
            if rng.below(200) == 0 {
                slots.unreserve_all();
                for class in &mut simple {
                    class.held.sort_by_key(|held| held.1);
                    for held in &mut class.held {
                        match held.2 {
                            Simple::Reserved => {
                                held.2 = Simple::Listed;
                                class.list.push_front(held.0);
                            }
                            Simple::Loading { .. } => held.2 = Simple::Loading { reserved: false },
                            _ => {}
                        }
                    }
                }
            }
            check(&slots, &simple);
        }
    }
    assert!(evictions > 1_000, "{evictions}");
}

#[test]
fn the_coldest_goes_first_and_a_pinned_one_never() {
    let mut slots = Slots::new(&[3], vec![0], 8);
    for key in 0..3 {
        let slot = slots.take(key, Origin::Predicted, false).unwrap();
        slots.publish(slot);
    }
    let (zero, one) = (slots.ready(0).unwrap(), slots.ready(1).unwrap());
    slots.pin(zero);
    slots.unpin(zero, Place::Hot);
    slots.pin(one);
    slots.take(3, Origin::Demand, false).unwrap();
    assert!(slots.find(2).is_none(), "the coldest that is not pinned");
    slots.take(4, Origin::Demand, false).unwrap();
    assert!(slots.find(0).is_none());
    assert_eq!(slots.take(5, Origin::Demand, false), None, "one is pinned, two are loading");
    assert_eq!(slots.ready(1), Some(one));
    assert_eq!(slots.wasted(), 2, "predicted, evicted, never used");
}
