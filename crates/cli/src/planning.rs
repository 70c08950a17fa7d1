//! `redlite plan` and `redlite doctor`: what a run would take, and what the machine has.

use std::io::Write;

use engine::machine::{self, Spare};
use engine::plan::{Cache, Plan};
use experts::reader;
use gguf::Shard;
use model::{Limits, Model};
use serde_json::{Value, json};

use crate::args::BackendName;
use crate::cache_args::{DoctorArgs, PlanArgs};
use crate::failure::{Failure, Outcome};
use crate::{cache, gpu, open, report};

/// Runs `plan`.
pub fn plan(args: &PlanArgs) -> Result<Outcome, Failure> {
    let fail = |source| Failure::Model { path: args.model.clone(), source };
    let model = Model::open(&args.model).map_err(fail)?;
    let context = args.backend.context.unwrap_or(model.spec.context.min(4096));
    let limits = Limits {
        pass_rows: open::pass_rows(args.backend.chunk, context),
        positions: context,
        kv: args.backend.kv.into(),
    };
    let on_gpu = args.backend.backend == BackendName::Cuda;
    let given = args.memory.map(|bytes| Spare { bytes, limit: "--memory" });
    let spare = match on_gpu {
        true => Some(gpu::spare(&args.backend)?),
        false => given.or_else(machine::spare_memory),
    };
    let plan = cache::plan(&model, &args.backend, &limits, spare.clone())?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", to_json(&plan, spare.as_ref(), context))?;
        return Ok(Outcome::Success);
    }
    let slots = match plan.cache {
        Cache::Mapped if on_gpu => format!("{} (all of them, on the GPU)", report::size(plan.experts)),
        Cache::Mapped => "0 B (experts from the mapped file)".to_string(),
        Cache::Slots(bytes) => {
            format!("{} ({:.0} %)", report::size(bytes), 100.0 * bytes as f64 / plan.experts.max(1) as f64)
        }
    };
    let rows = [
        ("memory there is", spare.as_ref().map_or("unknown".to_string(), |s| report::size(s.bytes))),
        ("limited by", spare.as_ref().map_or("unknown".to_string(), |s| s.limit.to_string())),
        ("dense weights", report::size(plan.dense)),
        ("keys and values", format!("{} ({context} positions)", report::size(plan.kv))),
        ("DeltaNet state", report::size(plan.state)),
        ("activations", report::size(plan.scratch)),
        ("program", report::size(plan.fixed)),
        ("cache of experts", slots),
        ("total", report::size(plan.total())),
        ("experts, all of them", report::size(plan.experts)),
        ("why", plan.reason.clone()),
    ];
    for (name, value) in rows {
        writeln!(out, "{name:<22}{value}")?;
    }
    if let Some(warning) = &plan.warning {
        writeln!(out, "{:<22}{warning}", "warning")?;
    }
    Ok(Outcome::Success)
}

fn to_json(plan: &Plan, spare: Option<&Spare>, context: usize) -> Value {
    json!({
        "memory_bytes": spare.map(|spare| spare.bytes),
        "limited_by": spare.map(|spare| spare.limit),
        "context": context,
        "dense_bytes": plan.dense,
        "kv_bytes": plan.kv,
        "state_bytes": plan.state,
        "scratch_bytes": plan.scratch,
        "fixed_bytes": plan.fixed,
        "cache_bytes": match plan.cache {
            Cache::Mapped => 0,
            Cache::Slots(bytes) => bytes,
        },
        "mapped": plan.cache == Cache::Mapped,
        "total_bytes": plan.total(),
        "experts_bytes": plan.experts,
        "reason": plan.reason,
        "warning": plan.warning,
    })
}

/// Runs `doctor`.
pub fn doctor(args: &DoctorArgs) -> Result<Outcome, Failure> {
    let variants = cpu::Variant::ALL.into_iter().filter(|variant| variant.is_available());
    let variants: Vec<&str> = variants.map(cpu::Variant::name).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let spare = machine::spare_memory();
    let disk = args.model.as_deref().map(measure).transpose()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let disk = disk.map(|(direct, cached)| json!({ "direct": direct, "cached": cached }));
        let value = json!({
            "processors": threads,
            "kernels": variants,
            "memory_bytes": machine::total_memory(),
            "spare_bytes": spare.as_ref().map(|spare| spare.bytes),
            "limited_by": spare.as_ref().map(|spare| spare.limit),
            "group_limit_bytes": machine::group_limit(),
            "read_bytes_per_second": disk,
        });
        writeln!(out, "{value}")?;
        return Ok(Outcome::Success);
    }
    let size = |bytes: Option<u64>| bytes.map_or("unknown".to_string(), report::size);
    let group = machine::group_limit().map_or("none".to_string(), report::size);
    let mut rows = vec![
        ("processors", threads.to_string()),
        ("kernels", variants.join(", ")),
        ("memory", size(machine::total_memory())),
        ("control group", group),
        ("can be spared", size(spare.map(|spare| spare.bytes))),
    ];
    if let Some((direct, cached)) = disk {
        let direct = direct.map_or("not possible here".to_string(), |rate| format!("{:.2} GB/s", rate / 1e9));
        rows.push(("direct reads", format!("{direct} (one thread)")));
        rows.push(("cached reads", format!("{:.2} GB/s (one thread)", cached / 1e9)));
    }
    for (name, value) in rows {
        writeln!(out, "{name:<16}{value}")?;
    }
    Ok(Outcome::Success)
}

/// Rates of reading a model's first file: direct, through the cache.
fn measure(path: &std::path::Path) -> Result<(Option<f64>, f64), Failure> {
    let fail = |source| Failure::Model { path: path.to_path_buf(), source };
    let gguf = gguf::Gguf::open(path).map_err(|error| fail(error.into()))?;
    let file = gguf.shards().first().map(Shard::path).unwrap_or(path);
    reader::measure(file, 32).map_err(|source| Failure::File { path: file.to_path_buf(), source })
}
