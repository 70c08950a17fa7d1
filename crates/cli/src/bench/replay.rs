//! Replaying a routing trace: experts are chosen by it instead of the router while tokens are generated, so that a
//! cache finds what it finds in real text, whatever the weights.

use experts::Layout;
use experts::simulate::{Chosen, Generator, Likeness};
use model::{ExpertSource, LayerCall, Matrix, Model, Result, Wave};

/// Far beyond any logit of a router.
const CHOSEN: f32 = 1e6;

/// A source of experts that also says which ones are chosen.
pub struct Replay {
    inner: Box<dyn ExpertSource + Send>,
    generator: Generator,
    experts: usize,
    token: Vec<Chosen>,
}

impl Replay {
    /// A trace like `like` for a cache cut as `layout`, through `inner`.
    pub fn new(inner: Box<dyn ExpertSource + Send>, model: &Model, layout: Layout, like: Likeness) -> Replay {
        let moe = &model.spec.moe;
        let generator = Generator::new(layout, moe.used, like);
        Replay { inner, generator, experts: moe.experts, token: Vec::new() }
    }
}

impl ExpertSource for Replay {
    fn needs_routes(&self, rows: usize) -> bool {
        self.inner.needs_routes(rows)
    }

    fn start(&mut self, call: &LayerCall) -> Result<()> {
        self.inner.start(call)
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave> {
        self.inner.wave(call, from)
    }

    fn release(&mut self) {
        self.inner.release();
    }

    fn wants_prediction(&self, rows: usize) -> Option<usize> {
        self.inner.wants_prediction(rows)
    }

    fn predicted(&mut self, layer: usize, experts: &[u32]) {
        match self.token.get(layer) {
            Some(chosen) => self.inner.predicted(layer, &chosen.predicted),
            None => self.inner.predicted(layer, experts),
        }
    }

    fn route_bias(&mut self, layer: usize, rows: usize) -> Option<Vec<f32>> {
        if rows != 1 {
            self.token.clear();
            return self.inner.route_bias(layer, rows);
        }
        if layer == 0 {
            self.token = self.generator.next_token();
        }
        let mut bias = vec![0.0; self.experts];
        self.token[layer].used.iter().for_each(|&expert| bias[expert as usize] = CHOSEN);
        Some(bias)
    }

    fn small_rows(&self) -> usize {
        self.inner.small_rows()
    }

    fn lend(&mut self, lend: bool) -> Result<()> {
        self.inner.lend(lend)
    }

    fn wants_choices(&self, call: &LayerCall) -> bool {
        self.inner.wants_choices(call)
    }

    fn choices(&mut self, layer: usize, ids: &Matrix) {
        self.inner.choices(layer, ids);
    }
}
