//! Preferring experts that are in the cache: off, it changes nothing; on, less is read.

mod common;

use common::{budget, engine, logits, synthetic, tokens};
use experts::{Options, Stats};

/// Logits of 48 tokens behind a prompt of three, and what was loaded for them.
fn run(bias: f32, look_ahead: Option<usize>) -> (Vec<Vec<f32>>, Stats) {
    let synthetic = synthetic(&format!("bias-{bias}-{}", look_ahead.is_some()), false);
    let model = &synthetic.model;
    let options =
        Options { budget: Some(budget(model, 80, 1)), route_bias: bias, look_ahead, ..Options::default() };
    let (mut bounded, monitor) = engine(model, 1, Some((options, None)));
    let found = logits(&mut bounded, &tokens(3), 48);
    (found, monitor.unwrap().stats())
}

#[test]
fn a_bias_of_nothing_changes_no_bit_and_a_larger_one_reads_less() {
    let synthetic = synthetic("bias-mapped", false);
    let (mut mapped, _) = engine(&synthetic.model, 1, None);
    let expected = logits(&mut mapped, &tokens(3), 48);
    let (mut first, mut last) = (None, f64::INFINITY);
    for bias in [0.0, 0.3, 3.0] {
        // Without look-ahead: what is missed is what is read.
        let (found, stats) = run(bias, None);
        assert_eq!(found == expected, bias == 0.0, "{bias}");
        assert!(found.iter().flatten().all(|x| x.is_finite()));
        let missed = stats.misses as f64 / stats.wanted() as f64;
        assert!(missed < last, "{bias}: {missed} of what is wanted, {last} before");
        last = missed;
        first.get_or_insert(missed);
    }
    assert!(last < 0.8 * first.unwrap(), "{last} of what is wanted with the largest, {first:?} with none");
    assert_eq!(run(0.0, Some(2)).0, expected);
    assert_ne!(run(3.0, Some(2)).0, expected);
}

#[test]
fn everything_in_place_and_whole_layers_are_not_biased() {
    let synthetic = synthetic("bias-full", false);
    let model = &synthetic.model;
    let prompt = tokens(300);
    let (mut mapped, _) = engine(model, 1, None);
    let expected = logits(&mut mapped, &prompt, 0);
    for slots in [None, Some(80)] {
        let budget = slots.map(|slots| budget(model, slots, 1));
        let options = Options { budget, route_bias: 3.0, ..Options::default() };
        let (mut store, _) = engine(model, 1, Some((options, None)));
        assert_eq!(logits(&mut store, &prompt, 0), expected, "{slots:?}");
    }
}
