//! A model whose experts are many and small, and engines on it.
#![allow(dead_code)] // each test uses its part

use std::path::PathBuf;
use std::sync::Arc;

use engine::{Cancel, Engine, Request};
use experts::{Layout, Monitor, Options, Reader, Store};
use forge::{Control, ExpertPart, LayerType, Mix, Recipe, Shape, SynthOptions, synth};
use model::{ExpertSource, KvType, Limits, MappedExperts, Model};

/// A model in a file that disappears with it.
pub struct Synthetic {
    pub model: Arc<Model>,
    pub path: PathBuf,
}

impl Drop for Synthetic {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Ten layers of 32 experts, 4 used. Down matrices are whole blocks of direct reads, gate and up are not; the last
/// two layers are larger if `classes`.
pub fn synthetic(name: &str, classes: bool) -> Synthetic {
    let shape = Shape {
        layers: 10,
        hidden: 256,
        vocab: 512,
        context: 8192,
        heads: 2,
        kv_heads: 1,
        head_dim: 64,
        rope_dims: 16,
        key_heads: 2,
        value_heads: 2,
        state_dim: 64,
        experts: 32,
        experts_used: 4,
        expert_width: 256,
        shared_width: 256,
        ..Shape::default()
    };
    let quant = quant::Type::Q8_0;
    let last = LayerType { part: ExpertPart::All, first: 8, last: 9, ty: quant };
    let mix = Mix {
        down: Some(quant),
        layers: if classes { vec![last] } else { Vec::new() },
        ..Recipe::Iq2Xxs.mix(shape.layers)
    };
    // Some experts are popular, as in real models.
    let options = SynthOptions { shape, mix, skew: 0.5, ..SynthOptions::default() };
    let path = std::env::temp_dir().join(format!("redlite-experts-{name}-{}.gguf", std::process::id()));
    synth(&path, &options, &mut |_| Control::Continue).unwrap();
    Synthetic { model: Arc::new(Model::open(&path).unwrap()), path }
}

/// Bytes of `slots` slots, for a reader with `alignment`.
pub fn budget(model: &Model, slots: usize, alignment: usize) -> u64 {
    // The largest size, which is what slots have when there are few.
    let layout = Layout::new(model, Some(u64::MAX / 2), alignment).unwrap();
    let few = Layout::new(model, Some(layout.bytes() / 8), alignment).unwrap();
    few.bytes() / few.slots() as u64 * slots as u64
}

/// An engine, and a view of its store.
pub fn engine(
    model: &Arc<Model>,
    threads: usize,
    store: Option<(Options, Option<Box<dyn Reader>>)>,
) -> (Engine, Option<Monitor>) {
    let limits = Limits { pass_rows: 1024 + model::GRID, positions: 4096, kv: KvType::F16 };
    let weights = model.load(&mut |_, _| ()).unwrap();
    let options = cpu::Options { threads: Some(threads), ..cpu::Options::default() };
    let mut cpu = cpu::Cpu::new(model.clone(), weights, limits, options).unwrap();
    let mut monitor = None;
    let source: Box<dyn ExpertSource + Send> = match store {
        None => Box::new(MappedExperts::new(model)),
        Some((options, reader)) => {
            let store = match reader {
                None => Store::new(model, &mut cpu, options),
                Some(reader) => Store::with_reader(model, &mut cpu, options, reader),
            };
            let store = store.unwrap();
            monitor = Some(store.monitor());
            Box::new(store)
        }
    };
    let options = engine::Options { chunk: 1024, context: 4096 };
    (Engine::new(model.clone(), Box::new(cpu), source, options), monitor)
}

/// Tokens that repeat themselves a little.
pub fn tokens(len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| ((i * i / 7 + i * 37) % 509) as u32).collect()
}

/// Logits behind a prompt, and behind each of `more` tokens chosen greedily.
pub fn logits(engine: &mut Engine, prompt: &[u32], more: usize) -> Vec<Vec<f32>> {
    let mut session = engine.open();
    let mut all = vec![engine.ingest(&mut session, prompt, &mut Request::default()).unwrap().logits];
    for _ in 0..more {
        let last = all.last().unwrap();
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        all.push(engine.step(&mut session, best as u32, &Cancel::new()).unwrap());
    }
    engine.close(session);
    all
}
