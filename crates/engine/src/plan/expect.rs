//! What a plan can be expected to reach, from what this machine reached before.

use model::state::KvType;
use model::{Cost, Model, Stage, Work};

use super::chunk::PassTime;

/// What this machine reaches. What is not known is assumed to be free, and nothing is promised about it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Bytes of experts that arrive in slots a second.
    pub read: Option<f64>,
    /// Seconds of computing lost for each byte that arrives: copies from the file cache take processors' time.
    pub copy: f64,
    /// Operations a second while a prompt is read.
    pub ingestion: Option<f64>,
    /// Bytes of expert weights decoded a second, once a pass.
    pub decoding: Option<f64>,
    /// Bytes of weights and state a second while single tokens are computed.
    pub tokens: Option<f64>,
}

/// What can be expected. Tokens a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Reading a long prompt.
    pub ingestion: Option<f64>,
    /// Generating, and the share of experts that is expected to be found in the cache.
    pub decode: Option<(f64, f64)>,
}

/// Shares of all experts in a cache, and how many of a token's experts are found there in real text
/// (least recently used, 512 experts of which ten are used).
const HITS: [(f64, f64); 6] =
    [(0.0, 0.0), (0.055, 0.56), (0.11, 0.70), (0.22, 0.80), (0.44, 0.88), (1.0, 1.0)];

/// The share of a token's experts that a cache of `share` of all experts can be expected to hold.
pub fn hit_rate(share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    let after = HITS.partition_point(|&(at, _)| at < share).clamp(1, HITS.len() - 1);
    let ((x0, y0), (x1, y1)) = (HITS[after - 1], HITS[after]);
    y0 + (y1 - y0) * (share - x0) / (x1 - x0)
}

/// What a call over all layers costs: `rows` rows from position `start` on, `experts` of each layer used.
pub fn cost(model: &Model, kv: KvType, (start, rows): (usize, usize), experts: usize) -> Cost {
    let work = Work { rows, start, kv, experts, logits: 1 };
    let spec = &model.spec;
    let ends = [Stage::Embed, Stage::Head].into_iter().map(|stage| model.cost(stage, 0, &work));
    let layers = spec.layers.iter().enumerate().flat_map(|(layer, kind)| {
        let mixer = match kind {
            model::LayerKind::Delta => [Stage::DeltaProject, Stage::DeltaMix, Stage::DeltaOut],
            model::LayerKind::Attention => [Stage::AttnProject, Stage::AttnMix, Stage::AttnOut],
        };
        let rest = [Stage::Route, Stage::Shared, Stage::Experts];
        mixer.into_iter().chain(rest).map(move |stage| model.cost(stage, layer, &work))
    });
    ends.chain(layers).sum()
}

impl Rates {
    /// What a pass takes in which `streamed` bytes of experts are read. Rows cost what they cost in the middle of
    /// `positions`.
    pub(super) fn pass(&self, model: &Model, kv: KvType, positions: usize, streamed: u64) -> PassTime {
        let rows = 1024;
        let start = (positions.min(16_384) / 2).saturating_sub(rows);
        let operations = cost(model, kv, (start, rows), model.spec.moe.experts).operations() as f64;
        let decode = self.decoding.map_or(0.0, |rate| model.expert_bytes() as f64 / rate);
        PassTime {
            row: self.ingestion.map_or(0.0, |rate| operations / rate / rows as f64),
            pass: decode + self.copy * streamed as f64,
            load: self.read.map_or(0.0, |rate| streamed as f64 / rate),
        }
    }

    /// Tokens a second while generating with `share` of all experts in the cache, and the hits that are
    /// expected. What is missing is read while nothing else happens.
    pub(super) fn decode(
        &self,
        model: &Model,
        kv: KvType,
        positions: usize,
        share: f64,
    ) -> Option<(f64, f64)> {
        let used = model.spec.moe.used;
        let bytes = cost(model, kv, (positions / 2, 1), used).bytes as f64;
        let hits = hit_rate(share);
        let wanted = model.expert_bytes() as f64 * used as f64 / model.spec.moe.experts as f64;
        let missing = wanted * (1.0 - hits);
        let load = if missing > 0.0 { missing / self.read? + missing * self.copy } else { 0.0 };
        Some((1.0 / (bytes / self.tokens? + load), hits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rates_grow_with_the_cache() {
        assert_eq!((hit_rate(0.0), hit_rate(1.0), hit_rate(2.0)), (0.0, 1.0, 1.0));
        assert!((hit_rate(0.22) - 0.80).abs() < 1e-12);
        let rates: Vec<f64> = (0..=100).map(|n| hit_rate(f64::from(n) / 100.0)).collect();
        assert!(rates.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
