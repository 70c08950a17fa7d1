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
    /// What caches find while single tokens are computed.
    pub hits: HitCurve,
}

/// What can be expected. Tokens a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Reading a long prompt.
    pub ingestion: Option<f64>,
    /// Generating.
    pub decode: Option<Writing>,
}

/// What can be expected of generating.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Writing {
    /// Tokens a second.
    pub rate: f64,
    /// The share of experts that is expected to be found in the cache.
    pub hits: f64,
    /// Whether that was measured with this model; else it is assumed.
    pub measured: bool,
}

/// Most points of a [`HitCurve`].
const POINTS: usize = 16;

/// Shares of all experts in a cache, and how many of a token's experts are found there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HitCurve {
    points: [(f64, f64); POINTS],
    len: usize,
    measured: bool,
}

/// What is assumed of a model that nothing was measured with: real text, least recently used, 512 experts of which ten
/// are used.
const ASSUMED: [(f64, f64); 4] = [(0.055, 0.56), (0.11, 0.70), (0.22, 0.80), (0.44, 0.88)];

impl Default for HitCurve {
    fn default() -> HitCurve {
        let mut curve = HitCurve::measured(ASSUMED);
        curve.measured = false;
        curve
    }
}

impl HitCurve {
    /// A curve through what was measured: share of experts in the cache, share found. Points that make no sense are
    /// left out; a larger cache never finds less.
    pub fn measured(found: impl IntoIterator<Item = (f64, f64)>) -> HitCurve {
        let inside = |x: f64| x > 0.0 && x < 1.0;
        let mut sound: Vec<(f64, f64)> =
            found.into_iter().filter(|&(share, hits)| inside(share) && (0.0..=1.0).contains(&hits)).collect();
        sound.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Between nothing and everything; as many as there is room for, spread over all.
        let room = POINTS - 2;
        let count = sound.len().min(room);
        let mut points = [(1.0, 1.0); POINTS];
        points[0] = (0.0, 0.0);
        let mut most = 0.0f64;
        for (index, point) in points[1..=count].iter_mut().enumerate() {
            let (share, hits) = sound[index * sound.len() / count];
            most = most.max(hits);
            *point = (share, most);
        }
        HitCurve { points, len: count + 2, measured: count > 0 }
    }

    /// Whether it was measured; else it is assumed.
    pub fn is_measured(&self) -> bool {
        self.measured
    }

    /// The share of a token's experts that a cache of `share` of all experts can be expected to hold.
    pub fn at(&self, share: f64) -> f64 {
        let (points, share) = (&self.points[..self.len], share.clamp(0.0, 1.0));
        let after = points.partition_point(|&(at, _)| at < share).clamp(1, points.len() - 1);
        let ((x0, y0), (x1, y1)) = (points[after - 1], points[after]);
        if x1 > x0 { y0 + (y1 - y0) * (share - x0) / (x1 - x0) } else { y1 }
    }
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

    /// Generating with `share` of all experts in the cache. What is missing is read while nothing else happens.
    pub(super) fn decode(&self, model: &Model, kv: KvType, positions: usize, share: f64) -> Option<Writing> {
        let used = model.spec.moe.used;
        let bytes = cost(model, kv, (positions / 2, 1), used).bytes as f64;
        let hits = self.hits.at(share);
        let wanted = model.expert_bytes() as f64 * used as f64 / model.spec.moe.experts as f64;
        let missing = wanted * (1.0 - hits);
        let load = if missing > 0.0 { missing / self.read? + missing * self.copy } else { 0.0 };
        let rate = 1.0 / (bytes / self.tokens? + load);
        Some(Writing { rate, hits, measured: self.hits.is_measured() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rates_grow_with_the_cache() {
        let curve = HitCurve::default();
        assert!(!curve.is_measured());
        assert_eq!((curve.at(0.0), curve.at(1.0), curve.at(2.0)), (0.0, 1.0, 1.0));
        assert!((curve.at(0.22) - 0.80).abs() < 1e-12);
        let rates: Vec<f64> = (0..=100).map(|n| curve.at(f64::from(n) / 100.0)).collect();
        assert!(rates.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn what_was_measured_replaces_what_is_assumed() {
        let curve = HitCurve::measured([(0.5, 0.6), (0.2, 0.3), (0.6, 0.5), (1.5, 0.2), (0.1, f64::NAN)]);
        assert!(curve.is_measured());
        assert_eq!([0.2, 0.5, 0.6].map(|share| curve.at(share)), [0.3, 0.6, 0.6], "sorted, never falling");
        assert!((curve.at(0.1) - 0.15).abs() < 1e-12 && (curve.at(0.8) - 0.8).abs() < 1e-12);
        assert!(!HitCurve::measured([(0.0, 0.5), (1.0, 1.0)]).is_measured(), "nothing that was not known");
        let many = HitCurve::measured((1..100).map(|n| (f64::from(n) / 100.0, f64::from(n) / 100.0)));
        assert!((0..=100).map(|n| f64::from(n) / 100.0).all(|x| (many.at(x) - x).abs() < 1e-9));
    }
}
