//! `redlite plan` and `redlite doctor`: what a run would take, and what the machine has.

use std::io::Write;

use engine::machine::{self, Spare};
use engine::plan::{Cache, Phase, Plan, Rates};
use experts::reader;
use gguf::Shard;
use model::{Model, Peaks};
use serde_json::{Value, json};

use crate::args::BackendName;
use crate::bench::{peak_line, peaks_json};
use crate::cache::{Planned, Room};
use crate::cache_args::{DoctorArgs, PlanArgs};
use crate::calibration::{self, Calibration, Disk};
use crate::failure::{Failure, Outcome};
use crate::{cache, gpu, report};

/// Runs `plan`.
pub fn plan(args: &PlanArgs) -> Result<Outcome, Failure> {
    let fail = |source| Failure::Model { path: args.model.clone(), source };
    let model = Model::open(&args.model).map_err(fail)?;
    let context = args.backend.context.unwrap_or(model.spec.context.min(4096));
    let room = Room { context, positions: context, prompt: args.prompt, lasting: args.prompt.is_none() };
    let on_gpu = args.backend.backend == BackendName::Cuda;
    let spare = if on_gpu { None } else { cache::spare(&args.backend.cache) };
    let Planned { plan, io, rates, gpus, .. } = cache::plan(&model, &args.backend, &room, spare.clone())?;
    let spare = if on_gpu { Some(gpu::spare(&args.backend, &gpus)?) } else { spare };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", to_json(&plan, &rates, spare.as_ref(), context))?;
        return Ok(Outcome::Success);
    }
    let slots = match plan.cache {
        Cache::Mapped if gpus.len() > 1 => {
            format!("{} (all of them, on the GPUs)", report::size(plan.experts))
        }
        Cache::Mapped if on_gpu => format!("{} (all of them, on the GPU)", report::size(plan.experts)),
        Cache::Mapped => "0 B (experts from the mapped file)".to_string(),
        Cache::Slots(bytes) => {
            let share = 100.0 * bytes as f64 / plan.experts.max(1) as f64;
            let lent = match plan.lent {
                0 => String::new(),
                lent => format!(", {} of it lent to activations of large chunks", report::size(lent)),
            };
            format!("{} ({share:.0} %), {} reads{lent}", report::size(bytes), io.name())
        }
    };
    let copied = if on_gpu && plan.cache == Cache::Mapped { plan.experts } else { 0 };
    let total = plan.total() + copied;
    let mut rows = vec![
        ("memory there is", spare.as_ref().map_or("unknown".to_string(), |s| report::size(s.bytes))),
        ("limited by", spare.as_ref().map_or("unknown".to_string(), |s| s.limit.to_string())),
        ("dense weights", report::size(plan.dense)),
        ("keys and values", format!("{} ({context} positions)", report::size(plan.kv))),
        ("DeltaNet state", report::size(plan.state)),
        ("activations", report::size(plan.scratch)),
        ("program", report::size(plan.fixed)),
        ("cache of experts", slots),
        ("total", report::size(total)),
        ("by phase", by_phase(&plan, copied)),
        ("experts, all of them", report::size(plan.experts)),
        ("why", plan.reason.clone()),
        ("chunks", format!("{} tokens: {}", plan.chunk, plan.chunk_reason)),
        ("expected", cache::expectation(&plan).unwrap_or_else(|| UNKNOWN.to_string())),
    ];
    if gpus.len() > 1 {
        rows.push(("GPUs", gpu::layers_line(&model.cut(gpus.len()), &gpus)));
    }
    if let (true, Cache::Slots(_)) = (on_gpu, plan.cache) {
        rows.push(("pinned by the host", report::size(gpu::pinned(&model, &args.backend, &plan))));
    }
    rows.extend(plan.warning.iter().map(|warning| ("warning", warning.clone())));
    for (name, value) in rows {
        writeln!(out, "{name:<22}{value}")?;
    }
    Ok(Outcome::Success)
}

/// What is taken while loading, reading and writing; `copied` besides, from the start.
fn by_phase(plan: &Plan, copied: u64) -> String {
    let phase = |phase: Phase| format!("{} {}", phase.name, report::size(phase.total + copied));
    plan.phases().map(phase).join(", ")
}

/// What is said where no rates are known.
const UNKNOWN: &str = "unknown until `redlite bench MODEL` has measured this machine";

fn to_json(plan: &Plan, rates: &Rates, spare: Option<&Spare>, context: usize) -> Value {
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
        "lent_bytes": plan.lent,
        "total_bytes": plan.total(),
        "phases": plan.phases().map(|phase| json!({
            "phase": phase.name,
            "scratch_bytes": phase.scratch,
            "cache_bytes": phase.slots,
            "total_bytes": phase.total,
        })),
        "experts_bytes": plan.experts,
        "reason": plan.reason,
        "warning": plan.warning,
        "chunk": plan.chunk,
        "chunk_reason": plan.chunk_reason,
        "streamed_bytes_per_chunk": plan.streamed,
        "read_bytes_per_second": rates.read,
        "expected_ingestion_tokens_per_second": plan.expected.ingestion,
        "expected_decode_tokens_per_second": plan.expected.decode.map(|writing| writing.rate),
        "expected_hit_rate": plan.expected.decode.map(|writing| writing.hits),
        "hit_rate_is_measured": plan.expected.decode.map(|writing| writing.measured),
    })
}

/// Runs `doctor`: measures, stores what it measured, and says what would help.
pub fn doctor(args: &DoctorArgs) -> Result<Outcome, Failure> {
    let mut calibration = Calibration::load();
    let options = cpu::Options::default();
    let (capabilities, peaks) = (cpu::capabilities(&options)?, cpu::peaks(&options)?);
    peaks.iter().for_each(|peaks| calibration.note_peaks(&capabilities, peaks));
    let disk = args.model.as_deref().map(|path| measure(path, &mut calibration)).transpose()?;
    calibration.store();
    let threads = peaks.last().map(|peaks| peaks.workers);
    let rates = calibration.rates(&capabilities, threads, None);
    let gpus = (0..MOST_GPUS).map_while(|device| cuda::free_memory(device).ok()).collect();
    let machine = Machine { spare: machine::spare_memory(), peaks, disk, rates, gpus };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", machine.json())?;
        return Ok(Outcome::Success);
    }
    for (name, value) in machine.rows() {
        writeln!(out, "{name:<16}{value}")?;
    }
    if let Some(path) = calibration.path() {
        writeln!(out, "{:<16}{}", "stored in", path.display())?;
    }
    for advice in machine.advice() {
        writeln!(out, "{advice}")?;
    }
    Ok(Outcome::Success)
}

/// What `doctor` found.
struct Machine {
    spare: Option<Spare>,
    peaks: Vec<Peaks>,
    disk: Option<Disk>,
    rates: Rates,
    /// Bytes that are free on each GPU that CUDA can use.
    gpus: Vec<u64>,
}

/// More GPUs than one process looks at.
const MOST_GPUS: i32 = 16;

/// Instructions that kernels use or could use, as the system names them.
const FEATURES: [&str; 22] = [
    "sse4_2",
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_bf16",
    "avx512_fp16",
    "gfni",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
];

/// Those that the processor has, where the system tells.
fn features() -> Vec<&'static str> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    features_in(&text)
}

fn features_in(text: &str) -> Vec<&'static str> {
    let is_list = |line: &&str| line.starts_with("flags") || line.starts_with("Features");
    let list = text.lines().find(is_list).and_then(|line| line.split_once(':'));
    let has = |name: &&str| list.is_some_and(|(_, list)| list.split_whitespace().any(|word| word == *name));
    FEATURES.into_iter().filter(|name| has(name)).collect()
}

/// Whether the system gives huge pages to nobody.
fn lacks_huge_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    setting.is_ok_and(|setting| setting.contains("[never]"))
}

impl Machine {
    fn kernels() -> Vec<&'static str> {
        let variants = cpu::Variant::ALL.into_iter().filter(|variant| variant.is_available());
        variants.map(cpu::Variant::name).collect()
    }

    fn processors() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    fn json(&self) -> Value {
        json!({
            "processor": calibration::processor(),
            "processors": Machine::processors(),
            "features": features(),
            "gpu_free_bytes": self.gpus,
            "kernels": Machine::kernels(),
            "memory_bytes": machine::total_memory(),
            "spare_bytes": self.spare.as_ref().map(|spare| spare.bytes),
            "limited_by": self.spare.as_ref().map(|spare| spare.limit),
            "group_limit_bytes": machine::group_limit(),
            "peaks": self.peaks.iter().map(peaks_json).collect::<Vec<_>>(),
            "read_bytes_per_second":
                self.disk.map(|disk| json!({ "direct": disk.direct, "cached": disk.cached })),
            "ingestion_operations_per_second": self.rates.ingestion,
            "decoded_bytes_per_second": self.rates.decoding,
            "token_bytes_per_second": self.rates.tokens,
        })
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let size = |bytes: Option<u64>| bytes.map_or("unknown".to_string(), report::size);
        let mut rows = vec![
            ("processors", format!("{}, {}", Machine::processors(), calibration::processor())),
            ("instructions", features().join(", ")),
            ("kernels", Machine::kernels().join(", ")),
            ("memory", size(machine::total_memory())),
            ("control group", machine::group_limit().map_or("none".to_string(), report::size)),
            ("GPUs", self.gpu_row()),
            ("can be spared", size(self.spare.as_ref().map(|spare| spare.bytes))),
        ];
        rows.extend(self.peaks.iter().map(|peaks| ("peak", peak_line(peaks))));
        if let Some(Disk { direct, cached }) = self.disk {
            let direct =
                direct.map_or("not possible here".to_string(), |rate| format!("{:.2} GB/s", rate / 1e9));
            rows.push(("direct reads", direct));
            rows.push(("cached reads", format!("{:.2} GB/s", cached / 1e9)));
        }
        let giga = |rate: f64, unit: &str| format!("{:.1} {unit}", rate / 1e9);
        let known = [
            ("reached, prompts", self.rates.ingestion.map(|rate| giga(rate, "GOP/s"))),
            ("reached, tokens", self.rates.tokens.map(|rate| giga(rate, "GB/s"))),
        ];
        rows.extend(known.into_iter().filter_map(|(name, value)| Some((name, value?))));
        rows
    }

    fn gpu_row(&self) -> String {
        let gpu = |bytes: &u64| format!("{} free", report::size(*bytes));
        match self.gpus.is_empty() {
            true => "none that CUDA can use".to_string(),
            false => self.gpus.iter().map(gpu).collect::<Vec<_>>().join(", "),
        }
    }

    /// What would make this machine faster.
    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.rates.ingestion.is_none() {
            advice.push(
                "`redlite bench MODEL` measures what prompts reach here; plans know it then".to_string(),
            );
        }
        if !self.gpus.is_empty() {
            advice.push("a GPU is there: `--backend cuda` computes on it".to_string());
        }
        if lacks_huge_pages() {
            let text = "huge pages are switched off (/sys/kernel/mm/transparent_hugepage/enabled): with `madvise` weights are read faster";
            advice.push(text.to_string());
        }
        if let (Some(limit), Some(total)) = (machine::group_limit(), machine::total_memory())
            && limit < total / 2
        {
            let text = "the control group's limit leaves most of the memory unused: a higher one makes room for experts";
            advice.push(text.to_string());
        }
        if let Some(Disk { direct: Some(direct), cached }) = self.disk
            && direct.max(cached) < 1e9
        {
            advice.push(
                "the disk reads less than 1 GB/s: a model on a faster one is read and written faster"
                    .to_string(),
            );
        }
        advice
    }
}

/// Rates of reading a model's first file: direct, through the cache.
fn measure(path: &std::path::Path, calibration: &mut Calibration) -> Result<Disk, Failure> {
    let fail = |source| Failure::Model { path: path.to_path_buf(), source };
    let gguf = gguf::Gguf::open(path).map_err(|error| fail(error.into()))?;
    let file = gguf.shards().first().map(Shard::path).unwrap_or(path);
    let fail = |source| Failure::File { path: file.to_path_buf(), source };
    let (direct, cached) = reader::measure(file, 64, READERS).map_err(fail)?;
    let disk = Disk { direct, cached };
    calibration.note_disk(file, disk);
    Ok(disk)
}

/// Threads that read, as `--readers` has it.
const READERS: usize = 4;

#[cfg(test)]
mod tests {
    use super::features_in;

    #[test]
    fn instructions_are_those_the_system_lists() {
        let found = features_in("model name: x\nflags\t\t: fpu avx avx512f xavx2 gfni\nflags: avx2\n");
        assert_eq!(found, ["avx", "avx512f", "gfni"]);
        assert_eq!(features_in("Features\t: fp asimd asimddp"), ["asimd", "asimddp"]);
        assert!(features_in("").is_empty());
    }
}
