//! The loop over stages: which calls a backend sees, in which order, and what an observer is told.

use std::ops::Range;
use std::time::{Duration, Instant};

use model::{
    Backend, Capabilities, Driver, Error, ExpertSource, Intermediate, LayerCall, Matrix, MatrixView,
    Observer, Pass, PassId, PlacedExpert, Progress, Result, SequenceId, Slot, Snapshot, Spec, Stage, Step,
    Wave,
};
use testkit::{TinyModel, TinyOptions};

/// Three DeltaNet layers and an attention layer.
fn spec() -> Spec {
    TinyModel::new(TinyOptions { hidden: 16, width: 8, head: 8, layers: 4, ..TinyOptions::default() })
        .model
        .spec
        .clone()
}

/// A backend that writes down what it is asked for.
struct Log {
    capabilities: Capabilities,
    /// What it says when it is asked to repeat a pass.
    repeats: fn() -> Result<bool>,
    calls: Vec<String>,
}

impl Log {
    fn new() -> Log {
        let capabilities = Capabilities {
            name: "log",
            variant: String::new(),
            kernel_version: 1,
            block_rows: 128,
            smallest_chunk: 1,
        };
        Log { capabilities, repeats: || Ok(false), calls: Vec::new() }
    }

    fn note(&mut self, call: String) -> Result<()> {
        self.calls.push(call);
        Ok(())
    }

    fn stage(&mut self, name: &str, layer: usize, rows: Range<usize>) -> Result<()> {
        self.note(format!("{name}.{layer} {rows:?}"))
    }
}

impl Backend for Log {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn create(&mut self) -> SequenceId {
        SequenceId(0)
    }
    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        Ok(sequence)
    }
    fn free(&mut self, _: SequenceId) {}
    fn position(&self, _: SequenceId) -> Result<usize> {
        Ok(0)
    }
    fn snapshot(&mut self, id: SequenceId) -> Result<Snapshot> {
        Err(Error::NoSequence(id.0))
    }
    fn restore(&mut self, _: &Snapshot) -> Result<SequenceId> {
        Ok(SequenceId(0))
    }
    fn begin(&mut self, pass: &Pass) -> Result<PassId> {
        self.note(format!("begin {}", pass.rows()))?;
        Ok(PassId(7))
    }
    fn commit(&mut self, _: PassId) -> Result<()> {
        self.note("commit".to_string())
    }
    fn abort(&mut self, pass: PassId) {
        self.calls.push(format!("abort {}", pass.0));
    }
    fn repeat(&mut self, pass: PassId) -> Result<bool> {
        self.note(format!("repeat {}", pass.0))?;
        (self.repeats)()
    }
    fn embed(&mut self, _: PassId, rows: Range<usize>) -> Result<()> {
        self.note(format!("embed {rows:?}"))
    }
    fn delta_project(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("delta.project", layer, rows)
    }
    fn delta_mix(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("delta.mix", layer, rows)
    }
    fn delta_out(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("delta.out", layer, rows)
    }
    fn attn_project(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("attn.project", layer, rows)
    }
    fn attn_mix(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("attn.mix", layer, rows)
    }
    fn attn_out(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("attn.out", layer, rows)
    }
    fn route(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("route", layer, rows)
    }
    fn shared(&mut self, _: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage("shared", layer, rows)
    }
    fn routes(&mut self, _: PassId, layer: usize) -> Result<Vec<u32>> {
        self.note(format!("routes.{layer}"))?;
        Ok(vec![1, 4, 5])
    }
    fn experts(&mut self, _: PassId, layer: usize, wave: &Wave) -> Result<()> {
        let ids: Vec<u32> = wave.experts.iter().map(|placed| placed.expert).collect();
        self.note(format!("experts.{layer} {ids:?}{}", if wave.last { " last" } else { "" }))
    }
    fn predict(&mut self, _: PassId, layer: usize, margin: usize) -> Result<Option<Vec<u32>>> {
        self.note(format!("predict.{layer}"))?;
        Ok(Some(vec![margin as u32]))
    }
    fn head(&mut self, _: PassId) -> Result<()> {
        self.note("head".to_string())
    }
    fn logits(&mut self, _: PassId) -> Result<MatrixView<'_>> {
        Ok(MatrixView::default())
    }
    fn hidden(&mut self, _: PassId) -> Result<Matrix> {
        Ok(Matrix::default())
    }
    fn read(&mut self, _: PassId, _: Intermediate) -> Result<Option<Matrix>> {
        Ok(None)
    }
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Gives one expert at a time: those that rows chose, if it asks for them. Each takes a while.
struct Singles {
    asks: bool,
    rests: bool,
    fail_at: Option<u32>,
    /// What it is told besides.
    heard: Vec<String>,
}

impl Singles {
    fn new(asks: bool) -> Singles {
        Singles { asks, rests: false, fail_at: None, heard: Vec::new() }
    }
}

const WHILE: Duration = Duration::from_micros(500);

impl ExpertSource for Singles {
    fn rests(&self, _: usize) -> bool {
        self.rests
    }

    fn needs_routes(&self, _: usize) -> bool {
        self.asks
    }

    fn start(&mut self, call: &LayerCall) -> Result<()> {
        assert_eq!(call.used.is_some(), self.asks);
        self.heard.push(format!("start {} {}", call.layer, call.rows));
        Ok(())
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave> {
        let started = Instant::now();
        while started.elapsed() < WHILE {}
        let used = call.used.unwrap_or(&[0, 1]);
        let left: Vec<u32> = used.iter().copied().filter(|&expert| expert >= from).collect();
        let expert = left[0];
        if self.fail_at == Some(expert) {
            return Err(Error::Pass("the disk is gone".to_string()));
        }
        let slot = Slot { arena: 1, gate: 0, up: 0, down: 0 };
        Ok(Wave { experts: [PlacedExpert { expert, slot }].into(), last: left.len() == 1 })
    }

    fn release(&mut self) {
        self.heard.push("release".to_string());
    }

    fn wants_prediction(&self, _: usize) -> Option<usize> {
        self.asks.then_some(2)
    }

    fn predicted(&mut self, layer: usize, experts: &[u32]) {
        self.heard.push(format!("predicted {layer} {experts:?}"));
    }
}

/// Steps and their times.
#[derive(Default)]
struct Seen(Vec<(Step, Duration)>);

impl Observer for Seen {
    fn after(&mut self, step: &Step, elapsed: Duration, _: &mut dyn Backend, pass: PassId) -> Result<()> {
        assert_eq!(pass, PassId(7));
        self.0.push((step.clone(), elapsed));
        Ok(())
    }
}

fn pass(rows: usize, logits: &[usize]) -> Pass {
    let mut pass = Pass::new();
    pass.push(SequenceId(0), 0, &vec![0; rows]);
    pass.logits = logits.to_vec();
    pass
}

#[test]
fn blocks_inside_a_layer_and_experts_once_for_all_rows() {
    let (mut log, mut seen) = (Log::new(), Seen::default());
    let mut driver = Driver::begin(&mut log, &spec(), &pass(200, &[199])).unwrap();
    let mut experts = Singles::new(true);
    driver.finish(&mut log, &mut experts, &mut seen).unwrap();
    assert!(driver.progress().is_done() && driver.next_step().is_none());

    let mut expected = vec!["begin 200".to_string(), "embed 0..128".into(), "embed 128..200".into()];
    for layer in 0..4 {
        let kind = if layer == 3 { "attn" } else { "delta" };
        for rows in ["0..128", "128..200"] {
            expected.extend(["project", "mix", "out"].map(|part| format!("{kind}.{part}.{layer} {rows}")));
            expected.extend(["route", "shared"].map(|stage| format!("{stage}.{layer} {rows}")));
        }
        expected.push(format!("routes.{layer}"));
        expected.extend((layer < 3).then(|| format!("predict.{}", layer + 1)));
        expected.extend(["[1]", "[4]", "[5] last"].map(|wave| format!("experts.{layer} {wave}")));
    }
    expected.push("head".into());
    assert_eq!(log.calls, expected);
    let first = ["start 0 200", "predicted 1 [2]", "release", "release", "release", "start 1 200"];
    assert_eq!(experts.heard[..6], first);
    // The observer hears of every step once; experts took as long as all their waves.
    assert_eq!(seen.0.len(), driver.progress().total);
    let times: Vec<Duration> =
        seen.0.iter().filter(|(step, _)| step.stage == Stage::Experts).map(|(_, time)| *time).collect();
    assert!(times.len() == 4 && times.iter().all(|&time| time >= 3 * WHILE), "{times:?}");
}

#[test]
fn a_pass_stops_between_any_two_calls_and_goes_on() {
    let (mut log, mut seen) = (Log::new(), Seen::default());
    let mut driver = Driver::begin(&mut log, &spec(), &pass(3, &[])).unwrap();
    let mut experts = Singles::new(false);
    let total = driver.progress().total;
    assert_eq!(total, 1 + 4 * 6, "one block; no head, since nobody wants logits");
    let mut advances = 0;
    loop {
        let calls = log.calls.len();
        let Progress { done, .. } = driver.advance(&mut log, &mut experts, &mut seen).unwrap();
        advances += 1;
        assert_eq!(log.calls.len(), calls + 1, "one call at a time, and no routes unless asked for");
        assert_eq!(done, seen.0.len());
        if done == total {
            break;
        }
    }
    assert_eq!(advances, total + 4, "two waves in each of four layers");
    driver.advance(&mut log, &mut experts, &mut seen).unwrap();
    assert_eq!(seen.0.len(), total, "nothing happens after the end");
}

#[test]
fn errors_surface_and_bad_passes_never_begin() {
    let mut log = Log::new();
    let mut driver = Driver::begin(&mut log, &spec(), &pass(3, &[2])).unwrap();
    let mut experts = Singles { fail_at: Some(4), ..Singles::new(true) };
    let error = driver.finish(&mut log, &mut experts, &mut Seen::default()).unwrap_err();
    assert!(error.to_string().contains("the disk is gone"));
    assert_eq!(log.calls.last().unwrap(), "experts.0 [1]");
    let mut log = Log::new();
    assert!(Driver::begin(&mut log, &spec(), &pass(3, &[3])).is_err());
    assert!(log.calls.is_empty(), "the backend has not heard of it");
}

#[test]
fn a_pass_runs_in_one_go_where_experts_rest_and_the_backend_can() {
    let run = |rests, repeats, fail_at| {
        let mut log = Log { repeats, ..Log::new() };
        let mut experts = Singles { rests, fail_at, ..Singles::new(true) };
        let result = Driver::run(&mut log, &mut experts, &spec(), &pass(1, &[0]));
        (result.map_err(|error| error.to_string()), log.calls)
    };
    let (id, calls) = run(true, || Ok(true), None);
    assert_eq!((id, calls.join(", ")), (Ok(PassId(7)), "begin 1, repeat 7".to_string()));
    let (id, stages) = run(false, || Ok(true), None);
    assert_eq!(
        (id, stages.len(), &*stages[1]),
        (Ok(PassId(7)), 1 + 1 + 5 * 4 + 4 + 3 + 4 * 3 + 1, "embed 0..1")
    );
    let (id, calls) = run(true, || Ok(false), None);
    assert_eq!((id, &*calls[1], &calls[2..]), (Ok(PassId(7)), "repeat 7", &stages[1..]));
    // After a failure the pass is given up, once.
    let (result, calls) = run(true, || Err(Error::Pass("the GPU is gone".to_string())), None);
    assert!(result.unwrap_err().contains("the GPU is gone"));
    assert_eq!(calls.join(", "), "begin 1, repeat 7, abort 7");
    let (result, calls) = run(false, || Ok(true), Some(4));
    assert!(result.unwrap_err().contains("the disk is gone"));
    assert_eq!(calls[calls.len() - 2..], ["experts.0 [1]", "abort 7"]);
}
