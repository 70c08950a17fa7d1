//! `redlite run`: read a prompt, write the answer.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

use engine::plan::{Cache, Phase, Plan};
use engine::{Cancel, Engine, Finish, Generation, GenerationOptions, Request, Session};
use model::{Backend, Observer, PassId, Stage, Step};
use serde_json::json;
use text::Tokenizer;

use crate::args::RunArgs;
use crate::cache::{Loads, Room};
use crate::calibration::{self, Calibration};
use crate::failure::{Failure, Outcome};
use crate::open::{self, Started};
use crate::report::{self, Bar, PhasePeaks};
use crate::trace::{self, Timed};
use crate::{interrupt, prompt};

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<Outcome, Failure> {
    let options = GenerationOptions {
        sampling: (&args.sampling).into(),
        max_tokens: args.max_tokens,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..GenerationOptions::default()
    };
    options.sampling.check()?;
    if args.stop.iter().any(String::is_empty) {
        return Err(Failure::Usage("--stop needs a text: an empty one would stop at once".to_string()));
    }
    let mut peaks = PhasePeaks::new();
    let opened = open::model_with_template(&args.model, args.chat_template.as_deref())?;
    // Before the prompt has come, Ctrl-C simply ends the program.
    let tokens = prompt::prompt(args, &opened)?;
    let cancel = interrupt::on_ctrl_c()?;
    if tokens.is_empty() {
        return Err(engine::Error::EmptyPrompt.into());
    }
    let context = args.backend.context.unwrap_or_else(|| {
        // What is needed, as far as the model reaches: an answer may end at the context's end.
        tokens.len().saturating_add(args.max_tokens).min(opened.model.spec.context)
    });
    if tokens.len() > context {
        return Err(engine::Error::ContextOverflow { needed: tokens.len(), context }.into());
    }
    let quiet = args.quiet || args.json;
    let mut backend = args.backend.clone();
    backend.cache.trace = args.trace.is_some();
    let started = open::start_for(
        &opened.model,
        &backend,
        Room { context, positions: context, prompt: Some(tokens.len()), lasting: false },
        quiet,
    )?;
    peaks.mark("load");
    let mut answer = Answer { prompt: tokens.len(), ..Answer::new(started, peaks) };
    answer.read(&tokens, &cancel, args, quiet)?;
    answer.write(&opened.tokenizer, &options, &cancel, args)?;
    answer.keep(args);
    answer.report(args)?;
    if answer.interrupted { Err(Failure::Interrupted) } else { Ok(Outcome::Success) }
}

/// Where the time of a run went, stage by stage.
#[derive(Debug, Default)]
struct Profile {
    stages: BTreeMap<Stage, Duration>,
    /// Every step and the time it ended, if they are to be written.
    times: Option<Vec<Timed>>,
}

impl Observer for Profile {
    fn after(
        &mut self,
        step: &Step,
        elapsed: Duration,
        backend: &mut dyn Backend,
        _: PassId,
    ) -> Result<(), model::Error> {
        // A backend that enqueues still has the work of the call before it.
        let began = Instant::now();
        backend.sync()?;
        let elapsed = elapsed + began.elapsed();
        *self.stages.entry(step.stage).or_default() += elapsed;
        if let Some(times) = &mut self.times {
            times.push(Timed { step: step.clone(), end: Instant::now(), elapsed });
        }
        Ok(())
    }
}

/// A run in the making.
struct Answer {
    engine: Engine,
    session: Session,
    load: Duration,
    variant: String,
    loads: Loads,
    plan: Plan,
    peaks: PhasePeaks,
    profile: Profile,
    prompt: usize,
    reading: Duration,
    logits: Vec<f32>,
    text: String,
    tokens: Vec<u32>,
    writing: Duration,
    finish: Option<Finish>,
    interrupted: bool,
}

impl Answer {
    fn new(started: Started, peaks: PhasePeaks) -> Answer {
        let Started { mut engine, load, variant, monitor, plan } = started;
        Answer {
            session: engine.open(),
            engine,
            load,
            variant,
            loads: Loads::new(monitor),
            plan,
            peaks,
            profile: Profile::default(),
            prompt: 0,
            reading: Duration::ZERO,
            logits: Vec::new(),
            text: String::new(),
            tokens: Vec::new(),
            writing: Duration::ZERO,
            finish: None,
            interrupted: false,
        }
    }

    fn read(&mut self, tokens: &[u32], cancel: &Cancel, args: &RunArgs, quiet: bool) -> Result<(), Failure> {
        let bar = Bar::tokens("reading", tokens.len(), quiet);
        let mut progress = |done: f64, _| bar.set(done as u64);
        let began = Instant::now();
        let mut request =
            Request { on_progress: Some(&mut progress), cancel: cancel.clone(), ..Request::default() };
        self.profile.times = args.trace.as_ref().map(|_| Vec::new());
        if args.stats || args.trace.is_some() {
            request.observer = Some(&mut self.profile);
        }
        let result = self.engine.ingest(&mut self.session, tokens, &mut request);
        self.reading = began.elapsed();
        self.loads.mark();
        self.peaks.mark("read");
        bar.finish();
        self.logits = result?.logits;
        Ok(())
    }

    fn write(
        &mut self,
        tokenizer: &Tokenizer,
        options: &GenerationOptions,
        cancel: &Cancel,
        args: &RunArgs,
    ) -> Result<(), Failure> {
        let logits = std::mem::take(&mut self.logits);
        let mut generation = Generation::new(tokenizer, logits, options)?;
        let began = Instant::now();
        loop {
            let token = match generation.next(&mut self.engine, &mut self.session, tokenizer, cancel) {
                Ok(Some(token)) => token,
                Ok(None) => break,
                Err(engine::Error::Cancelled { .. }) => {
                    self.interrupted = true;
                    self.show(&generation.rest(), args)?;
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            self.tokens.push(token.id);
            self.finish = token.finish;
            self.show(&token.text, args)?;
        }
        self.writing = began.elapsed();
        self.loads.mark();
        self.peaks.mark("write");
        if !args.json {
            println_flush()?;
        }
        Ok(())
    }

    /// Has plans know what a cache of this size finds in this model.
    fn keep(&self, args: &RunArgs) {
        let Cache::Slots(bytes) = self.plan.cache else { return };
        let tokens = self.tokens.len();
        if args.backend.cache.route_bias.is_some() || tokens < calibration::ENOUGH_TOKENS {
            return;
        }
        if let Some(found) = self.loads.found() {
            let (mut known, name) = (Calibration::load(), calibration::model_name(self.engine.model()));
            known.note_hits(&name, bytes as f64 / self.plan.experts.max(1) as f64, found, tokens);
            known.store();
        }
    }

    fn show(&mut self, text: &str, args: &RunArgs) -> Result<(), Failure> {
        self.text += text;
        if !args.json && !text.is_empty() {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }

    fn report(&mut self, args: &RunArgs) -> Result<(), Failure> {
        if let (Some(path), Some(times)) = (&args.trace, &self.profile.times) {
            trace::write(path, times, self.loads.monitor())?;
        }
        if args.json {
            let mut out = std::io::stdout().lock();
            return Ok(writeln!(out, "{}", self.json(args))?);
        }
        if args.stats {
            report::say(format_args!("\n{}", self.stage_table().trim_end()));
            let times = [("read", self.reading), ("write", self.writing)];
            self.loads.lines(times).iter().for_each(report::say);
            report::say(self.memory_line());
        }
        if !args.quiet {
            report::say(format_args!("\n{}", self.summary()));
        }
        Ok(())
    }

    fn finish_name(&self) -> &'static str {
        match self.finish {
            _ if self.interrupted => "interrupted",
            Some(Finish::Stop | Finish::StopText(_)) => "stop",
            Some(Finish::Context) => "context",
            Some(Finish::Length) | None => "length",
        }
    }

    fn summary(&self) -> String {
        let memory =
            self.peaks.most().map_or(String::new(), |bytes| format!("; peak {}", report::size(bytes)));
        format!(
            "read {} tokens at {:.1} tok/s, wrote {} at {:.1} tok/s ({}); loaded in {:.2} s{memory} [{}]",
            self.prompt,
            report::rate(self.prompt, self.reading),
            self.tokens.len(),
            report::rate(self.tokens.len(), self.writing),
            self.finish_name(),
            self.load.as_secs_f64(),
            self.variant,
        )
    }

    /// Peak resident memory of each phase, and what was planned for it.
    fn memory(&self) -> Vec<serde_json::Value> {
        let phases = self.peaks.phases().iter().zip(self.plan.phases());
        let phase = |(&(phase, peak), plan): (&(&str, Option<u64>), Phase)| json!({ "phase": phase, "peak_bytes": peak, "plan_bytes": plan.total });
        phases.map(phase).collect()
    }

    fn memory_line(&self) -> String {
        let phases = self.peaks.phases().iter().zip(self.plan.phases());
        let phase = |(&(phase, peak), plan): (&(&str, Option<u64>), Phase)| {
            let peak = peak.map_or("unknown".to_string(), report::size);
            format!("{phase} {peak} of {}", report::size(plan.total))
        };
        format!("memory, peak of the plan: {}", phases.map(phase).collect::<Vec<_>>().join(", "))
    }

    /// Time of ingestion by stage, the largest share visible at a glance.
    fn stage_table(&self) -> String {
        let total: Duration = self.profile.stages.values().sum();
        let mut rows: Vec<Vec<String>> = (self.profile.stages.iter())
            .map(|(stage, time)| stage_row(stage.name(), *time, total, self.prompt))
            .collect();
        rows.push(stage_row("total", total, total, self.prompt));
        report::table(&["stage", "ms", "share", "µs/token"], &rows)
    }

    fn json(&self, args: &RunArgs) -> serde_json::Value {
        let seconds = |time: Duration| time.as_secs_f64();
        let stages: serde_json::Map<String, serde_json::Value> = (self.profile.stages.iter())
            .map(|(stage, time)| (stage.name().to_string(), json!(seconds(*time))))
            .collect();
        let mut value = json!({
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish_name(),
            "prompt_tokens": self.prompt,
            "prompt_seconds": seconds(self.reading),
            "prompt_tokens_per_second": report::rate(self.prompt, self.reading),
            "generated_tokens": self.tokens.len(),
            "generated_seconds": seconds(self.writing),
            "generated_tokens_per_second": report::rate(self.tokens.len(), self.writing),
            "load_seconds": seconds(self.load),
            "peak_memory_bytes": self.peaks.most(),
            "memory": self.memory(),
            "kernels": self.variant,
        });
        if args.stats {
            value["stage_seconds"] = stages.into();
        }
        if let Some(bias) = args.backend.cache.route_bias {
            value["route_bias"] = json!(bias);
        }
        if let Some(loads) = self.loads.json() {
            value["loads"] = loads;
        }
        value
    }
}

fn stage_row(name: &str, time: Duration, total: Duration, tokens: usize) -> Vec<String> {
    let seconds = time.as_secs_f64();
    vec![
        name.to_string(),
        format!("{:.1}", seconds * 1e3),
        format!("{:.1} %", 100.0 * seconds / total.as_secs_f64().max(1e-9)),
        format!("{:.1}", seconds * 1e6 / tokens as f64),
    ]
}

fn println_flush() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(b"\n")?;
    out.flush()
}
