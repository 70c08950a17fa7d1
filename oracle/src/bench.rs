//! `bench`: tokens per second of prompt ingestion and of generation.

use std::collections::BTreeSet;
use std::env;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;

use crate::error::Error;
use crate::llama::{Context, Load, Model, Options};
use crate::{Kv, Switch, cpu, default_threads, info, llama};

/// Measure prompt and generation speed on random token ids.
///
/// Every measurement starts from an empty sequence and follows an unmeasured one of the same
/// shape. The defaults are llama.cpp's own: f16 KV, repacked weights, flash attention where it
/// thinks fit. Refuses to run (exit status 3) when the library was not built for this CPU, or
/// OMP_THREAD_LIMIT or OMP_DYNAMIC would leave it fewer threads than asked for.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file
    model: PathBuf,
    /// Prompt lengths
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512,2048", value_parser = crate::positive)]
    prompt: Vec<usize>,
    /// Tokens to generate, one by one; 0 measures prompts only
    #[arg(long = "gen", value_name = "N", default_value_t = 64)]
    generate: usize,
    /// Tokens in the sequence before generation is measured
    #[arg(long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Tokens evaluated together; values above the prompt length count as the prompt length
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512,2048,4096", value_parser = crate::positive)]
    ubatch: Vec<usize>,
    /// CPU threads [default: all]
    #[arg(long, value_name = "N", value_parser = crate::positive)]
    threads: Option<usize>,
    /// Measurements of each kind
    #[arg(long, value_name = "N", default_value = "5", value_parser = crate::positive)]
    repeat: usize,
    /// Seed of the token ids
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Type of the KV cache
    #[arg(long, value_enum, default_value = "f16")]
    kv: Kv,
    /// Flash attention [default: llama.cpp's choice]
    #[arg(long, value_enum)]
    flash_attn: Option<Switch>,
    /// Copy weights into layouts with faster kernels
    #[arg(long, value_enum, default_value = "on")]
    repack: Switch,
    /// Print one JSON object with every sample
    #[arg(long)]
    json: bool,
}

/// One kind of measurement and its samples in tokens per second, ascending.
struct Measured {
    test: &'static str,
    tokens: usize,
    depth: usize,
    ubatch: usize,
    samples: Vec<f64>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Error> {
    refuse_gifts()?;
    let load = if args.repack.is_on() { Load::Repacked } else { Load::Plain };
    let model = Model::load(&args.model, load)?;
    let mut measured = Vec::new();
    for (tokens, ubatch) in prompt_shapes(&args.prompt, &args.ubatch) {
        let mut context = Context::new(&model, options(args, tokens, tokens.min(BATCH.max(ubatch)), ubatch))?;
        let ids = random_ids(args.seed, tokens, model.vocabulary());
        let samples = sample(args.repeat, tokens, &mut context, |_| Ok(()), |context| ingest(context, &ids))?;
        measured.push(Measured { test: "prompt", tokens, depth: 0, ubatch, samples });
    }
    if args.generate > 0 {
        let ubatch = args.depth.clamp(1, 512);
        let mut context = Context::new(&model, options(args, args.depth + args.generate, ubatch, ubatch))?;
        let ids = random_ids(args.seed, args.depth + args.generate, model.vocabulary());
        let (before, generated) = ids.split_at(args.depth);
        let prepare = |context: &mut Context<'_>| ingest(context, before);
        let generate =
            |context: &mut Context<'_>| generated.iter().try_for_each(|&id| context.decode(&[id], &[true]));
        let samples = sample(args.repeat, args.generate, &mut context, prepare, generate)?;
        measured.push(Measured { test: "gen", tokens: args.generate, depth: args.depth, ubatch: 1, samples });
    }
    report(args, &model, &measured).map_err(Error::Stdout)
}

/// Measurements that would make llama.cpp look slower than it is are not taken.
fn refuse_gifts() -> Result<(), Error> {
    let system = llama::system_info();
    let unused = cpu::unused(&system);
    if !unused.is_empty() {
        return Err(Error::NotNative { missing: unused.join(", ") });
    }
    let limits = ["OMP_THREAD_LIMIT", "OMP_DYNAMIC"].into_iter().find(|name| env::var_os(name).is_some());
    match limits.filter(|_| cpu::reports(&system, "OPENMP")) {
        Some(name) => Err(Error::Environment(name)),
        None => Ok(()),
    }
}

/// llama.cpp's default logical batch; larger physical ones raise it.
const BATCH: usize = 2048;

/// Each (prompt length, tokens evaluated together) once: a physical batch longer
/// than the prompt is the prompt.
fn prompt_shapes(prompts: &[usize], ubatches: &[usize]) -> BTreeSet<(usize, usize)> {
    prompts
        .iter()
        .flat_map(|&tokens| ubatches.iter().map(move |&ubatch| (tokens, ubatch.min(tokens))))
        .collect()
}

fn options(args: &Args, context: usize, batch: usize, ubatch: usize) -> Options {
    Options {
        context,
        batch,
        ubatch,
        outputs: 1,
        threads: args.threads.unwrap_or_else(default_threads),
        kv_f32: args.kv == Kv::F32,
        flash_attention: args.flash_attn.map(Switch::is_on),
    }
}

/// Feeds `ids` in logical batches; only the last token gets logits, as a prompt's would.
fn ingest(context: &mut Context<'_>, ids: &[i32]) -> Result<(), Error> {
    let mut left = ids;
    while !left.is_empty() {
        let (now, rest) = left.split_at(left.len().min(context.batch()));
        let mut wanted = vec![false; now.len()];
        wanted[now.len() - 1] = rest.is_empty();
        context.decode(now, &wanted)?;
        left = rest;
    }
    Ok(())
}

/// Times `work` on `tokens` tokens `repeat` times, each after clearing and `prepare`, and once
/// unmeasured before that. Returns tokens per second, ascending.
fn sample<'model>(
    repeat: usize,
    tokens: usize,
    context: &mut Context<'model>,
    prepare: impl Fn(&mut Context<'model>) -> Result<(), Error>,
    work: impl Fn(&mut Context<'model>) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let mut samples = Vec::with_capacity(repeat);
    for measurement in 0..=repeat {
        context.clear();
        prepare(context)?;
        let start = Instant::now();
        work(context)?;
        if measurement > 0 {
            samples.push(tokens as f64 / start.elapsed().as_secs_f64());
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// Middle of ascending samples, of which there is at least one.
fn median(samples: &[f64]) -> f64 {
    let half = samples.len() / 2;
    if samples.len() % 2 == 1 { samples[half] } else { (samples[half - 1] + samples[half]) / 2.0 }
}

/// Uniform token ids from a SplitMix64 sequence.
fn random_ids(seed: u64, count: usize, vocabulary: usize) -> Vec<i32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    // The vocabulary came from the library as a positive i32.
    (0..count).map(|_| ((u128::from(next()) * vocabulary as u128) >> 64) as i32).collect()
}

fn report(args: &Args, model: &Model, measured: &[Measured]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let (bytes, parameters) = model.size();
    let threads = args.threads.unwrap_or_else(default_threads);
    let system = llama::system_info();
    let openmp = cpu::reports(&system, "OPENMP");
    if args.json {
        let results: Vec<_> = measured
            .iter()
            .map(|row| {
                json!({
                    "test": row.test, "tokens": row.tokens, "depth": row.depth, "ubatch": row.ubatch,
                    "median": median(&row.samples), "min": row.samples[0],
                    "max": row.samples[row.samples.len() - 1], "samples": row.samples,
                })
            })
            .collect();
        let report = json!({
            "library": info::library(), "system_info": system, "openmp": openmp,
            "model": args.model.display().to_string(), "description": model.description(),
            "bytes": bytes, "parameters": parameters, "threads": threads,
            "kv": if args.kv == Kv::F32 { "f32" } else { "f16" },
            "flash_attention": args.flash_attn.map(Switch::is_on), "repack": args.repack.is_on(),
            "seed": args.seed, "repeat": args.repeat, "unit": "tokens/s", "results": results,
        });
        return writeln!(out, "{report:#}");
    }
    writeln!(
        out,
        "{}: {}, {:.2} GB, {threads} threads{}",
        args.model.display(),
        model.description(),
        bytes as f64 / 1e9,
        if openmp { " (OpenMP)" } else { "" },
    )?;
    writeln!(
        out,
        "{:<8}{:>8}{:>8}{:>8}{:>14}{:>10}{:>10}",
        "test", "tokens", "depth", "ubatch", "tokens/s", "min", "max"
    )?;
    for row in measured {
        writeln!(
            out,
            "{:<8}{:>8}{:>8}{:>8}{:>14.2}{:>10.2}{:>10.2}",
            row.test,
            row.tokens,
            row.depth,
            row.ubatch,
            median(&row.samples),
            row.samples[0],
            row.samples[row.samples.len() - 1],
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_longer_than_the_prompt_are_measured_once() {
        let shapes: Vec<_> = prompt_shapes(&[2048, 512], &[512, 2048, 4096]).into_iter().collect();
        assert_eq!(shapes, [(512, 512), (2048, 512), (2048, 2048)]);
    }

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median(&[1.0]), 1.0);
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
    }

    #[test]
    fn ids_repeat_with_the_seed_and_stay_in_the_vocabulary() {
        let ids = random_ids(7, 1000, 10);
        assert_eq!(ids, random_ids(7, 1000, 10));
        assert_ne!(ids, random_ids(8, 1000, 10));
        assert!((0..10).all(|id| ids.contains(&id)));
        assert!(ids.iter().all(|id| (0..10).contains(id)));
    }
}
