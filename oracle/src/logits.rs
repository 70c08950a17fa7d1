//! `logits`: a row of logits for every requested position, as .npy.

use std::path::PathBuf;

use crate::error::Error;
use crate::llama::{Context, Load, Model, Options};
use crate::output::Npy;
use crate::tokens::{self, Rows};
use crate::{Switch, default_threads};

/// Write the logits of a token sequence as an f32 .npy array [rows, vocabulary].
///
/// The defaults are the most exact arithmetic llama.cpp has: KV cache in f32, no flash attention,
/// weights used as the file stores them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file
    model: PathBuf,
    /// File of token ids: a JSON array, or integers separated by whitespace
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// Where to write the array
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Positions to write, end exclusive: a..b, a.. or ..b [default: all]
    #[arg(long, value_name = "A..B")]
    rows: Option<Rows>,
    /// Tokens handed to llama.cpp at once; their logits are held in memory together
    /// [default: the value of --ubatch]
    #[arg(long, value_name = "N", value_parser = crate::positive)]
    batch: Option<usize>,
    /// Tokens evaluated together
    #[arg(long, value_name = "N", default_value = "512", value_parser = crate::positive)]
    ubatch: usize,
    /// CPU threads [default: all]
    #[arg(long, value_name = "N", value_parser = crate::positive)]
    threads: Option<usize>,
    /// Type of the KV cache
    #[arg(long, value_enum, default_value = "f32")]
    kv: crate::Kv,
    /// Flash attention
    #[arg(long, value_enum, default_value = "off")]
    flash_attn: Switch,
    /// Copy weights into layouts with faster kernels, whose rounding may differ
    #[arg(long, value_enum, default_value = "off")]
    repack: Switch,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Error> {
    let load = if args.repack.is_on() { Load::Repacked } else { Load::Plain };
    let model = Model::load(&args.model, load)?;
    let tokens = tokens::read(&args.tokens, model.vocabulary())?;
    let rows = args.rows.as_ref().unwrap_or(&Rows::ALL).within(tokens.len())?;
    // What follows the last requested row cannot change it.
    let tokens = &tokens[..rows.end];
    let batch = args.batch.unwrap_or(args.ubatch).min(tokens.len());
    let options = Options {
        context: tokens.len(),
        batch,
        ubatch: args.ubatch.min(batch),
        outputs: batch,
        threads: args.threads.unwrap_or_else(default_threads),
        kv_f32: args.kv == crate::Kv::F32,
        flash_attention: Some(args.flash_attn.is_on()),
    };
    let mut context = Context::new(&model, options)?;
    let mut npy = Npy::create(&args.output, rows.len(), model.vocabulary())?;
    let mut start = 0;
    for chunk in tokens.chunks(batch) {
        let wanted: Vec<bool> =
            (start..start + chunk.len()).map(|position| rows.contains(&position)).collect();
        context.decode(chunk, &wanted)?;
        for index in (0..chunk.len()).filter(|&index| wanted[index]) {
            let row = context.logits(index).ok_or_else(|| Error::Decode {
                position: start + index,
                code: 0,
                detail: "llama.cpp returned no logits for it".to_string(),
            })?;
            npy.row(row)?;
        }
        start += chunk.len();
    }
    npy.finish()
}
