//! What is read again, counted, in a conversation of 4,000 tokens; and the bits that come of it.

mod common;

use common::served::{AMPLE, CONTEXT, ask, scheduler, words};
use engine::{Miss, Reuse, Scheduler, SchedulerOptions};

fn served(budget: u64) -> Scheduler {
    scheduler(budget, SchedulerOptions::default())
}

/// Where the messages of the 4,000 tokens end: a system message, then turns.
const ENDS: [usize; 4] = [1000, 2000, 3000, 3900];

fn reuse(heard: &common::served::Heard) -> Reuse {
    heard.log(|log| log.reuse.unwrap())
}

/// The bits of a request to an engine that has never seen anything.
fn cold(tokens: &[u32]) -> Vec<(u32, u32)> {
    ask(&mut served(0), tokens, &[], 4).log(|log| log.answer.clone())
}

#[test]
fn a_second_turn_reads_only_what_is_new() {
    let mut server = served(AMPLE);
    let mut history = words(1, 4000);
    let first = ask(&mut server, &history, &ENDS, 20);
    assert_eq!(reuse(&first), Reuse { reused: 0, read: 4000, known: 0, miss: Miss::Unknown });
    history.extend(first.ids());
    let new = words(2, 30);
    history.extend(&new);
    // The last token of an answer is written, but not read before somebody goes on from it.
    let second = ask(&mut server, &history, &[4020], 20);
    assert_eq!(reuse(&second), Reuse { reused: 4019, read: 31, known: 4019, miss: Miss::New });

    // The same as the session nobody interrupted, to the bit.
    let model = common::pocket();
    let options = engine::SessionOptions { budget: 0, spacing: 1024, kv: model::KvType::F32 };
    let mut engine = common::served::engine_for(&model, &options, 1);
    let mut session = engine.open();
    let mut read =
        |tokens: &[u32]| engine.ingest(&mut session, tokens, &mut engine::Request::default()).unwrap().logits;
    read(&history[..4000]);
    history[4000..4019].iter().for_each(|&token| drop(read(&[token])));
    let mut logits = read(&history[4019..]);
    for (id, bits) in second.log(|log| log.answer.clone()) {
        assert_eq!(engine::compare::argmax(&logits) as u32, id);
        assert_eq!(engine::Logprobs::new(&logits, id, 0).chosen.to_bits(), bits);
        logits = read(&[id]);
    }
}

#[test]
fn an_edited_last_message_costs_that_message() {
    let mut server = served(AMPLE);
    let mut history = words(1, 4000);
    ask(&mut server, &history, &ENDS, 20);
    history.truncate(3900);
    history.extend(words(3, 80));
    let edited = ask(&mut server, &history, &ENDS, 4);
    assert_eq!(reuse(&edited), Reuse { reused: 3840, read: 140, known: 3900, miss: Miss::Parted });
    assert_eq!(edited.log(|log| log.answer.clone()), cold(&history), "the bits of a cold ingestion");
}

#[test]
fn asking_again_costs_less_than_a_grid_cell() {
    let mut server = served(AMPLE);
    let history = words(1, 4000);
    let first = ask(&mut server, &history, &ENDS, 20);
    let again = ask(&mut server, &history, &ENDS, 20);
    assert_eq!(again.read(), 4000 - 3968);
    assert_eq!(again.ids(), first.ids());
    assert_eq!(again.log(|log| log.answer.clone()), first.log(|log| log.answer.clone()));
}

#[test]
fn a_prompt_that_a_session_holds_to_the_last_token_is_answered_from_the_checkpoint_before() {
    let mut server = served(AMPLE);
    let mut history = words(1, 300);
    let first = ask(&mut server, &history, &[], 5);
    // The session that is kept has read all of the answer but its last token: nothing would be left to read.
    history.extend(&first.ids()[..4]);
    let again = ask(&mut server, &history, &[], 4);
    assert_eq!(again.read(), 304 - 256);
    assert_eq!(again.log(|log| log.answer.clone()), cold(&history), "the bits of a cold ingestion");
}

#[test]
fn a_compaction_keeps_the_first_part() {
    let mut server = served(AMPLE);
    let history = words(1, 4000);
    ask(&mut server, &history, &ENDS, 20);
    let compact: Vec<u32> = history[..1000].iter().copied().chain(words(4, 300)).collect();
    let heard = ask(&mut server, &compact, &[1000], 4);
    assert_eq!(reuse(&heard), Reuse { reused: 960, read: 340, known: 1000, miss: Miss::Parted });
    assert_eq!(heard.log(|log| log.answer.clone()), cold(&compact));
}

#[test]
fn clients_that_alternate_keep_their_sessions() {
    let mut server = served(AMPLE);
    let mut histories = [words(1, 4000), words(2, 3000)];
    for round in 0..3 {
        for history in &mut histories {
            let known = history.len();
            let heard = ask(&mut server, history, &[], 10);
            assert_eq!(heard.read(), if round == 0 { known } else { 26 }, "round {round}");
            history.extend(heard.ids());
            history.extend(words(round, 25));
        }
    }
}

#[test]
fn a_title_request_in_between_costs_nothing() {
    // A budget that the conversation fills: the small request must not push it out.
    let mut server = served(40 << 20);
    let mut history = words(1, 4000);
    let first = ask(&mut server, &history, &ENDS, 20);
    let before = server.stats().sessions;
    let title = ask(&mut server, &words(9, 200), &[150], 8);
    assert_eq!(title.read(), 200);
    history.extend(first.ids());
    history.extend(words(2, 30));
    assert_eq!(ask(&mut server, &history, &[], 4).read(), 31);
    assert!(before.bytes <= 40 << 20 && server.stats().sessions.bytes <= 40 << 20);
}

#[test]
fn short_prompts_are_kept_too() {
    let mut server = served(AMPLE);
    for len in [5, 60, 70] {
        let mut history = words(len as u64, len);
        history.extend(ask(&mut server, &history, &[], 3).ids());
        history.push(17);
        assert_eq!(ask(&mut server, &history, &[], 1).read(), 2, "after {len} tokens");
    }
}

#[test]
fn the_budget_holds_and_evictions_are_named() {
    let budget = 20 << 20;
    let mut server = served(budget);
    let mut evicted = 0;
    for client in 0..6 {
        ask(&mut server, &words(client, 1500), &[400], 4);
        assert!(server.stats().sessions.bytes <= budget);
        evicted = server.stats().sessions.evicted;
    }
    assert!(evicted > 0);
    let again = ask(&mut server, &words(0, 1500), &[400], 4);
    assert!(matches!(reuse(&again).miss, Miss::Evicted { .. }), "{:?}", reuse(&again));
    assert!(again.log(|log| log.reuse.unwrap().to_string().contains("given up for memory")));
}

/// Eighty turns, some edited: bytes stay below the budget.
#[test]
fn long_use_stays_within_the_budget() {
    let budget = 30 << 20;
    let mut server = served(budget);
    let mut history = words(1, 100);
    for turn in 0..80u64 {
        let heard = ask(&mut server, &history, &[64], 3);
        assert!(server.stats().sessions.bytes <= budget, "turn {turn}");
        if turn % 7 == 3 {
            history.truncate(history.len() - 10);
        } else {
            history.extend(heard.ids());
        }
        history.extend(words(turn, 9));
        if history.len() > CONTEXT / 8 {
            history.truncate(100);
        }
    }
    let stats = server.stats();
    assert_eq!((stats.finished, stats.failed, stats.cancelled), (80, 0, 0));
    assert!(stats.reused > 8 * stats.read, "{} reused, {} read", stats.reused, stats.read);
}
