//! Some layers as a model of their own.

use model::{LayerKind, Model};
use testkit::{TinyModel, TinyOptions};

fn tiny(tied: bool) -> TinyModel {
    TinyModel::new(TinyOptions { layers: 6, tied, ..TinyOptions::default() })
}

fn experts(model: &Model) -> u64 {
    model.expert_bytes()
}

#[test]
fn parts_have_what_is_theirs() {
    for tied in [false, true] {
        let tiny = tiny(tied);
        let whole = &tiny.model;
        let parts = [whole.part(0..1), whole.part(1..5), whole.part(5..6)];
        let ends: Vec<[bool; 2]> = parts.iter().map(|part| [part.has_start(), part.has_end()]).collect();
        assert_eq!(ends, [[true, false], [false, false], [false, true]], "tied: {tied}");
        assert!(whole.has_start() && whole.has_end());
        assert_eq!(parts.iter().map(experts).sum::<u64>(), experts(whole));
        assert_eq!(parts.iter().map(Model::dense_bytes).sum::<u64>(), whole.dense_bytes());
        let kinds: Vec<LayerKind> = parts.iter().flat_map(|part| part.spec.layers.clone()).collect();
        assert_eq!(kinds, whole.spec.layers);
        let widths: Vec<usize> = parts.iter().flat_map(|part| part.spec.moe.widths.clone()).collect();
        assert_eq!(widths, whole.spec.moe.widths);
        assert_eq!(parts[1].mapped_experts(3), whole.mapped_experts(4));
        assert_eq!(parts[2].mapped_experts(0), whole.mapped_experts(5));
    }
}

#[test]
fn weights_of_a_part_are_those_of_its_layers() {
    let tiny = tiny(false);
    let whole = tiny.model.load(&mut |_, _| {}).unwrap();
    let part = tiny.model.part(2..4).load(&mut |_, _| {}).unwrap();
    assert_eq!(part.layers.len(), 2);
    for (part, whole) in part.layers.iter().zip(&whole.layers[2..4]) {
        assert_eq!(part.norm, whole.norm);
        assert_eq!(part.moe.router.bytes, whole.moe.router.bytes);
        assert_eq!(part.moe.router.name, whole.moe.router.name);
    }
    assert!(part.output.bytes.is_empty());
}

#[test]
fn layers_of_the_same_cost_are_shared_evenly() {
    let tiny = TinyModel::new(TinyOptions { layers: 8, ..TinyOptions::default() });
    assert_eq!(tiny.model.cut(2), [0..4, 4..8]);
    assert_eq!(tiny.model.cut(100).len(), 8);
}
