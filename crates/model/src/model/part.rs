//! Some layers of a model, as a model of their own, for machines that share the layers of one.

use std::ops::Range;

use super::Model;
use crate::spec::{MoeSpec, Spec};
use crate::stage::Stage;
use crate::state::KvType;
use crate::weights::{MatrixInfo, Weights};
use crate::{LayerKind, Work};

impl Model {
    /// The layers `layers` as a model of the same file, layer 0 being the first of them. One that does not begin with the
    /// model's first layer has an embedding of no rows, one that does not end with its last an output projection of no rows.
    ///
    /// # Panics
    /// If there are no such layers, or none are asked for.
    pub fn part(&self, layers: Range<usize>) -> Model {
        assert!(!layers.is_empty() && layers.end <= self.spec.layers.len(), "layers of the model");
        let nothing = |info: &MatrixInfo| MatrixInfo { rows: 0, parts: Vec::new(), ..info.clone() };
        let (first, last) = (layers.start == 0, layers.end == self.spec.layers.len());
        let widths = self.spec.moe.widths[layers.clone()].to_vec();
        let output = &self.weights.output;
        Model {
            gguf: self.gguf.clone(),
            spec: Spec {
                layers: self.spec.layers[layers.clone()].to_vec(),
                moe: MoeSpec { widths, ..self.spec.moe.clone() },
                ..self.spec.clone()
            },
            embedding: if first { self.embedding.clone() } else { nothing(&self.embedding) },
            weights: Weights {
                layers: self.weights.layers[layers.clone()].to_vec(),
                output_norm: self.weights.output_norm.clone(),
                output: if last { output.clone() } else { nothing(output) },
            },
            experts: self.experts[layers].to_vec(),
            tied: self.tied,
            warnings: Vec::new(),
        }
    }

    /// Whether its first layer is the first of the file's model: it has the embedding.
    pub fn has_start(&self) -> bool {
        self.embedding.rows > 0
    }

    /// Whether its last layer is the last of the file's model: it has the output projection.
    pub fn has_end(&self) -> bool {
        self.weights.output.rows > 0
    }

    /// Cuts the layers into `parts` parts, in order, that take about the same time to read a prompt: at most as many
    /// as there are layers.
    pub fn cut(&self, parts: usize) -> Vec<Range<usize>> {
        let costs: Vec<u64> = (0..self.spec.layers.len()).map(|layer| self.reading_cost(layer)).collect();
        cut(&costs, parts)
    }

    /// Operations of a layer over a block of a long prompt.
    fn reading_cost(&self, layer: usize) -> u64 {
        use Stage as S;
        let work =
            Work { rows: 2048, start: 8192, kv: KvType::F16, experts: self.spec.moe.experts, logits: 0 };
        let mixer = match self.spec.layers[layer] {
            LayerKind::Delta => [S::DeltaProject, S::DeltaMix, S::DeltaOut],
            LayerKind::Attention => [S::AttnProject, S::AttnMix, S::AttnOut],
        };
        let stages = mixer.into_iter().chain([S::Route, S::Shared, S::Experts]);
        stages.map(|stage| self.cost(stage, layer, &work).operations()).sum()
    }
}

/// Cuts `costs` into `parts` ranges of about the same sum, none of them empty.
fn cut(costs: &[u64], parts: usize) -> Vec<Range<usize>> {
    let parts = parts.clamp(1, costs.len().max(1));
    let before = |at: usize| costs[..at].iter().sum::<u64>();
    let total = before(costs.len());
    let mut ranges: Vec<Range<usize>> = Vec::with_capacity(parts);
    for part in 1..=parts {
        let start = ranges.last().map_or(0, |range| range.end);
        // Every later part needs a layer too.
        let ends = start + 1..=costs.len() - (parts - part);
        let ideal = u128::from(total) * part as u128;
        let end = ends.min_by_key(|&end| (u128::from(before(end)) * parts as u128).abs_diff(ideal));
        let end = if part == parts { costs.len() } else { end.expect("a layer for each part") };
        ranges.push(start..end);
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn parts_cost_about_the_same_and_are_never_empty() {
        assert_eq!(cut(&[1; 48], 2), [0..24, 24..48]);
        assert_eq!(cut(&[1, 1, 1, 5, 1, 1, 1, 5], 2), [0..4, 4..8]);
        assert_eq!(cut(&[9, 1, 1, 1, 1, 1], 2), [0..1, 1..6]);
        assert_eq!(cut(&[1, 1, 1, 1, 1, 9], 2), [0..5, 5..6]);
        assert_eq!(cut(&[9, 1, 1], 3), [0..1, 1..2, 2..3], "every part has a layer");
        assert_eq!(cut(&[1, 1, 9], 3), [0..1, 1..2, 2..3]);
        assert_eq!(cut(&[1; 7], 3), [0..2, 2..5, 5..7]);
        assert_eq!(cut(&[1, 1], 8), [0..1, 1..2], "no more parts than layers");
        assert_eq!(cut(&[3; 4], 1).len(), 1);
        for parts in 1..=8 {
            let ranges = cut(&[5, 1, 1, 1, 40, 1, 1, 1], parts);
            assert_eq!((ranges.len(), ranges[0].start, ranges[parts - 1].end), (parts, 0, 8));
            assert!(ranges.iter().all(|range| !range.is_empty()));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
