//! Starting the backend, on machines with and without a GPU.

use std::sync::Arc;

use model::{KvType, Limits};
use quant::Type;
use redlite_cuda::{Cuda, Error, Options, Source, Target, package, sources};
use testkit::{TinyModel, TinyOptions};

const LIMITS: Limits = Limits { pass_rows: 64, positions: 256, kv: KvType::F16 };

fn start(options: TinyOptions) -> Result<Cuda, Error> {
    let tiny = TinyModel::new(options);
    let weights = tiny.model.load(&mut |_, _| {}).unwrap();
    Cuda::new(Arc::clone(&tiny.model), &weights, LIMITS, Options::default())
}

#[test]
fn what_is_missing_is_said() {
    match start(TinyOptions::default()) {
        Ok(_) => {}
        Err(error @ (Error::NoDriver | Error::NoDevice(_))) => {
            assert!(error.to_string().contains("--backend cpu"), "{error}");
        }
        Err(error @ Error::NoCompiler) => assert!(error.to_string().contains("LD_LIBRARY_PATH"), "{error}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn shapes_the_kernels_do_not_know_are_refused_before_anything_is_touched() {
    let error = start(TinyOptions { head: 20, ..TinyOptions::default() }).err().unwrap();
    assert!(matches!(error, Error::Shape { found: 20, .. }), "{error}");
    assert!(error.to_string().contains("the size of a DeltaNet head is 20"), "{error}");
}

#[test]
fn kernels_are_written_for_the_gpu_and_the_model_at_hand() {
    assert_eq!(Target::of((9, 0), 232_448).arch, "sm_90a");
    assert_eq!(Target::of((8, 9), 101_376).arch, "sm_89");
    let tiny = TinyModel::new(TinyOptions::default());
    let large = Target::named("sm_90a");
    let all = sources(&large, &tiny.model.spec, KvType::F32);
    let defines: Vec<&String> = all.iter().flat_map(|source| &source.options).collect();
    assert!(defines.contains(&&"-DDIM=32".to_string()) && defines.contains(&&"-DKV_F32=1".to_string()));
    // Blocks are decoded on their way to the tensor cores where shared memory has room for both.
    assert!(Source::experts(&large, Type::IQ2_XXS).is_some());
    assert!(Source::experts(&large, Type::F32).is_none());
    assert!(Source::experts(&Target::named("sm_89"), Type::IQ2_XXS).is_none());
    let text = Source::weights(&large, Type::IQ2_XXS).text;
    assert!(text.contains("IQ2_XXS_GRID[256] = {") && text.contains("IQ1_GRID[1] = {"));
}

#[test]
fn what_is_packaged_serves_every_gpu_without_a_compiler() {
    let names: Vec<String> = package().iter().map(Source::file_name).collect();
    let has = |source: &Source| names.contains(&source.file_name());
    for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let target = Target::packaged(capability);
        for head in [32, 128] {
            let tiny = TinyModel::new(TinyOptions { hidden: 256, head, ..TinyOptions::default() });
            for kv in [KvType::F16, KvType::F32] {
                let missing = sources(&target, &tiny.model.spec, kv).into_iter().find(|source| !has(source));
                assert!(missing.is_none(), "{capability:?}: {}", missing.unwrap().name);
            }
        }
        let all: Vec<Type> = Type::all().collect();
        assert!(has(&Source::few(&target, &all)) && has(&Source::fetch(&target)));
        assert!(all.iter().all(|&ty| has(&Source::weights(&target, ty))));
        assert!(all.iter().all(|&ty| Source::experts(&target, ty).is_none_or(|source| has(&source))));
    }
    let (hopper, others) = (Target::packaged((9, 0)), Target::packaged((12, 0)));
    assert!(Source::gemm(&hopper).file_name().ends_with(".cubin"));
    assert!(Source::gemm(&others).file_name().ends_with(".ptx"), "the driver compiles it further");
    assert_eq!(names.len(), names.iter().collect::<std::collections::HashSet<_>>().len());
}
