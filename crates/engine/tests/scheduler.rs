//! Several requests on one engine: same bits, bounded gaps, nothing left behind.

mod common;

use std::sync::{Arc, Mutex};

use common::served::{AMPLE, ask, engine_with, job, scheduler, settle, step_by_step, words};
use engine::{Error, Phase, Scheduler, SessionOptions, Sessions};
use model::{ExpertSource, KvType, LayerCall, MappedExperts, Wave};
use text::Tokenizer;

#[test]
fn identical_requests_at_once_give_the_answer_of_one_alone() {
    let prompt = words(1, 700);
    let alone = ask(&mut scheduler(0, step_by_step(1)), &prompt, &[], 24);
    let alone = alone.log(|log| log.answer.clone());
    let mut server = scheduler(AMPLE, step_by_step(16));
    let mut all = Vec::new();
    for _ in 0..16 {
        let (job, heard, _) = job(&prompt, &[], 24);
        server.submit(job).unwrap();
        all.push(heard);
    }
    // Others of various lengths run among them.
    for other in 2..6 {
        let (job, _, _) = job(&words(other, 50 * other as usize), &[], 9);
        server.submit(job).unwrap_or_else(|full| assert!(full.waiting >= 4));
    }
    settle(&mut server);
    for heard in &all {
        assert_eq!(heard.log(|log| log.answer.clone()), alone);
    }
    let read: usize = all.iter().map(|heard| heard.read()).sum();
    assert_eq!(read, 700 + 15 * (700 - 640), "one reads the prompt, the others its tail");
}

#[test]
fn a_long_prompt_gets_its_turns_among_short_ones_that_keep_coming() {
    let mut server = scheduler(0, step_by_step(3));
    let (long, answer, _) = job(&words(1, 1500), &[], 1);
    server.submit(long).unwrap();
    let mut short = Vec::new();
    // A slice is a step of a prompt; so many of them are several times what all that is read needs.
    for turn in 0..4000 {
        if answer.ended() {
            break;
        }
        short.retain(|heard: &common::served::Heard| !heard.ended());
        // Always two that have less to read.
        while short.len() < 2 {
            let (job, heard, _) = job(&words(2 + turn, 60), &[], 1);
            server.submit(job).unwrap();
            short.push(heard);
        }
        server.turn();
    }
    assert!(answer.ended(), "short prompts overtake it every time");
}

#[test]
fn different_requests_do_not_mix() {
    let prompts: Vec<Vec<u32>> = (1..7).map(|n| words(n, 40 * n as usize + 3)).collect();
    let mut lone = scheduler(0, step_by_step(1));
    let alone: Vec<_> = prompts.iter().map(|prompt| ask(&mut lone, prompt, &[], 12)).collect();
    let mut server = scheduler(AMPLE, step_by_step(3));
    let mut together = Vec::new();
    for prompt in &prompts {
        let (job, heard, _) = job(prompt, &[], 12);
        server.submit(job).unwrap();
        together.push(heard);
    }
    settle(&mut server);
    for (one, other) in alone.iter().zip(&together) {
        assert_eq!(one.log(|log| log.answer.clone()), other.log(|log| log.answer.clone()));
    }
}

#[test]
fn an_answer_goes_on_while_a_long_prompt_is_read() {
    let mut server = scheduler(AMPLE, step_by_step(2));
    let (quick, answer, _) = job(&words(1, 30), &[], 60);
    server.submit(quick).unwrap();
    while answer.ids().is_empty() {
        server.turn();
    }
    let (long, reading, _) = job(&words(2, 4000), &[], 1);
    server.submit(long).unwrap();
    for turn in 1..50 {
        server.turn();
        assert_eq!(answer.ids().len(), 1 + turn, "a token a turn, a turn is one stage of the prompt");
        assert!(matches!(server.stats().running[1], Phase::Reading(_, 4000)));
    }
    assert!(!reading.ended());
    settle(&mut server);
    assert_eq!(reading.log(|log| log.answer.len()), 1);
}

#[test]
fn a_short_prompt_overtakes_a_long_one() {
    let mut server = scheduler(AMPLE, step_by_step(2));
    let (long, slow, _) = job(&words(2, 4000), &[], 1);
    server.submit(long).unwrap();
    server.turn();
    let (short, quick, _) = job(&words(1, 30), &[], 5);
    server.submit(short).unwrap();
    while !quick.ended() {
        server.turn();
        assert!(!slow.ended());
    }
    assert!(slow.log(|log| log.progress) > 0, "the long one was not left standing");
    settle(&mut server);
}

#[test]
fn a_request_given_up_ends_with_the_next_turn_in_every_phase() {
    let mut server = scheduler(AMPLE, step_by_step(1));
    let (first, writing, stop_writing) = job(&words(1, 100), &[], 1000);
    let (second, waiting, stop_waiting) = job(&words(2, 100), &[], 1000);
    let (third, reading, stop_reading) = job(&words(3, 4000), &[], 1000);
    for job in [first, second, third] {
        server.submit(job).unwrap();
    }
    while writing.ids().len() < 5 {
        server.turn();
    }
    stop_waiting.cancel();
    stop_writing.cancel();
    server.turn();
    for ended in [&writing, &waiting] {
        assert!(ended.log(|log| matches!(log.error, Some(Error::Cancelled { .. }))));
    }
    while reading.log(|log| log.progress) < 1000 {
        server.turn();
    }
    stop_reading.cancel();
    server.turn();
    assert!(reading.log(|log| matches!(log.error, Some(Error::Cancelled { .. }))));
    assert!(server.is_idle());
    assert_eq!(server.stats().cancelled, 3);

    // What was read is not lost, and the answer is the usual one.
    let again = ask(&mut server, &words(3, 4000), &[], 4);
    assert_eq!(again.read(), 4000 - 512, "a chunk was complete");
    let cold = ask(&mut scheduler(0, step_by_step(1)), &words(3, 4000), &[], 4);
    assert_eq!(again.log(|log| log.answer.clone()), cold.log(|log| log.answer.clone()));
}

#[test]
fn the_queue_is_bounded_and_wrong_requests_are_told() {
    let mut server = scheduler(AMPLE, step_by_step(1));
    let submit = |server: &mut Scheduler| {
        let (job, heard, _) = job(&words(1, 100), &[], 2);
        server.submit(job).map(|()| heard)
    };
    submit(&mut server).unwrap();
    server.turn();
    for _ in 0..4 {
        submit(&mut server).unwrap();
    }
    assert_eq!(submit(&mut server).err().unwrap().waiting, 4);
    settle(&mut server);
    submit(&mut server).unwrap();

    let (long, heard, _) = job(&words(1, 6000), &[], 2);
    server.submit(long).unwrap();
    assert!(
        heard.log(|log| matches!(log.error, Some(Error::ContextOverflow { needed: 6000, context: 5120 })))
    );
    let (empty, heard, _) = job(&[], &[], 2);
    server.submit(empty).unwrap();
    assert!(heard.log(|log| matches!(log.error, Some(Error::EmptyPrompt))));
    let (nothing, heard, _) = job(&words(1, 10), &[], 0);
    server.submit(nothing).unwrap();
    settle(&mut server);
    assert_eq!(heard.log(|log| log.report.unwrap().written), 0);
}

/// Layers and rows of calls, and whether memory was lent or taken back.
#[derive(Default)]
struct Calls {
    rows: Vec<(usize, usize)>,
    lent: Vec<bool>,
}

/// A source that lends memory to passes of more than 64 rows, and notes what it hears.
struct Lender {
    inner: MappedExperts,
    heard: Arc<Mutex<Calls>>,
}

impl ExpertSource for Lender {
    fn needs_routes(&self, rows: usize) -> bool {
        self.inner.needs_routes(rows)
    }

    fn start(&mut self, call: &LayerCall) -> model::Result<()> {
        self.heard.lock().unwrap().rows.push((call.layer, call.rows));
        Ok(())
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> model::Result<Wave> {
        self.inner.wave(call, from)
    }

    fn small_rows(&self) -> usize {
        64
    }

    fn lend(&mut self, lend: bool) -> model::Result<()> {
        self.heard.lock().unwrap().lent.push(lend);
        Ok(())
    }
}

#[test]
fn large_chunks_take_turns_and_memory_is_lent_while_there_are_any() {
    let model = common::pocket();
    let heard: Arc<Mutex<Calls>> = Arc::default();
    let lender = Lender { inner: MappedExperts::new(&model), heard: Arc::clone(&heard) };
    let engine = engine_with(&model, 8192, Box::new(lender));
    let sessions = Sessions::new(&engine, SessionOptions { budget: 0, spacing: 1024, kv: KvType::F32 });
    let tokenizer = Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap();
    let mut server = Scheduler::new(engine, sessions, Arc::new(tokenizer), step_by_step(4));
    let prompts = [words(1, 700), words(2, 900), words(3, 40), words(4, 300)];
    let together: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let (job, answer, _) = job(prompt, &[], 6);
            server.submit(job).unwrap();
            answer
        })
        .collect();
    settle(&mut server);
    let Calls { rows, lent } = std::mem::take(&mut *heard.lock().unwrap());
    let large: Vec<(usize, usize)> = rows.into_iter().filter(|&(_, rows)| rows > 64).collect();
    let layers = model.spec.layers.len();
    for pass in large.chunks(layers) {
        assert!(pass.iter().enumerate().all(|(layer, call)| *call == (layer, pass[0].1)), "{pass:?}");
    }
    assert!(large.len() >= 5 * layers, "the chunks of three prompts");
    assert!(lent.iter().enumerate().all(|(turn, &lend)| lend == (turn % 2 == 0)), "{lent:?}");
    assert_eq!(lent.last(), Some(&false), "what is lent comes back before the last tokens are written");
    for (prompt, answer) in prompts.iter().zip(&together) {
        let alone = ask(&mut scheduler(0, step_by_step(1)), prompt, &[], 6);
        assert_eq!(alone.log(|log| log.answer.clone()), answer.log(|log| log.answer.clone()));
    }
}
