//! Any bytes as a model file: refused with an error, or accepted and then every weight can be read.

#![no_main]

use gguf::Gguf;
use libfuzzer_sys::fuzz_target;
use model::{MappedExperts, Model};

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(bytes.to_vec()) else { return };
    if let Ok(vocabulary) = model::vocabulary(gguf.metadata()) {
        // May be refused, but must not panic.
        let _ = text::Tokenizer::new(vocabulary);
    }
    let model = match Model::from_gguf(gguf) {
        Ok(model) => model,
        Err(error) => {
            assert!(error.to_string().len() < 4096, "a message for people");
            return;
        }
    };
    check(&model, bytes.len());
});

fn check(model: &Model, size: usize) {
    let spec = &model.spec;
    assert_eq!(spec.layers.len(), model.experts.len());
    assert!(model.warnings.iter().all(|warning| warning.len() < 8192));
    if let Ok(weights) = model.load(&mut |_, _| {}) {
        assert_eq!(weights.layers.len(), spec.layers.len());
        assert_eq!(weights.output.rows, spec.vocab);
        assert_eq!(weights.output.row(spec.vocab - 1).len(), model.embedding.row_bytes());
    }
    // Matrices and experts lie in the file; only a tied output is counted that is there once.
    assert!(model.dense_bytes() <= 2 * size as u64 && model.expert_bytes() <= size as u64);
    let mut row = vec![0.0; spec.hidden];
    model.embed(spec.vocab as u32 - 1, &mut row).expect("whole rows");
    for (layer, layout) in model.experts.iter().enumerate() {
        for placed in model.mapped_experts(layer) {
            let slot = placed.slot;
            let matrices = [(slot.gate, layout.gate), (slot.up, layout.up), (slot.down, layout.down)];
            for (offset, matrix) in matrices {
                assert_eq!(model.file_bytes(offset, matrix.bytes()).len(), matrix.bytes());
            }
        }
    }
    let _ = MappedExperts::new(model);
}
