//! How well a model predicts a text, and how far its predictions are from those of a base run.

use crate::cancel::Cancel;
use crate::compare::{Agreement, log_sum_exp};
use crate::engine::Engine;
use crate::error::Result;
use crate::ingestion::{LogitRows, OnProgress, Request};

/// Loss over a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Tokens predicted.
    pub tokens: usize,
    /// Sum of −ln p of each, nats.
    pub nats: f64,
    /// Agreement with the base run, if there was one.
    pub agreement: Option<Agreement>,
}

impl Perplexity {
    /// Nats a token.
    pub fn nats_per_token(&self) -> f64 {
        self.nats / self.tokens.max(1) as f64
    }

    /// exp(nats a token).
    pub fn perplexity(&self) -> f64 {
        self.nats_per_token().exp()
    }

    /// Bits a byte, if the predicted tokens spell `bytes` bytes.
    pub fn bits_per_byte(&self, bytes: usize) -> f64 {
        self.nats / std::f64::consts::LN_2 / bytes.max(1) as f64
    }
}

/// Sees the logits of every predicting position in order (index into the tokens) and may return those of a base
/// run to compare with.
pub type Visit<'a> = dyn FnMut(usize, &[f32]) -> Option<Vec<f32>> + 'a;

/// Reads `tokens` in windows of `window`, each from an empty session, and scores every token but a
/// window's first.
///
/// # Errors
/// Those of [`Engine::ingest`]; `visit`'s own are its caller's business.
pub fn perplexity(
    engine: &mut Engine,
    tokens: &[u32],
    window: usize,
    cancel: &Cancel,
    visit: &mut Visit<'_>,
    on_progress: &mut OnProgress<'_>,
) -> Result<Perplexity> {
    let mut total = Perplexity::default();
    for (index, part) in tokens.chunks(window.max(2)).enumerate().filter(|(_, part)| part.len() > 1) {
        let mut session = engine.open();
        let mut score = |row: usize, logits: &[f32]| {
            let next = part[row + 1] as usize;
            total.tokens += 1;
            total.nats += log_sum_exp(logits) - f64::from(logits[next]);
            if let Some(base) = visit(index * window + row, logits) {
                total.agreement.get_or_insert_with(Agreement::default).add(&base, logits);
            }
        };
        let mut progress = |done: f64, _| on_progress((index * window) as f64 + done, tokens.len());
        let mut request = Request {
            logits: LogitRows::Range(0..part.len() - 1),
            on_logits: Some(&mut score),
            on_progress: Some(&mut progress),
            cancel: cancel.clone(),
            ..Request::default()
        };
        let result = engine.ingest(&mut session, part, &mut request);
        engine.close(session);
        result?;
    }
    Ok(total)
}
