//! `redlite perplexity`: how well a model predicts a text.

use std::io::Write;

use engine::{Perplexity, npy};
use serde_json::json;

use crate::args::PerplexityArgs;
use crate::failure::{Failure, Outcome};
use crate::report::{self, Bar};
use crate::{interrupt, open, prompt};

/// Runs the command.
pub fn run(args: &PerplexityArgs) -> Result<Outcome, Failure> {
    let text = prompt::text(&args.text)?;
    let cancel = interrupt::on_ctrl_c()?;
    let opened = open::model(&args.model)?;
    args.save_base.as_deref().map_or(Ok(()), |path| open::refuse_input(path, &opened.model.gguf))?;
    let mut tokens = opened.tokenizer.encode_text(&text);
    tokens.truncate(args.limit.unwrap_or(usize::MAX));
    if tokens.len() < 2 {
        return Err(Failure::Usage("the text has fewer than two tokens: there is nothing to predict".into()));
    }
    let window = args.window.clamp(2, opened.model.spec.context);
    let scored = scored(&tokens, window);
    let vocab = opened.model.spec.vocab;
    let mut engine = open::start(&opened.model, &args.backend, window, args.json)?.engine;

    let mut base = args.base.as_deref().map(npy::Reader::open).transpose()?;
    if let Some(base) = &base
        && (base.rows(), base.cols()) != (scored.len(), vocab)
    {
        let (rows, cols) = (base.rows(), base.cols());
        let wanted = scored.len();
        return Err(Failure::Usage(format!(
            "the base run has {rows} rows of {cols} logits, this one {wanted} of {vocab}: use the same text and window"
        )));
    }
    let create = |path| npy::Writer::create(path, scored.len(), vocab);
    let mut save = args.save_base.as_deref().map(create).transpose()?;
    let mut failure = None;
    let bar = Bar::tokens("reading", tokens.len(), args.json);
    let mut visit = |_: usize, logits: &[f32]| {
        let mut step = || -> Result<Option<Vec<f32>>, npy::Error> {
            save.as_mut().map(|save| save.row(logits)).transpose()?;
            let Some(base) = &mut base else { return Ok(None) };
            let mut row = vec![0.0; vocab];
            base.row(&mut row)?;
            Ok(Some(row))
        };
        step().unwrap_or_else(|error| {
            failure.get_or_insert(error);
            cancel.cancel();
            None
        })
    };
    let result = engine::perplexity(&mut engine, &tokens, window, &cancel, &mut visit, &mut |done, _| {
        bar.set(done as u64)
    });
    bar.finish();
    if let Some(error) = failure {
        return Err(error.into());
    }
    let result = result?;
    if let Some(save) = save {
        save.finish()?;
    }
    let bytes = scored.iter().map(|&id| opened.tokenizer.token_bytes(id).map_or(0, <[u8]>::len)).sum();
    print(&result, bytes, args.json)?;
    Ok(Outcome::Success)
}

/// The tokens that are predicted: every one but the first of a window.
fn scored(tokens: &[u32], window: usize) -> Vec<u32> {
    tokens.chunks(window).flat_map(|part| &part[1..]).copied().collect()
}

fn print(result: &Perplexity, bytes: usize, as_json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let agreement = result.agreement.as_ref();
    if as_json {
        let mut value = json!({
            "tokens": result.tokens,
            "bytes": bytes,
            "nats_per_token": result.nats_per_token(),
            "bits_per_byte": result.bits_per_byte(bytes),
            "perplexity": result.perplexity(),
        });
        if let Some(a) = agreement {
            value["kl_mean"] = json!(a.kl_mean());
            value["kl_max"] = json!(a.kl_max);
            value["top1"] = json!(a.top_share());
        }
        return writeln!(out, "{value}");
    }
    let mut rows = vec![
        ("tokens predicted", result.tokens.to_string()),
        ("nats a token", format!("{:.4}", result.nats_per_token())),
        ("bits a byte", format!("{:.4}", result.bits_per_byte(bytes))),
        ("perplexity", format!("{:.4}", result.perplexity())),
    ];
    if let Some(a) = agreement {
        rows.push(("mean KL to base, nats", format!("{:.3e}", a.kl_mean())));
        rows.push(("largest KL, nats", format!("{:.3e}", a.kl_max)));
        rows.push(("same most likely token", format!("{:.2} %", 100.0 * a.top_share())));
    }
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|(name, value)| vec![name.to_string(), value]).collect();
    write!(out, "{}", report::table(&["measure", "value"], &rows))
}
