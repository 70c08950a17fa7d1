//! Prompts through a backend.

use std::sync::Arc;
use std::time::Duration;

use model::{
    Backend, Driver, ExpertSource, Intermediate, LayerCall, MappedExperts, Matrix, Model, Observer, Pass,
    PassId, PlacedExpert, Quiet, Result, SequenceId, Spec, Stage, Step, Wave,
};

/// Runs one pass from begin to commit and returns its logits.
///
/// # Panics
/// On any error.
pub fn run_pass(
    backend: &mut dyn Backend,
    spec: &Spec,
    pass: &Pass,
    experts: &mut dyn ExpertSource,
    observer: &mut dyn Observer,
) -> Matrix {
    let mut driver = Driver::begin(backend, spec, pass).expect("begin");
    driver.finish(backend, experts, observer).expect("every stage");
    let logits = if pass.logits.is_empty() {
        Matrix::default()
    } else {
        backend.logits(driver.pass()).expect("logits").to_matrix()
    };
    backend.commit(driver.pass()).expect("commit");
    logits
}

/// Appends a prompt to each sequence, at most `chunk` tokens of each in a pass, all sequences that have
/// tokens left in the same pass. Returns the logits of every token of each prompt.
///
/// # Panics
/// On any error.
pub fn ingest(
    backend: &mut dyn Backend,
    model: &Model,
    prompts: &[(SequenceId, &[u32])],
    chunk: usize,
) -> Vec<Matrix> {
    let mut experts = MappedExperts::new(model);
    let mut out = vec![Matrix { rows: 0, cols: model.spec.vocab, data: Vec::new() }; prompts.len()];
    let longest = prompts.iter().map(|(_, tokens)| tokens.len()).max().unwrap_or(0);
    for start in (0..longest).step_by(chunk) {
        let mut pass = Pass::new();
        let mut owners = Vec::new();
        for (owner, (sequence, tokens)) in prompts.iter().enumerate() {
            if start < tokens.len() {
                let piece = &tokens[start..tokens.len().min(start + chunk)];
                let position = backend.position(*sequence).expect("the sequence exists");
                owners.push((owner, pass.push(*sequence, position, piece)));
            }
        }
        pass.logits = (0..pass.rows()).collect();
        let logits = run_pass(backend, &model.spec, &pass, &mut experts, &mut Quiet);
        for (owner, rows) in owners {
            out[owner].rows += rows.len();
            out[owner].data.extend(rows.flat_map(|row| logits.row(row)));
        }
    }
    out
}

/// Root mean square of a − b, relative to that of b.
///
/// # Panics
/// If the lengths differ or a number is not finite.
pub fn relative_rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|x| x.is_finite()), "not finite");
    let squares = |f: &dyn Fn(usize) -> f64| (0..a.len()).map(|i| f(i) * f(i)).sum::<f64>();
    let error = squares(&|i| f64::from(a[i]) - f64::from(b[i]));
    (error / squares(&|i| f64::from(b[i])).max(f64::MIN_POSITIVE)).sqrt()
}

/// The experts of the mapped file, at most `size` to a wave, only those that rows have chosen.
#[derive(Debug)]
pub struct Waves {
    layers: Vec<Vec<PlacedExpert>>,
    size: usize,
}

impl Waves {
    /// Waves of `size` experts.
    pub fn new(model: &Model, size: usize) -> Waves {
        let layers = (0..model.spec.layers.len()).map(|layer| model.mapped_experts(layer)).collect();
        Waves { layers, size }
    }
}

impl ExpertSource for Waves {
    fn needs_routes(&self, _rows: usize) -> bool {
        true
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave> {
        let used = call.used.expect("routes were asked for");
        let left = &used[used.partition_point(|&expert| expert < from)..];
        let wave = &left[..self.size.min(left.len())];
        let experts: Arc<[PlacedExpert]> =
            wave.iter().map(|&expert| self.layers[call.layer][expert as usize]).collect();
        Ok(Wave { experts, last: wave.len() == left.len() })
    }
}

/// An observer that keeps every intermediate of every step.
#[derive(Debug, Default)]
pub struct Recorder {
    /// In the order of the steps: the step, the value, its rows.
    pub values: Vec<(Step, Intermediate, Matrix)>,
}

impl Recorder {
    /// The first recorded `what` of `layer`.
    ///
    /// # Panics
    /// If there is none.
    pub fn get(&self, what: Intermediate, layer: usize) -> &Matrix {
        let found = self.values.iter().find(|(step, i, _)| *i == what && step.layer == layer);
        &found.unwrap_or_else(|| panic!("no `{what}` of layer {layer}")).2
    }
}

impl Observer for Recorder {
    fn after(&mut self, step: &Step, _: Duration, backend: &mut dyn Backend, pass: PassId) -> Result<()> {
        for &what in step.stage.intermediates() {
            let value = backend.read(pass, what)?;
            assert!(value.is_some() || step.stage != Stage::Head, "logits are always kept");
            self.values.extend(value.map(|matrix| (step.clone(), what, matrix)));
        }
        Ok(())
    }
}
