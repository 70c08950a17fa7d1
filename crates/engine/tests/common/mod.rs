//! Engines for tests.
#![allow(dead_code, reason = "each test file uses a part of this")]

pub mod served;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::{Engine, Options};
use model::{Backend, KvType, Limits, MappedExperts, Model};

/// A path relative to the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The small trained model.
pub fn pocket() -> Arc<Model> {
    Arc::new(Model::open(&repository("models/pocket.gguf")).unwrap())
}

/// A backend by name, f32 keys and values; `cpu` computes exactly, `cpu-int8` rounds activations.
pub fn backend(name: &str, model: &Arc<Model>, positions: usize) -> Box<dyn Backend> {
    let limits = Limits { pass_rows: 2048 + model::GRID, positions, kv: KvType::F32 };
    match name {
        "cpu" | "cpu-int8" => {
            let weights = model.load(&mut |_, _| ()).unwrap();
            let options = cpu::Options { exact: name == "cpu", ..cpu::Options::default() };
            Box::new(cpu::Cpu::new(model.clone(), weights, limits, options).unwrap())
        }
        _ => {
            Box::new(reference::Reference::new(model.clone(), limits, reference::Options::default()).unwrap())
        }
    }
}

/// An engine on a backend by name.
pub fn engine(name: &str, model: &Arc<Model>, options: Options) -> Engine {
    let backend = backend(name, model, options.context + 1024);
    Engine::new(model.clone(), backend, Box::new(MappedExperts::new(model)), options)
}
