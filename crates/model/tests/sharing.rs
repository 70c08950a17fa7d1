//! What snapshots share with the sequences they are taken of, counted in bytes.

use std::collections::HashMap;
use std::sync::Arc;

use model::state::host::{HostState, Side};
use model::state::{PAGE, SnapshotShape};
use model::{KvType, Pass, SequenceId, Snapshot, SnapshotRequest, Spec};
use testkit::{TinyModel, TinyOptions};

fn spec() -> Spec {
    TinyModel::new(TinyOptions { layers: 5, ..TinyOptions::default() }).model.spec.clone()
}

/// Appends `len` tokens that leave `mark` everywhere, and a checkpoint after the first of them if one is wanted.
fn extend(host: &mut HostState, id: SequenceId, len: usize, mark: f32, checkpoint: Option<SequenceId>) {
    let start = host.table().position(id).unwrap();
    let mut pass = Pass::new();
    pass.push(id, start, &vec![0; len]);
    pass.snapshots.extend(checkpoint.map(|into| SnapshotRequest { row: 0, into }));
    let open = host.open(&pass).unwrap();
    let run = &open.runs[0];
    let shape = *host.shape();
    for layer in 0..shape.delta_layers {
        for slot in [run.to].into_iter().chain(run.snapshots.iter().map(|&(_, slot)| slot)) {
            host.copy_recurrent(run.from, slot, layer);
            host.recurrent_mut(slot, layer).1.fill(mark);
        }
    }
    let row = vec![mark; shape.head_dim];
    for layer in 0..shape.attention_layers {
        for (side, head) in
            [Side::Key, Side::Value].into_iter().flat_map(|s| (0..shape.kv_heads).map(move |h| (s, h)))
        {
            (start..start + len).for_each(|at| host.store(&run.pages, at, (layer, side, head), &row));
        }
    }
    host.table_mut().commit(&pass, open);
}

/// Bytes of memory behind some snapshots.
fn bytes(snapshots: &[&Snapshot]) -> usize {
    let mut parts = HashMap::new();
    for snapshot in snapshots {
        parts.insert(Arc::as_ptr(&snapshot.recurrent).cast::<u8>(), size_of_val(&snapshot.recurrent[..]));
        for page in &snapshot.pages {
            parts.insert(Arc::as_ptr(page).cast::<u8>(), page.len() * page.kv().bytes());
        }
    }
    parts.values().sum()
}

/// Every key of a snapshot, by position: the same in all heads.
fn keys(snapshot: &Snapshot) -> Vec<u8> {
    let mut out = Vec::new();
    snapshot.append_rows(0, 0..snapshot.position, &mut out);
    out
}

#[test]
fn snapshots_and_what_is_restored_from_them_share_all_but_what_is_written_on() {
    for kv in [KvType::F16, KvType::F32] {
        let mut host = HostState::new(&spec(), kv, 40 * PAGE);
        let shape = *host.shape();
        let (page, slot) = (PAGE * shape.position_len() * kv.bytes(), shape.slot_len() * 4);
        let id = host.table_mut().create();
        extend(&mut host, id, 10 * PAGE + 10, 1.0, None);
        let held = host.bytes();
        let first = host.snapshot(id).unwrap();
        assert_eq!(first.bytes(), 11 * page + slot);
        assert_eq!(
            bytes(&[&first, &host.snapshot(id).unwrap()]),
            first.bytes(),
            "a second one costs nothing"
        );
        assert_eq!(host.bytes(), held);
        let before = (keys(&first), first.recurrent.to_vec());

        // Writing on copies the page that is not full, and the state is new in any case.
        extend(&mut host, id, 1, 2.0, None);
        let second = host.snapshot(id).unwrap();
        assert_eq!(bytes(&[&first, &second]), first.bytes() + page + slot);
        assert_eq!((keys(&first), first.recurrent.to_vec()), before, "what was taken stays as it was");
        assert_ne!(keys(&second), before.0);

        // Ten snapshots of a session that grows by a page each: their own page and state, nothing else.
        let mut all = vec![second];
        for n in 0..10 {
            extend(&mut host, id, PAGE, 3.0 + n as f32, None);
            all.push(host.snapshot(id).unwrap());
        }
        let own = bytes(&all.iter().collect::<Vec<_>>());
        // Eleven states, 21 full pages, and a last one that each of them has for itself.
        assert_eq!(own, 11 * slot + (10 + 10) * page + 11 * page);

        // What is restored is shared, here and in a backend that has never seen it.
        let restored = host.restore(&first).unwrap();
        assert_eq!(bytes(&[&first, &host.snapshot(restored).unwrap()]), first.bytes());
        let mut other = HostState::new(&spec(), kv, 40 * PAGE);
        let there = other.restore(&first).unwrap();
        assert_eq!(bytes(&[&first, &other.snapshot(there).unwrap()]), first.bytes());
        extend(&mut other, there, PAGE, 9.0, None);
        assert_eq!((keys(&first), first.recurrent.to_vec()), before);
        // The last owner frees it.
        let weak: Vec<_> = first.pages.iter().map(Arc::downgrade).collect();
        drop((first, all, host, other));
        assert!(weak.iter().all(|page| page.strong_count() == 0));
    }
}

#[test]
fn checkpoints_share_pages_with_the_session_they_are_made_in() {
    let mut host = HostState::new(&spec(), KvType::F16, 40 * PAGE);
    let id = host.table_mut().create();
    let checkpoints: Vec<SequenceId> = (0..8)
        .map(|n| {
            let into = host.table_mut().create();
            extend(&mut host, id, PAGE, n as f32, Some(into));
            into
        })
        .collect();
    let pages = host.table().in_use().0;
    // A checkpoint one position behind a page's start shares that page: sessions that go on write behind it.
    assert_eq!(pages, 8);
    let snapshots: Vec<Snapshot> = checkpoints.iter().map(|&id| host.snapshot(id).unwrap()).collect();
    let shape = *host.shape();
    let page = PAGE * shape.position_len() * 2;
    assert_eq!(bytes(&snapshots.iter().collect::<Vec<_>>()), 8 * page + 8 * shape.slot_len() * 4);
}

#[test]
fn memory_that_nobody_uses_is_given_back_when_the_other_kind_grows() {
    let mut host = HostState::new(&spec(), KvType::F32, 400 * PAGE);
    let shape = *host.shape();
    let (page, slot) = (PAGE * shape.position_len() * 4, shape.slot_len() * 4);
    // Many short sessions: states above all.
    let short: Vec<SequenceId> = (0..50).map(|_| host.table_mut().create()).collect();
    short.iter().for_each(|&id| extend(&mut host, id, 1, 1.0, None));
    assert!(host.bytes() >= 50 * slot);
    short.iter().for_each(|&id| host.table_mut().free(id));
    // Then a long one.
    let long = host.table_mut().create();
    extend(&mut host, long, 100 * PAGE, 2.0, None);
    assert!(host.bytes() <= 100 * page + 10 * slot, "{} bytes", host.bytes());
    host.table_mut().free(long);
    // And many short ones again.
    let short: Vec<SequenceId> = (0..50).map(|_| host.table_mut().create()).collect();
    short.iter().for_each(|&id| extend(&mut host, id, 1, 3.0, None));
    assert!(host.bytes() <= 70 * page + 60 * slot, "{} bytes", host.bytes());
    // What lives is never touched.
    assert!(short.iter().all(|&id| host.snapshot(id).unwrap().recurrent.last() == Some(&3.0)));
}

#[test]
fn states_of_parts_are_the_state_of_the_whole() {
    let whole = spec();
    for kv in [KvType::F16, KvType::F32] {
        for len in [1, 63, 64, 65, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 7] {
            let mut host = HostState::new(&whole, kv, 4 * PAGE);
            let id = host.table_mut().create();
            extend(&mut host, id, len, 0.0, None);
            let mut state = host.snapshot(id).unwrap();
            // No two numbers are the same, so that one in the wrong place is noticed.
            let numbers = state.recurrent.len();
            state.recurrent = Arc::new((0..numbers).map(|x| x as f32).collect());
            for (index, page) in state.pages.iter_mut().enumerate() {
                let mut filled = (**page).clone();
                let bytes: Vec<u8> = (0..filled.len() * kv.bytes()).map(|x| (x / 3 + index) as u8).collect();
                filled.write_bytes(0, &bytes);
                *page = Arc::new(filled);
            }
            let layers = whole.layers.len();
            for cuts in [vec![layers], vec![1, layers], vec![2, 4, layers], (1..=layers).collect()] {
                let mut start = 0;
                let shapes: Vec<SnapshotShape> = (cuts.iter())
                    .map(|&end| {
                        let layers = whole.layers[std::mem::replace(&mut start, end)..end].to_vec();
                        SnapshotShape::new(&Spec { layers, ..whole.clone() }, kv)
                    })
                    .collect();
                let parts = state.split(&shapes);
                parts.iter().zip(&shapes).for_each(|(part, shape)| part.check(shape).unwrap());
                let joined = Snapshot::join(&parts);
                joined.check(host.shape()).unwrap();
                assert!(joined == state, "{kv:?}, {len} tokens, cuts before {cuts:?}");
            }
        }
    }
    let mut host = HostState::new(&whole, KvType::F16, PAGE);
    let id = host.table_mut().create();
    let empty = host.snapshot(id).unwrap();
    let shapes = [SnapshotShape { delta_layers: 1, attention_layers: 0, ..*host.shape() }; 2];
    assert!(empty.split(&shapes).iter().all(|part| part.recurrent.is_empty() && part.pages.is_empty()));
}
