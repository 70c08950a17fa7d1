//! Compiles every kernel for some architectures and reports registers and spills: needs the compiler, no GPU.
//!
//! `compile MODEL ARCH … [SOURCE …]` takes the shape from a model file; of all sources, or those whose names begin so. Fails
//! if a kernel does not compile or a hot one spills. `KEEP=FOLDER` keeps the machine code there, for a disassembler.

use std::process::ExitCode;

use model::{KvType, Model};
use quant::Type;
use redlite_cuda::{Source, Target, compile, sources};

/// Kernels in which a spilled register costs time that shows, beside those of `dense.cu`.
const HOT: &[&str] = &[
    "gemm_store",
    "gemm_add",
    "gemm_scale",
    "gemm_gated",
    "gemm_split",
    "gemm_experts_gated",
    "gemm_experts_down",
    "experts_gated_low",
    "experts_gated_high",
    "experts_down_low",
    "experts_down_high",
    "delta_prepare",
    "delta_scan",
    "delta_single",
    "delta_split",
    "attn_mix",
    "attn_mix_pair",
    "attn_single",
    "few_rows",
    "many_tiles",
    "single_spans",
    "few_spans",
    "more_spans",
    "few_head",
    "more_head",
    "few_experts",
    "more_experts",
];

/// Types that a model's experts, with the shared ones, and its dense matrices have together: the recipes of `synth`.
const EXPERTS: [&[Type]; 3] = [
    &[Type::Q8_0, Type::IQ2_XXS],
    &[Type::Q8_0, Type::IQ2_XS, Type::IQ1_M],
    &[Type::Q8_0, Type::IQ3_XXS, Type::IQ3_S],
];
const DENSE: [&[Type]; 2] =
    [&[Type::F32, Type::Q8_0, Type::Q5_K, Type::Q6_K], &[Type::F32, Type::Q8_0, Type::Q4_K, Type::Q6_K]];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, rest @ ..] = &arguments[..] else {
        eprintln!("usage: compile MODEL ARCH … [SOURCE …]");
        return ExitCode::from(2);
    };
    let (archs, only): (Vec<&String>, Vec<&String>) = rest.iter().partition(|name| name.starts_with("sm_"));
    let spec = Model::open(model.as_ref()).expect("a model").spec;
    let mut all = Vec::new();
    for arch in archs {
        let target = Target::named(arch);
        all.extend(sources(&target, &spec, KvType::F16).into_iter().map(|source| (arch, source)));
        let attention = Source::attention(&target, spec.attention.head_dim, KvType::F32);
        all.push((arch, attention));
        all.push((arch, Source::fetch(&target)));
        all.push((arch, Source::peaks(&target)));
        all.extend(Type::all().map(|ty| (arch, Source::weights(&target, ty))));
        all.extend(Type::all().map(|ty| (arch, Source::few(&target, &[ty]))));
        // Registers can be short with several types where each alone has enough.
        all.extend(Type::all().map(|ty| (arch, Source::few_experts(&target, &[ty]))));
        all.extend(EXPERTS.iter().map(|mix| (arch, Source::few_experts(&target, mix))));
        all.extend(DENSE.iter().map(|mix| (arch, Source::few(&target, mix))));
        all.extend(Type::all().filter_map(|ty| Some((arch, Source::experts(&target, ty)?))));
    }
    all.retain(|(_, source)| only.is_empty() || only.iter().any(|name| source.name.starts_with(*name)));
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut failures = 0;
        while let Some((arch, source)) = all.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            failures += report(arch, source.clone());
        }
        failures
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let failures: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("no panics")).sum()
    });
    println!("{} sources, {failures} failures", all.len());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compiles one source; prints a line for each kernel. Returns the number of failures.
fn report(arch: &str, mut source: Source) -> usize {
    source.options.push("--ptxas-options=-v".to_string());
    let log = match compile(&source) {
        Ok((cubin, log)) => {
            if let Some(folder) = std::env::var_os("KEEP") {
                let name = source.name.replace(' ', "-");
                std::fs::write(std::path::Path::new(&folder).join(name), cubin).expect("a folder");
            }
            log
        }
        Err(error) => {
            println!("{arch:8} {:16} FAILED: {error}", source.name);
            return 1;
        }
    };
    let (mut kernel, mut spills, mut failures, mut lines) = (String::new(), 0, 0, String::new());
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or("?").to_string();
        } else if line.contains("bytes spill stores") {
            spills = number_before(line, " bytes spill stores");
        } else if line.contains("Used ") {
            let registers = number_before(line, " registers");
            let hot = HOT.contains(&kernel.as_str()) || kernel.starts_with("dense_");
            let verdict = if hot && spills > 0 { "SPILLS in a hot kernel" } else { "" };
            failures += usize::from(!verdict.is_empty());
            lines += &format!(
                "{arch:8} {:16} {kernel:20} {registers:4} registers {spills:5} bytes spilled {verdict}\n",
                source.name
            );
        } else if line.contains("wgmma") {
            failures += 1;
            lines += &format!("{arch:8} {:16} {line}\n", source.name);
        }
    }
    print!("{lines}");
    failures
}

/// The number that ends where `what` begins.
fn number_before(line: &str, what: &str) -> usize {
    let before = line.split(what).next().unwrap_or("");
    before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}
