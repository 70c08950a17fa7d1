//! Where the bytes of routed experts come from.

use std::sync::Arc;

use crate::backend::{Matrix, PlacedExpert, Wave};
use crate::error::Result;
use crate::model::Model;

/// A layer whose experts a pass needs.
#[derive(Clone, Copy, Debug)]
pub struct LayerCall<'a> {
    /// The layer, 0-based.
    pub layer: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// Rows of the pass that will follow this one; 0 if none is known to.
    pub follow: usize,
    /// The experts the rows chose, ascending; `None` if not asked for: then it may be any.
    pub used: Option<&'a [u32]>,
}

/// A source of experts. Passes may take turns between any two waves.
pub trait ExpertSource {
    /// Whether in every pass of `rows` rows all experts are in the same places, and the source neither has to be asked for
    /// them nor wants to hear anything: a backend may then do again what it did in the pass before. By default no.
    fn rests(&self, _rows: usize) -> bool {
        false
    }

    /// Whether [`LayerCall::used`] must be told for a pass of `rows` rows. Reading routes waits for the backend,
    /// so a source that has every expert in place, or brings the whole layer anyway, says no.
    fn needs_routes(&self, rows: usize) -> bool;

    /// A layer begins: its missing experts may start to load. Does not wait.
    ///
    /// # Errors
    /// Those of the source.
    fn start(&mut self, _call: &LayerCall) -> Result<()> {
        Ok(())
    }

    /// The next wave of the layer: wanted experts from `from` on, ascending, their bytes in place until
    /// [`ExpertSource::release`]. Waits for them. The layer's last wave says so.
    ///
    /// # Errors
    /// Those of the source.
    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave>;

    /// The last wave has been computed, or enqueued by a backend that orders writes behind it.
    fn release(&mut self) {}

    /// Whether the source wants the next layer predicted in a pass of `rows` rows, and how many experts beyond
    /// each row's choice.
    fn wants_prediction(&self, _rows: usize) -> Option<usize> {
        None
    }

    /// The experts `layer` will probably choose, ascending.
    fn predicted(&mut self, _layer: usize, _experts: &[u32]) {}

    /// Numbers to be added to the router's logits of `layer` when a pass of `rows` rows chooses its experts, one for
    /// each: a source may prefer what it has, which changes results. Empty or `None` leaves them as they are.
    fn route_bias(&mut self, _layer: usize, _rows: usize) -> Option<Vec<f32>> {
        None
    }

    /// Rows up to which passes leave the source all of its memory. Before a larger one begins, and when the last of them
    /// is over, [`ExpertSource::lend`] is called.
    fn small_rows(&self) -> usize {
        usize::MAX
    }

    /// Gives up memory that activations of large passes may take from now on, or takes it back. Called between
    /// [`ExpertSource::release`] and the next wave, whatever passes are open.
    ///
    /// # Errors
    /// Those of the source.
    fn lend(&mut self, _lend: bool) -> Result<()> {
        Ok(())
    }

    /// Whether the source wants to hear what each row chooses in a layer.
    fn wants_choices(&self, _call: &LayerCall) -> bool {
        false
    }

    /// What each row of a block chose in `layer`, by falling weight: [rows, used].
    fn choices(&mut self, _layer: usize, _ids: &Matrix) {}
}

/// Rows for which a layer's experts are computed in one go: more take so long that others should get their turn.
const TOGETHER: usize = 2048;

impl Wave {
    /// The next wave of a layer all of whose experts are in place, from `from` on, for `rows` rows: all of them, or fewer
    /// if that would take long.
    pub fn of_layer(experts: &Arc<[PlacedExpert]>, rows: usize, from: u32) -> Wave {
        if rows <= TOGETHER && from == 0 {
            return Wave { experts: experts.clone(), last: true };
        }
        let first = (from as usize).min(experts.len());
        let count = (experts.len() * TOGETHER).div_ceil(rows.max(1)).max(1);
        let end = (first + count).min(experts.len());
        Wave { experts: experts[first..end].into(), last: end == experts.len() }
    }
}

/// The mapped file as a source: every expert is in place, the operating system fetches it.
#[derive(Clone, Debug)]
pub struct MappedExperts {
    layers: Vec<Arc<[PlacedExpert]>>,
    /// Whether a layer is always one wave.
    whole: bool,
}

impl MappedExperts {
    /// All experts of `model`.
    pub fn new(model: &Model) -> MappedExperts {
        let layers = (0..model.spec.layers.len()).map(|layer| model.mapped_experts(layer).into()).collect();
        MappedExperts { layers, whole: false }
    }

    /// The same for a backend whose calls only enqueue: nobody waits for the end of one, so large passes need no
    /// turns inside a layer, and fewer experts at a time would only leave it less to do at once.
    pub fn in_whole_layers(self) -> MappedExperts {
        MappedExperts { whole: true, ..self }
    }
}

impl ExpertSource for MappedExperts {
    fn rests(&self, _rows: usize) -> bool {
        true
    }

    fn needs_routes(&self, _rows: usize) -> bool {
        false
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave> {
        let rows = if self.whole { 0 } else { call.rows };
        Ok(Wave::of_layer(&self.layers[call.layer], rows, from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Slot;

    #[test]
    fn large_passes_compute_a_layer_in_several_waves() {
        let slot = Slot { arena: 0, gate: 0, up: 0, down: 0 };
        let all: Arc<[PlacedExpert]> = (0..10).map(|expert| PlacedExpert { expert, slot }).collect();
        for (rows, count) in [
            (1, 1),
            (TOGETHER, 1),
            (TOGETHER + 1, 1),
            (2 * TOGETHER, 2),
            (3 * TOGETHER, 3),
            (100 * TOGETHER, 10),
        ] {
            let (mut from, mut seen, mut waves) = (0, Vec::new(), 0);
            loop {
                let wave = Wave::of_layer(&all, rows, from);
                seen.extend(wave.experts.iter().map(|placed| placed.expert));
                from = seen.last().unwrap() + 1;
                waves += 1;
                if wave.last {
                    break;
                }
            }
            assert_eq!(seen, (0..10).collect::<Vec<_>>());
            assert_eq!(waves, count, "{rows} rows");
        }
    }
}
