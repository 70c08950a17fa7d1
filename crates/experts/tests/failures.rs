//! Files that cannot be read, or change, and budgets that do not suffice.

mod common;

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, IoSliceMut, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{budget, engine, logits, synthetic, tokens};
use engine::Request;
use experts::{Error, Io, Options, Reader, Store, reader};

/// A disk that can be told to fail.
struct Failing {
    inner: Box<dyn Reader>,
    broken: Arc<AtomicBool>,
    panics: bool,
}

impl Reader for Failing {
    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn read(
        &self,
        shard: usize,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        needed: usize,
    ) -> io::Result<()> {
        if self.broken.load(Ordering::Relaxed) {
            assert!(!self.panics, "a bug in a reader");
            return Err(io::Error::from_raw_os_error(5));
        }
        self.inner.read(shard, offset, buffers, needed)
    }
}

#[test]
fn a_failing_disk_is_an_error_that_names_the_tensor_and_passes() {
    let synthetic = synthetic("failing", false);
    let model = &synthetic.model;
    let (mut mapped, _) = engine(model, 1, None);
    let expected = logits(&mut mapped, &tokens(300), 4);
    for (prompt, panics) in [(300, false), (3, false), (300, true)] {
        let broken = Arc::new(AtomicBool::new(true));
        let inner = reader::open(model, Io::Cached).unwrap();
        let reader = Box::new(Failing { inner, broken: broken.clone(), panics });
        let options = Options { budget: Some(budget(model, 40, 1)), verify: true, ..Options::default() };
        let (mut bounded, _) = engine(model, 1, Some((options, Some(reader))));
        let mut session = bounded.open();
        let result = bounded.ingest(&mut session, &tokens(prompt), &mut Request::default());
        let error = result.unwrap_err().to_string();
        let named = error.contains(synthetic.path.to_str().unwrap()) && error.contains("blk.0.ffn_");
        assert!(named && error.contains("at offset"), "{error}");
        assert!(error.contains(if panics { "panicked" } else { "os error 5" }), "{error}");
        assert!(session.is_empty());
        // The disk has recovered: so does the store, without stale bytes.
        broken.store(false, Ordering::Relaxed);
        assert_eq!(logits(&mut bounded, &tokens(300), 4), expected);
    }
}

#[test]
fn a_file_cut_short_or_written_to_is_an_error() {
    for (cut, message) in [(true, "file"), (false, "changed while it was in use")] {
        let synthetic = synthetic(if cut { "cut" } else { "written" }, false);
        let model = &synthetic.model;
        let options = Options { budget: Some(budget(model, 12, 1)), ..Options::default() };
        let (mut bounded, _) = engine(model, 1, Some((options, None)));
        let file = OpenOptions::new().write(true).open(&synthetic.path).unwrap();
        let len = file.metadata().unwrap().len();
        if cut {
            // Behind the embedding, which is read through the mapping.
            file.set_len(len - len / 4).unwrap();
        } else {
            (&file).write_all(b"GGUF").unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        let mut session = bounded.open();
        let result = bounded.ingest(&mut session, &tokens(300), &mut Request::default());
        let error = result.unwrap_err().to_string();
        assert!(error.contains("ffn_") && error.contains(message), "{error}");
    }
}

#[test]
fn a_replaced_file_is_not_read() {
    let synthetic = synthetic("replaced", false);
    let model = &synthetic.model;
    let copy = synthetic.path.with_extension("copy");
    std::fs::copy(&synthetic.path, &copy).unwrap();
    std::fs::rename(&copy, &synthetic.path).unwrap();
    match reader::open(model, Io::Direct) {
        Err(Error::File { source, .. }) => {
            assert!(source.to_string().contains("taken its place"), "{source}")
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
    // The open file is still the right one.
    assert!(reader::open(model, Io::Cached).is_ok());
}

#[test]
fn a_budget_below_the_floor_says_what_would_do() {
    let synthetic = synthetic("floor", false);
    let model = &synthetic.model;
    let limits = model::Limits { pass_rows: 128, positions: 256, kv: model::KvType::F16 };
    let mut cpu = backend(model, limits);
    let floor = budget(model, 12, 1);
    let options = |budget| Options { budget: Some(budget), ..Options::default() };
    assert!(Store::new(model, &mut cpu, options(floor)).is_ok());
    match Store::new(model, &mut cpu, options(floor - 1)) {
        Err(Error::Budget { needed, budget, used: 4 }) => assert_eq!((needed, budget), (floor, floor - 1)),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

fn backend(model: &Arc<model::Model>, limits: model::Limits) -> cpu::Cpu {
    let weights = model.load(&mut |_, _| ()).unwrap();
    cpu::Cpu::new(model.clone(), weights, limits, cpu::Options::default()).unwrap()
}

#[test]
fn short_reads_of_the_mapping_are_an_error() {
    let synthetic = synthetic("mapping", false);
    let reader = reader::open(&synthetic.model, Io::Mapped).unwrap();
    let len = synthetic.model.gguf.shards()[0].size();
    let mut buffer = [0; 64];
    let read = |offset, buffer: &mut [u8]| reader.read(0, offset, &mut [IoSliceMut::new(buffer)], 64);
    assert!(read(len - 64, &mut buffer).is_ok());
    assert_eq!(read(len - 63, &mut buffer).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}
