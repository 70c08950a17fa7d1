//! Passes of several sequences on a GPU that holds a model.

use std::sync::Arc;

use model::{Backend, Driver, MappedExperts, Model, Pass, Quiet, SequenceId};
use redlite_cuda::Cuda;

pub(crate) struct Passes {
    pub(crate) model: Arc<Model>,
    pub(crate) cuda: Cuda,
    pub(crate) experts: MappedExperts,
}

impl Passes {
    /// One pass that appends tokens to some sequences, and reads the logits of each one's last.
    pub(crate) fn pass<T>(&mut self, runs: &[(SequenceId, &[u32])], read: impl Fn(&[f32]) -> T) -> Vec<T> {
        let mut pass = Pass::new();
        for &(id, tokens) in runs {
            let start = self.cuda.position(id).expect("a sequence");
            let rows = pass.push(id, start, tokens);
            pass.logits.push(rows.end - 1);
        }
        let mut driver = Driver::begin(&mut self.cuda, &self.model.spec, &pass).expect("begin");
        driver.finish(&mut self.cuda, &mut self.experts, &mut Quiet).expect("every stage");
        let logits = self.cuda.logits(driver.pass()).expect("logits");
        let read = (0..runs.len()).map(|row| read(logits.row(row))).collect();
        self.cuda.commit(driver.pass()).expect("commit");
        read
    }
}
