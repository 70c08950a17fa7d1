//! Where the time of a call went, stage by stage, and what its work costs at least.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Backend, Cost, KvType, Model, Observer, PassId, Stage, Step, Work};

/// What a stage did over all layers, blocks and passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageProfile {
    /// Time of its calls, waiting for expert bytes included.
    pub time: Duration,
    /// Least operations and bytes.
    pub cost: Cost,
    /// Rows, summed over layers.
    pub rows: u64,
}

/// Watches passes over one sequence and adds up their stages.
///
/// Waits for every stage where calls only enqueue: such a backend is slower while it is watched.
#[derive(Clone, Debug)]
pub struct Profile {
    model: Arc<Model>,
    kv: KvType,
    /// Position of the pass's first row.
    start: usize,
    /// Rows of the pass.
    rows: usize,
    stages: BTreeMap<Stage, StageProfile>,
}

impl Profile {
    /// Of passes that begin at position `start` of a sequence and follow one another.
    pub fn new(model: &Arc<Model>, kv: KvType, start: usize) -> Profile {
        Profile { model: model.clone(), kv, start, rows: 0, stages: BTreeMap::new() }
    }

    /// Every stage that was called, in the order of [`Stage::ALL`].
    pub fn stages(&self) -> impl Iterator<Item = (Stage, &StageProfile)> {
        self.stages.iter().map(|(&stage, profile)| (stage, profile))
    }

    /// Everything together.
    pub fn total(&self) -> StageProfile {
        self.stages.values().fold(StageProfile::default(), |sum, stage| StageProfile {
            time: sum.time + stage.time,
            cost: sum.cost + stage.cost,
            rows: sum.rows + stage.rows,
        })
    }

    /// Stages that did not compute every one of `tokens` rows in each of their layers: name, rows computed, rows
    /// there are. `head` is not asked.
    pub fn skipped(&self, tokens: usize) -> Vec<(Stage, u64, u64)> {
        let spec = &self.model.spec;
        let wanted = |stage: Stage| match stage {
            Stage::Embed => 1,
            Stage::DeltaProject | Stage::DeltaMix | Stage::DeltaOut => spec.delta_layers(),
            Stage::AttnProject | Stage::AttnMix | Stage::AttnOut => spec.attention_layers(),
            Stage::Route | Stage::Shared | Stage::Experts => spec.layers.len(),
            Stage::Head => 0,
        };
        let all = Stage::ALL.into_iter().filter(|&stage| stage != Stage::Head);
        all.filter_map(|stage| {
            let (computed, wanted) =
                (self.stages.get(&stage).map_or(0, |s| s.rows), (tokens * wanted(stage)) as u64);
            (computed != wanted).then_some((stage, computed, wanted))
        })
        .collect()
    }
}

impl Observer for Profile {
    fn after(
        &mut self,
        step: &Step,
        elapsed: Duration,
        backend: &mut dyn Backend,
        pass: PassId,
    ) -> model::Result<()> {
        let began = Instant::now();
        backend.sync()?;
        let time = elapsed + began.elapsed();
        if step.stage == Stage::Embed {
            if step.rows.start == 0 {
                self.start += std::mem::take(&mut self.rows);
            }
            self.rows = step.rows.end;
        }
        let experts = match step.stage {
            Stage::Experts => backend.routes(pass, step.layer)?.len(),
            _ => 0,
        };
        let start = self.start + step.rows.start;
        // Generation and ingestion ask for one row of a pass.
        let work = Work { rows: step.rows.len(), start, kv: self.kv, experts, logits: 1 };
        let sum = self.stages.entry(step.stage).or_default();
        sum.time += time;
        sum.cost += self.model.cost(step.stage, step.layer, &work);
        sum.rows += step.rows.len() as u64;
        Ok(())
    }
}
