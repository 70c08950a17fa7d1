//! `--kernels`: stages of one layer of the 80B's widths, on random weights, perhaps without part of their work.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use engine::{Cancel, Engine, LogitRows, Options, Profile, Request};
use forge::{Control, Mix, Shape, SynthOptions};
use model::{Backend, Cost, GRID, KvType, Limits, MappedExperts, Model, Peaks, ResidentWeights, Stage};
use quant::Type;
use serde_json::{Value, json};

use super::args::{Ablation, BenchArgs, Probe, ProbeArgs};
use super::random_ids;
use super::stats::Samples;
use crate::args::BackendName;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::report::{self, Bar};

/// Bytes of experts at most, more than caches hold.
const EXPERT_BYTES: usize = 448 << 20;

/// Token ids of the model: its output projection is measured by `gemv` only.
const VOCABULARY: u32 = 1024;
const GEMV_VOCABULARY: u32 = 32_768;

/// Runs the command.
pub fn run(args: &BenchArgs, probe: Probe) -> Result<Outcome, Failure> {
    let options = &args.probe;
    let setup = Setup::new(probe, options);
    refuse_impossible(args.backend.backend, &setup, options.ablate)?;
    let cancel = interrupt::on_ctrl_c()?;
    let file = Temporary(std::env::temp_dir().join(format!("redlite-kernels-{}.gguf", std::process::id())));
    setup.write(&file, args.json, &cancel)?;
    let fail = |source| Failure::Model { path: file.0.clone(), source };
    let model = Arc::new(Model::open(&file.0).map_err(fail)?);
    let weights = Arc::new(model.load(&mut |_, _| {}).map_err(fail)?);
    let mut full = engine(args, &model, &weights, setup.tokens, None)?;
    let peaks = full.backend().peaks().pop();
    let mut ablated = match options.ablate {
        None => None,
        Some(part) => {
            let mut model = Model::open(&file.0).map_err(fail)?;
            if part == Ablation::Loads {
                all_in_the_place_of_the_first(&mut model);
            }
            Some(engine(args, &Arc::new(model), &weights, setup.tokens, Some(part))?)
        }
    };

    let ids = random_ids(args.seed, setup.tokens, model.spec.vocab);
    let wants_head = setup.stages().contains(&Stage::Head);
    let mut measured = [Measured::default(), Measured::default()];
    let bar = Bar::tokens("probing", setup.tokens * (args.repeat + 1), args.json);
    for run in 0..=args.repeat {
        for (engine, measured) in [Some(&mut full), ablated.as_mut()].into_iter().zip(&mut measured) {
            let Some(engine) = engine else { continue };
            let profile = once(engine, &model, &ids, wants_head, &cancel)?;
            if run > 0 {
                measured.profiles.push(profile);
            }
        }
        bar.set((setup.tokens * (run + 1)) as u64);
    }
    bar.finish();
    let lines: Vec<Line> = setup.stages().iter().filter_map(|&stage| Line::new(stage, &measured)).collect();
    print(args, &setup, &lines, peaks.as_ref())?;
    Ok(Outcome::Success)
}

/// Refuses backends without kernels to be measured, and leaving out what cannot be.
fn refuse_impossible(backend: BackendName, setup: &Setup, part: Option<Ablation>) -> Result<(), Failure> {
    let refuse = |text: String| Err(Failure::Usage(text));
    // Experts have their rows on average: some have half as many.
    let least = 2 * cpu::probe::FUSED_ROWS + 1;
    match (backend, part) {
        (BackendName::Reference | BackendName::ReferenceLlama, _) => {
            refuse("--kernels measures the backends cpu and cuda only".to_string())
        }
        (BackendName::Cpu, Some(Ablation::Decode)) if setup.rows < least => refuse(format!(
            "few rows are multiplied as weights are decoded: nothing can be left out; ask for --rows {least} or more"
        )),
        (BackendName::Cuda, Some(Ablation::Decode)) if setup.probe != Probe::Experts => {
            refuse("on a GPU decoding can be left out of `--kernels experts` only".to_string())
        }
        _ => Ok(()),
    }
}

/// A file that goes with the value.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // A file left behind in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What is measured.
struct Setup {
    probe: Probe,
    /// Type of gate and up matrices, or of dense ones.
    ty: Type,
    down: Type,
    experts: u32,
    /// Rows that meet a matrix, on average.
    rows: usize,
    tokens: usize,
}

impl Setup {
    fn new(probe: Probe, options: &ProbeArgs) -> Setup {
        let ty = options.ty.unwrap_or(match probe {
            Probe::Experts | Probe::Gemv => Type::IQ2_XXS,
            Probe::Dense => Type::Q5_K,
        });
        let down = options.down.unwrap_or(ty);
        let weights = 512 * 2048;
        let bytes = |ty: Type| ty.bytes(weights).unwrap_or(4 * weights);
        let triplet = 2 * bytes(ty) + bytes(down);
        let shape = Shape::default();
        let experts = match probe {
            Probe::Dense => shape.experts_used,
            _ => shape.experts.min((EXPERT_BYTES / triplet) as u32).max(shape.experts_used),
        };
        let rows = options.rows.unwrap_or(match probe {
            Probe::Experts => 40,
            Probe::Dense => 2048,
            Probe::Gemv => 1,
        });
        let tokens = match probe {
            Probe::Experts => rows.saturating_mul(experts as usize).div_ceil(shape.experts_used as usize),
            Probe::Dense | Probe::Gemv => rows,
        };
        Setup { probe, ty, down, experts, rows, tokens }
    }

    fn stages(&self) -> &'static [Stage] {
        match self.probe {
            Probe::Experts => &[Stage::Experts],
            Probe::Dense => &[Stage::DeltaProject, Stage::DeltaOut],
            Probe::Gemv => {
                &[Stage::DeltaProject, Stage::DeltaOut, Stage::Shared, Stage::Experts, Stage::Head]
            }
        }
    }

    /// One DeltaNet layer.
    fn write(&self, file: &Temporary, quiet: bool, cancel: &Cancel) -> Result<(), Failure> {
        let vocab = if self.probe == Probe::Gemv { GEMV_VOCABULARY } else { VOCABULARY };
        let shape = Shape { layers: 1, vocab, experts: self.experts, ..Shape::default() };
        let dense = if self.probe == Probe::Experts { Type::Q5_K } else { self.ty };
        let mix = Mix { down: Some(self.down), ..Mix::new(Some(self.ty), Some(dense)) };
        let options = SynthOptions { shape, mix, name: "kernels".to_string(), ..SynthOptions::default() };
        let bar = Bar::bytes("preparing", 0, quiet);
        let mut progress = |progress: forge::Progress<'_>| {
            bar.set_total(progress.total);
            bar.set(progress.done);
            if cancel.is_cancelled() { Control::Cancel } else { Control::Continue }
        };
        let result = forge::synth(&file.0, &options, &mut progress);
        bar.finish();
        result?;
        Ok(())
    }

    /// What the command is about, in words.
    fn description(&self, spec: &BenchArgs) -> String {
        let what = match self.probe {
            Probe::Experts => format!(
                "{} experts of width 512 at hidden size 2048, {} (down {}), {} rows each on average",
                self.experts, self.ty, self.down, self.rows
            ),
            Probe::Dense => format!("projections of a DeltaNet layer at hidden size 2048, {}", self.ty),
            Probe::Gemv => {
                format!("a DeltaNet layer at hidden size 2048 and the output projection, {}", self.ty)
            }
        };
        let part = match spec.probe.ablate {
            None => "",
            Some(Ablation::Decode) => "; ablated: weights neither read nor decoded, results are wrong",
            Some(Ablation::Loads) => "; ablated: all experts read the bytes of one, results are wrong",
        };
        let tokens = self.tokens;
        format!("{what}; {tokens} {}{part}", if tokens == 1 { "token" } else { "tokens" })
    }
}

/// The smallest chunk that takes so many tokens at once: chunks are cut on the grid.
fn one_chunk(tokens: usize) -> usize {
    tokens.next_multiple_of(GRID)
}

/// An engine on the layer, without part of the work if wanted.
fn engine(
    args: &BenchArgs,
    model: &Arc<Model>,
    weights: &Arc<ResidentWeights>,
    tokens: usize,
    part: Option<Ablation>,
) -> Result<Engine, Failure> {
    let chunk = args.backend.chunk.unwrap_or(0).max(one_chunk(tokens));
    let limits =
        Limits { pass_rows: engine::plan::pass_rows(chunk, tokens), positions: tokens, kv: KvType::F16 };
    let backend = &args.backend;
    let without_decoding = part == Some(Ablation::Decode);
    let experts = MappedExperts::new(model);
    let (backend, experts): (Box<dyn Backend>, _) = if backend.backend == BackendName::Cuda {
        let options = cuda::Options { decode_experts: !without_decoding, ..cuda::Options::default() };
        let cuda = cuda::Cuda::new(model.clone(), weights, limits, options)?;
        (Box::new(cuda), experts.in_whole_layers())
    } else {
        let options =
            cpu::Options { threads: backend.threads, exact: backend.exact, ..cpu::Options::default() };
        let mut cpu = cpu::Cpu::new(model.clone(), weights.clone(), limits, options)?;
        if without_decoding {
            cpu::probe::without_decoding(&mut cpu);
        }
        (Box::new(cpu), experts)
    };
    Ok(Engine::new(model.clone(), backend, Box::new(experts), Options { chunk, context: tokens }))
}

/// Makes every expert read the bytes of the first.
fn all_in_the_place_of_the_first(model: &mut Model) {
    for layer in &mut model.experts {
        for tensor in [&mut layer.gate, &mut layer.up, &mut layer.down] {
            tensor.stride = 0;
        }
    }
}

/// One pass over `ids` from an empty sequence.
fn once(
    engine: &mut Engine,
    model: &Arc<Model>,
    ids: &[u32],
    head: bool,
    cancel: &Cancel,
) -> Result<Profile, Failure> {
    let mut profile = Profile::new(model, KvType::F16, 0);
    let mut session = engine.open();
    let mut request = Request {
        logits: if head { LogitRows::Last } else { LogitRows::None },
        observer: Some(&mut profile),
        cancel: cancel.clone(),
        ..Request::default()
    };
    let result = engine.ingest(&mut session, ids, &mut request);
    engine.close(session);
    result?;
    Ok(profile)
}

/// Profiles of the same pass.
#[derive(Default)]
struct Measured {
    profiles: Vec<Profile>,
}

impl Measured {
    /// Seconds of a stage.
    fn seconds(&self, stage: Stage) -> Option<Samples> {
        let of = |profile: &Profile| profile.stages().find(|s| s.0 == stage).map(|s| s.1.time.as_secs_f64());
        Samples::new(self.profiles.iter().filter_map(of).collect())
    }
}

/// A stage, whole and without part of its work.
struct Line {
    stage: Stage,
    cost: Cost,
    full: Samples,
    ablated: Option<Samples>,
}

impl Line {
    fn new(stage: Stage, [full, ablated]: &[Measured; 2]) -> Option<Line> {
        let profile = full.profiles.last()?.stages().find(|s| s.0 == stage)?.1;
        let (full, ablated) = (full.seconds(stage)?, ablated.seconds(stage));
        Some(Line { stage, cost: profile.cost, full, ablated })
    }

    /// Billions of multiply-adds, and of bytes, a second.
    fn rates(&self, seconds: f64) -> (f64, f64) {
        let per_second = |count: u64| count as f64 / seconds.max(1e-9) / 1e9;
        (per_second(self.cost.operations()) / 2.0, per_second(self.cost.bytes))
    }

    /// The part of the time that the ablated run does not take.
    fn saved(&self) -> Option<f64> {
        self.ablated.as_ref().map(|ablated| 1.0 - ablated.median() / self.full.median())
    }
}

fn print(args: &BenchArgs, setup: &Setup, lines: &[Line], peaks: Option<&Peaks>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = json!({
            "kernels": setup.description(args), "type": setup.ty.name(), "down": setup.down.name(),
            "experts": setup.experts, "tokens": setup.tokens,
            "peaks": peaks.map(super::report::peaks_json),
            "stages": lines.iter().map(|line| line_json(line, peaks)).collect::<Vec<_>>(),
        });
        return writeln!(out, "{value:#}");
    }
    writeln!(out, "{}", setup.description(args))?;
    if let Some(peaks) = peaks {
        writeln!(out, "{}", super::report::peak_line(peaks))?;
    }
    let mut header = vec!["stage", "ms", "min", "max", "GMAC/s", "GB/s", "bound", "of peak"];
    if args.probe.ablate.is_some() {
        header.extend(["ablated ms", "GMAC/s", "share left out"]);
    }
    let rows: Vec<Vec<String>> = lines.iter().map(|line| cells(line, peaks)).collect();
    write!(out, "\n{}", report::table(&header, &rows))
}

fn cells(line: &Line, peaks: Option<&Peaks>) -> Vec<String> {
    let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
    let full = &line.full;
    let (macs, bytes) = line.rates(full.median());
    let mut cells = vec![line.stage.name().to_string()];
    cells.extend([full.median(), full.min(), full.max()].map(ms));
    cells.extend([format!("{macs:.1}"), format!("{bytes:.2}")]);
    match peaks.map(|peaks| (peaks, peaks.least_seconds(&line.cost))) {
        Some((peaks, (least, bound))) => {
            cells.extend([peaks.name(bound).to_string(), format!("{:.1} %", 100.0 * least / full.median())])
        }
        None => cells.extend([String::new(), String::new()]),
    }
    if let (Some(ablated), Some(saved)) = (&line.ablated, line.saved()) {
        let macs = line.rates(ablated.median()).0;
        cells.extend([ms(ablated.median()), format!("{macs:.1}"), format!("{:.1} %", 100.0 * saved)]);
    }
    cells
}

fn line_json(line: &Line, peaks: Option<&Peaks>) -> Value {
    let samples = |samples: &Samples| {
        json!({
            "milliseconds": samples.median() * 1e3, "min": samples.min() * 1e3, "max": samples.max() * 1e3,
            "gmacs": line.rates(samples.median()).0,
        })
    };
    let least = peaks.map(|peaks| (peaks.least_seconds(&line.cost), peaks));
    json!({
        "stage": line.stage.name(),
        "full": samples(&line.full),
        "gbs": line.rates(line.full.median()).1,
        "bound": least.map(|((_, bound), peaks)| peaks.name(bound)),
        "of_peak": least.map(|((least, _), _)| least / line.full.median()),
        "ablated": line.ablated.as_ref().map(samples),
        "share_left_out": line.saved(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(probe: Probe, ty: Option<Type>, rows: Option<usize>) -> Setup {
        Setup::new(probe, &ProbeArgs { kernels: Some(probe), ty, down: None, rows, ablate: None })
    }

    #[test]
    fn rows_of_an_expert_make_a_prompt() {
        let experts = setup(Probe::Experts, None, None);
        assert_eq!(
            (experts.ty, experts.experts, experts.rows, experts.tokens),
            (Type::IQ2_XXS, 512, 40, 2048)
        );
        // 448 MiB of experts of 3.2 MiB, of which a token uses ten.
        let large = setup(Probe::Experts, Some(Type::Q8_0), Some(1));
        assert_eq!((large.experts, large.tokens), (140, 14));
        // In two chunks experts would meet half of the rows, twice.
        for tokens in [14, 560, 1820, 2048] {
            assert_eq!(engine::chunks(0, tokens, one_chunk(tokens), 1).len(), 1, "{tokens} tokens");
        }
        let dense = setup(Probe::Dense, None, Some(7));
        assert_eq!((dense.ty, dense.experts, dense.tokens), (Type::Q5_K, 10, 7));
        assert_eq!(setup(Probe::Gemv, None, None).tokens, 1);
        assert_eq!(setup(Probe::Experts, Some(Type::F32), None).experts, 37);
    }
}
