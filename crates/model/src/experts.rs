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

    /// Whether the source wants to hear what each row chooses in a layer.
    fn wants_choices(&self, _call: &LayerCall) -> bool {
        false
    }

    /// What each row of a block chose in `layer`, by falling weight: [rows, used].
    fn choices(&mut self, _layer: usize, _ids: &Matrix) {}
}

/// The mapped file as a source: every expert is in place, the operating system fetches it.
#[derive(Clone, Debug)]
pub struct MappedExperts {
    layers: Vec<Arc<[PlacedExpert]>>,
}

impl MappedExperts {
    /// All experts of `model`.
    pub fn new(model: &Model) -> MappedExperts {
        let layers = (0..model.spec.layers.len()).map(|layer| model.mapped_experts(layer).into()).collect();
        MappedExperts { layers }
    }
}

impl ExpertSource for MappedExperts {
    fn needs_routes(&self, _rows: usize) -> bool {
        false
    }

    fn wave(&mut self, call: &LayerCall, _from: u32) -> Result<Wave> {
        Ok(Wave { experts: self.layers[call.layer].clone(), last: true })
    }
}
