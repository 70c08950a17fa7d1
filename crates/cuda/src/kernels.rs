//! The kernels, compiled and on the GPU.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use model::{KvType, Model, Spec};
use quant::Type;

use crate::compile;
use crate::dense::DenseKernels;
use crate::driver::{Device, Function, Module, failed};
use crate::error::Result;
use crate::sources::{PAIR_TILES, PairTiles, Source, Target, mix_shared, pair_buffers, splits_heads};

/// Kernels that touch weights of one type.
pub(crate) struct WeightKernels {
    pub(crate) decode_f32: Function,
    pub(crate) decode_bf16: Function,
    pub(crate) decode_experts: Function,
    pub(crate) decode_split: Function,
    pub(crate) embed: Function,
}

/// Products of the pairs of experts with blocks of one type, by tiles of one kind.
#[derive(Clone, Copy)]
pub(crate) struct ExpertKernels {
    pub(crate) gated: Function,
    pub(crate) down: Function,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
    pub(crate) tiles: PairTiles,
}

/// Every kernel of a model.
pub(crate) struct Kernels {
    pub(crate) gemm_store: Function,
    pub(crate) gemm_add: Function,
    pub(crate) gemm_scale: Function,
    pub(crate) gemm_gated: Function,
    pub(crate) gemm_split: Function,
    pub(crate) gemm_experts_gated: Function,
    pub(crate) gemm_experts_down: Function,
    pub(crate) rms_norm: Function,
    pub(crate) route: Function,
    pub(crate) group_pairs: Function,
    pub(crate) group_tiles: Function,
    pub(crate) sum_pairs: Function,
    pub(crate) largest: Function,
    pub(crate) delta_convolve: Function,
    pub(crate) delta_window: Function,
    pub(crate) delta_prepare: Function,
    pub(crate) delta_scan: Function,
    pub(crate) delta_tail: Function,
    pub(crate) delta_single: Function,
    /// Where clusters are.
    pub(crate) delta_split: Option<Function>,
    pub(crate) attn_rotations: Function,
    pub(crate) attn_prepare: Function,
    pub(crate) attn_mix: Function,
    /// The same of two heads that share a kv head, where there is one, and its bytes of shared memory.
    pub(crate) attn_mix_pair: Option<(Function, usize)>,
    pub(crate) attn_single: Function,
    pub(crate) attn_join: Function,
    pub(crate) few_rows: Function,
    pub(crate) many_tiles: Function,
    pub(crate) single_spans: Function,
    pub(crate) few_spans: Function,
    pub(crate) more_spans: Function,
    pub(crate) few_head: Function,
    pub(crate) more_head: Function,
    pub(crate) few_experts: Function,
    pub(crate) more_experts: Function,
    /// Types by the numbers the kernels of few rows know them by.
    pub(crate) few_types: Vec<Type>,
    /// The same of those of their experts.
    pub(crate) few_expert_types: Vec<Type>,
    /// Of GPUs that have them.
    pub(crate) dense: Option<DenseKernels>,
    weights: BTreeMap<Type, WeightKernels>,
    experts: BTreeMap<Type, [ExpertKernels; 2]>,
    /// Keeps the functions alive.
    _modules: Vec<Module>,
}

impl Kernels {
    /// Compiles what `model` needs, several sources at a time; experts perhaps without decoding.
    pub(crate) fn new(
        device: &Arc<Device>,
        target: &Target,
        model: &Model,
        (kv, decode_experts): (KvType, bool),
    ) -> Result<Kernels> {
        let types = types(model);
        let mut sources = sources(target, &model.spec, kv);
        // One source serves all models where nothing can be compiled.
        let all = || Type::all().collect();
        let (few_types, few_expert_types) =
            if compile::present() { (dense_types(model), with_shared(model)) } else { (all(), all()) };
        sources.push(Source::few(target, &few_types));
        sources.push(Source::few_experts(target, &few_expert_types));
        sources.extend(types.iter().map(|&ty| Source::weights(target, ty)));
        let of_experts = expert_types(model);
        let fused: Vec<(Type, Source)> = of_experts
            .into_iter()
            .filter_map(|ty| Some((ty, Source::experts(target, ty)?)))
            .map(|(ty, source)| (ty, if decode_experts { source } else { source.without_decoding() }))
            .collect();
        sources.extend(fused.iter().map(|(_, source)| source.clone()));
        let mut modules = load(device, &sources)?.into_iter();
        let mut next = || modules.next().expect("a module for each source");
        let (gemm, rows, delta, attention) = (next(), next(), next(), next());
        let dense = Source::dense(target).map(|_| next());
        let (few, few_of_experts) = (next(), next());
        let find = |module: &Module, name: &'static str| module.function(name).map_err(failed(name));
        let early = |module: &Module, name: &'static str| module.early(name).map_err(failed(name));
        let mut weights = BTreeMap::new();
        let mut of_types = Vec::new();
        for ty in types {
            let module = next();
            weights.insert(ty, WeightKernels::new(&module)?);
            of_types.push(module);
        }
        let mut experts = BTreeMap::new();
        for (ty, _) in fused {
            let module = next();
            let find = |name: &'static str, tiles: PairTiles| {
                let (_, shared) = pair_buffers(target, ty, tiles).expect("it has a source");
                Ok::<_, crate::Error>((module.early(name).map_err(failed(name))?, shared))
            };
            let kernels = |gated, down, tiles| {
                let ((gated, shared), (down, _)) = (find(gated, tiles)?, find(down, tiles)?);
                Ok::<_, crate::Error>(ExpertKernels { gated, down, shared, tiles })
            };
            let [low, high] = PAIR_TILES;
            let low = kernels("experts_gated_low", "experts_down_low", low)?;
            experts.insert(ty, [low, kernels("experts_gated_high", "experts_down_high", high)?]);
            of_types.push(module);
        }
        Ok(Kernels {
            gemm_store: find(&gemm, "gemm_store")?,
            gemm_add: find(&gemm, "gemm_add")?,
            gemm_scale: find(&gemm, "gemm_scale")?,
            gemm_gated: find(&gemm, "gemm_gated")?,
            gemm_split: find(&gemm, "gemm_split")?,
            gemm_experts_gated: find(&gemm, "gemm_experts_gated")?,
            gemm_experts_down: find(&gemm, "gemm_experts_down")?,
            rms_norm: early(&rows, "rms_norm")?,
            route: find(&rows, "route")?,
            group_pairs: early(&rows, "group_pairs")?,
            group_tiles: early(&rows, "group_tiles")?,
            sum_pairs: early(&rows, "sum_pairs")?,
            largest: find(&rows, "largest")?,
            delta_convolve: find(&delta, "delta_convolve")?,
            delta_window: find(&delta, "delta_window")?,
            delta_prepare: find(&delta, "delta_prepare")?,
            delta_scan: find(&delta, "delta_scan")?,
            delta_tail: find(&delta, "delta_tail")?,
            delta_single: early(&delta, "delta_single")?,
            delta_split: splits_heads(target, model.spec.delta.head_dim)
                .then(|| early(&delta, "delta_split"))
                .transpose()?,
            attn_rotations: find(&attention, "attn_rotations")?,
            attn_prepare: early(&attention, "attn_prepare")?,
            attn_mix: find(&attention, "attn_mix")?,
            attn_mix_pair: mix_shared(target, model.spec.attention.head_dim)
                .map(|shared| Ok::<_, crate::Error>((find(&attention, "attn_mix_pair")?, shared)))
                .transpose()?,
            attn_single: early(&attention, "attn_single")?,
            attn_join: early(&attention, "attn_join")?,
            few_rows: early(&few, "few_rows")?,
            many_tiles: early(&few, "many_tiles")?,
            single_spans: early(&few, "single_spans")?,
            few_spans: early(&few, "few_spans")?,
            more_spans: early(&few, "more_spans")?,
            few_head: early(&few, "few_head")?,
            more_head: early(&few, "more_head")?,
            few_experts: early(&few_of_experts, "few_experts")?,
            more_experts: early(&few_of_experts, "more_experts")?,
            few_types,
            few_expert_types,
            dense: dense.as_ref().map(|module| DenseKernels::new(module, target)).transpose()?,
            weights,
            experts,
            _modules: [gemm, rows, delta, attention, few, few_of_experts]
                .into_iter()
                .chain(dense)
                .chain(of_types)
                .collect(),
        })
    }

    /// Kernels of weights of type `ty`, which the model has.
    pub(crate) fn of(&self, ty: Type) -> &WeightKernels {
        &self.weights[&ty]
    }

    /// Kernels that decode expert weights of type `ty` as they multiply, where there are any: for few pairs of an expert,
    /// and for many.
    pub(crate) fn experts_of(&self, ty: Type) -> Option<[ExpertKernels; 2]> {
        self.experts.get(&ty).copied()
    }
}

impl WeightKernels {
    pub(crate) fn new(module: &Module) -> Result<WeightKernels> {
        let find = |name: &'static str| module.function(name).map_err(failed(name));
        let early = |name: &'static str| module.early(name).map_err(failed(name));
        Ok(WeightKernels {
            decode_f32: find("decode_f32")?,
            decode_bf16: early("decode_bf16")?,
            decode_experts: find("decode_experts")?,
            decode_split: early("decode_split")?,
            embed: find("embed")?,
        })
    }
}

/// Everything but the kernels of weight types.
pub fn sources(target: &Target, spec: &Spec, kv: KvType) -> Vec<Source> {
    let mut sources = vec![
        Source::gemm(target),
        Source::rows(target),
        Source::delta(target, spec.delta.head_dim),
        Source::attention(target, spec.attention.head_dim, kv),
    ];
    sources.extend(Source::dense(target));
    sources
}

/// Every source that any model asks for on a GPU without a compiler: what is compiled for those who have none.
pub fn package() -> Vec<Source> {
    let all: Vec<Type> = Type::all().collect();
    let of_target = |capability| {
        let target = Target::packaged(capability);
        let mut sources = vec![
            Source::gemm(&target),
            Source::rows(&target),
            Source::fetch(&target),
            Source::peaks(&target),
        ];
        sources.extend(Source::dense(&target));
        sources.push(Source::few(&target, &all));
        sources.push(Source::few_experts(&target, &all));
        // The heads that are accepted.
        sources.extend([32, 64, 96, 128].map(|dim| Source::delta(&target, dim)));
        let kinds = [KvType::F16, KvType::F32];
        let heads = [32, 64, 128, 256].into_iter().flat_map(|dim| kinds.map(|kv| (dim, kv)));
        sources.extend(heads.map(|(dim, kv)| Source::attention(&target, dim, kv)));
        sources.extend(all.iter().map(|&ty| Source::weights(&target, ty)));
        sources.extend(all.iter().filter_map(|&ty| Source::experts(&target, ty)));
        sources
    };
    [(9, 0), (8, 0)].into_iter().flat_map(of_target).collect()
}

/// Types of the model's matrices.
fn types(model: &Model) -> Vec<Type> {
    let mut types = dense_types(model);
    types.extend(expert_types(model));
    types.push(model.embedding.ty);
    distinct(types)
}

/// Types of dense matrices; f32 is among them.
fn dense_types(model: &Model) -> Vec<Type> {
    let mut types = vec![Type::F32];
    let mut note = |info: &model::MatrixInfo| {
        types.push(info.ty);
        Ok::<(), crate::Error>(())
    };
    model.weights.map(&mut note, &mut |_| Ok(())).expect("noting cannot fail");
    distinct(types)
}

/// Types of the routed experts.
pub(crate) fn expert_types(model: &Model) -> Vec<Type> {
    let all = model.experts.iter().flat_map(|layer| [layer.gate.ty, layer.up.ty, layer.down.ty]);
    distinct(all.collect())
}

/// Types of the routed experts, and of the shared ones' down matrices, which are computed with them.
fn with_shared(model: &Model) -> Vec<Type> {
    let mut types = expert_types(model);
    types.extend(model.weights.layers.iter().map(|layer| layer.moe.shared_down.ty));
    distinct(types)
}

fn distinct(mut types: Vec<Type>) -> Vec<Type> {
    types.sort_unstable();
    types.dedup();
    types
}

/// Compiles sources side by side and loads them.
pub(crate) fn load(device: &Arc<Device>, sources: &[Source]) -> Result<Vec<Module>> {
    // Whoever starts at the same time on another GPU finds everything on disk.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = sources.iter().map(|source| scope.spawn(|| compile::cached(source))).collect();
        threads.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    });
    sources
        .iter()
        .zip(compiled)
        .map(|(source, cubin)| {
            let native = !source.is_portable();
            Module::load(device, &cubin?, native).or_else(|_| {
                // Perhaps what was on disk is broken.
                compile::forget(source);
                Module::load(device, &compile::cached(source)?, native).map_err(failed("loading kernels"))
            })
        })
        .collect()
}
