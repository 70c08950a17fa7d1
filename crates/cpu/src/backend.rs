//! The interface to the engine: books of passes, and each stage handed to its file.

use std::ops::Range;
use std::sync::Arc;

use model::state::{SequenceId, Snapshot};
use model::{
    AttentionWeights, Backend, Capabilities, DeltaWeights, Error, Intermediate, Matrix, MatrixView, Mixer,
    Pass, PassId, Peaks, ResidentMatrix, Result, SlotMemory, Spec, Stage, Wave,
};

use crate::memory::{Rows, carve};
use crate::open::{Buffers, Open, Room};
use crate::{Cpu, attention, calibrate, delta, embed, head, moe, predict};

impl Cpu {
    /// Takes an open pass out of the books, does `work` with it and notes the stage.
    fn stage<T>(
        &mut self,
        pass: PassId,
        (stage, rows): (Stage, Range<usize>),
        work: impl FnOnce(&mut Cpu, &mut Open) -> Result<T>,
    ) -> Result<T> {
        let mut open = self.take(pass)?;
        let rows = if stage == Stage::Experts { 0..open.pass.rows() } else { rows };
        let result = if rows.end <= open.pass.rows() {
            work(self, &mut open)
        } else {
            Err(Error::Pass(format!("rows {rows:?} of a pass of {}", open.pass.rows())))
        };
        open.last = result.is_ok().then_some((stage, rows));
        self.passes[pass.0 as usize] = Some(open);
        result
    }

    fn take(&mut self, pass: PassId) -> Result<Box<Open>> {
        let open = self.passes.get_mut(pass.0 as usize).and_then(Option::take);
        open.ok_or_else(|| Error::Pass(format!("pass {} is not open", pass.0)))
    }

    fn get(&self, pass: PassId) -> Result<&Open> {
        let open = self.passes.get(pass.0 as usize).and_then(Option::as_ref);
        open.map(|open| &**open).ok_or_else(|| Error::Pass(format!("pass {} is not open", pass.0)))
    }

    /// Buffers for a pass: the smallest spare ones that suffice, else the largest, made larger.
    fn buffers(&mut self, rows: usize) -> Buffers {
        let need = rows * self.model.spec.hidden;
        self.spare.sort_by_key(|buffers| buffers.hidden.capacity());
        let fitting = self.spare.iter().position(|buffers| buffers.hidden.capacity() >= need);
        let mut buffers = match fitting {
            Some(index) => self.spare.remove(index),
            None => self.spare.pop().unwrap_or_default(),
        };
        let (block_rows, whole_norm) = (self.capabilities.block_rows, self.whole_norm);
        buffers.reserve(&self.model.spec, Room { rows, block_rows, whole_norm });
        buffers
    }
}

/// Weights of a DeltaNet layer; the driver follows the spec, so a layer is of the kind its stage says.
fn delta_of<M, V>(mixer: &Mixer<M, V>) -> &DeltaWeights<M, V> {
    match mixer {
        Mixer::Delta(weights) => weights,
        Mixer::Attention(_) => panic!("a DeltaNet stage was called for an attention layer"),
    }
}

/// As [`delta_of`].
fn attention_of(mixer: &Mixer<ResidentMatrix, Vec<f32>>) -> &AttentionWeights<ResidentMatrix, Vec<f32>> {
    match mixer {
        Mixer::Attention(weights) => weights,
        Mixer::Delta(_) => panic!("an attention stage was called for a DeltaNet layer"),
    }
}

impl Backend for Cpu {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn peaks(&mut self) -> Vec<Peaks> {
        calibrate::peaks(&mut self.team)
    }

    fn create(&mut self) -> SequenceId {
        self.state.table_mut().create()
    }

    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        self.state.table_mut().fork(sequence)
    }

    fn free(&mut self, sequence: SequenceId) {
        self.state.table_mut().free(sequence);
    }

    fn position(&self, sequence: SequenceId) -> Result<usize> {
        self.state.table().position(sequence)
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<Snapshot> {
        self.state.snapshot(sequence)
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        self.state.restore(snapshot)
    }

    fn begin(&mut self, pass: &Pass) -> Result<PassId> {
        pass.check(self.model.spec.vocab)?;
        if pass.rows() > self.limits.pass_rows {
            let most = self.limits.pass_rows;
            return Err(Error::Pass(format!("{} rows, planned for at most {most}", pass.rows())));
        }
        let state = self.state.open(pass)?;
        let buffers = self.buffers(pass.rows());
        let mut open = Box::new(Open { pass: pass.clone(), state, last: None, buffers });
        attention::rotations(&self.model.spec, &mut open);
        let free = self.passes.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.passes.push(None);
            self.passes.len() - 1
        });
        self.passes[index] = Some(open);
        Ok(PassId(index as u32))
    }

    fn commit(&mut self, pass: PassId) -> Result<()> {
        let open = self.take(pass)?;
        let Open { pass, state, buffers, .. } = *open;
        self.state.table_mut().commit(&pass, state);
        self.spare.push(buffers);
        Ok(())
    }

    fn abort(&mut self, pass: PassId) {
        if let Ok(open) = self.take(pass) {
            let Open { state, buffers, .. } = *open;
            self.state.table_mut().abort(state);
            self.spare.push(buffers);
        }
    }

    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::Embed, rows.clone()), |cpu, open| {
            embed::embed(&mut cpu.team, &cpu.model, open, rows)
        })
    }

    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::DeltaProject, rows.clone()), |cpu, open| {
            let weights = &cpu.weights.layers[layer];
            let both = (&weights.norm[..], delta_of(&weights.mixer));
            delta::project(&mut cpu.team, &cpu.model.spec, both, open, rows);
            Ok(())
        })
    }

    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::DeltaMix, rows.clone()), |cpu, open| {
            let ordinal = cpu.model.spec.ordinal(layer);
            let both = (delta_of(&cpu.weights.layers[layer].mixer), &cpu.conv[ordinal][..]);
            delta::mix(&mut cpu.team, &cpu.model.spec, both, &mut cpu.state, open, (ordinal, rows));
            Ok(())
        })
    }

    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::DeltaOut, rows.clone()), |cpu, open| {
            let weights = delta_of(&cpu.weights.layers[layer].mixer);
            delta::out(&mut cpu.team, &cpu.model.spec, weights, open, rows);
            Ok(())
        })
    }

    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::AttnProject, rows.clone()), |cpu, open| {
            let weights = &cpu.weights.layers[layer];
            let both = (&weights.norm[..], attention_of(&weights.mixer));
            let spec = &cpu.model.spec;
            let place = (spec.ordinal(layer), rows);
            attention::project(&mut cpu.team, spec, both, &mut cpu.state, open, place);
            Ok(())
        })
    }

    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::AttnMix, rows.clone()), |cpu, open| {
            let spec = &cpu.model.spec;
            attention::mix(&mut cpu.team, spec, &cpu.state, open, (spec.ordinal(layer), rows));
            Ok(())
        })
    }

    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::AttnOut, rows.clone()), |cpu, open| {
            let weights = attention_of(&cpu.weights.layers[layer].mixer);
            attention::out(&mut cpu.team, &cpu.model.spec, weights, open, rows);
            Ok(())
        })
    }

    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::Route, rows.clone()), |cpu, open| {
            let bias = std::mem::take(&mut cpu.route_bias);
            moe::route(&mut cpu.team, &cpu.model.spec, (&cpu.weights.layers[layer].moe, &bias), open, rows);
            Ok(())
        })
    }

    fn bias_routes(&mut self, layer: usize, bias: &[f32]) -> Result<()> {
        let experts = self.model.spec.moe.experts;
        if !bias.is_empty() && bias.len() != experts {
            let message = format!("layer {layer}: a bias for {} of {experts} experts", bias.len());
            return Err(Error::Pass(message));
        }
        self.route_bias = bias.to_vec();
        Ok(())
    }

    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.stage(pass, (Stage::Shared, rows.clone()), |cpu, open| {
            moe::shared(&mut cpu.team, &cpu.model.spec, &cpu.weights.layers[layer].moe, open, rows);
            Ok(())
        })
    }

    fn routes(&mut self, pass: PassId, _layer: usize) -> Result<Vec<u32>> {
        let mut open = self.take(pass)?;
        moe::group(&self.model.spec, open.pass.rows(), &mut open.buffers);
        let used = moe::used(&open.buffers.pairs);
        self.passes[pass.0 as usize] = Some(open);
        Ok(used)
    }

    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()> {
        self.stage(pass, (Stage::Experts, 0..0), |cpu, open| {
            moe::experts(&mut cpu.team, (&cpu.model, &cpu.slots), &mut cpu.inner, open, layer, wave)
        })
    }

    fn shrink(&mut self, rows: usize) {
        let most = rows * self.model.spec.hidden;
        self.spare.retain(|buffers| buffers.hidden.capacity() <= most);
        self.inner.shrink(&self.model.spec, rows);
        model::trim();
    }

    fn slot_memory(&mut self, bytes: usize) -> Result<(u32, Arc<dyn SlotMemory>)> {
        self.slots.add(bytes).map_err(|error| Error::Backend {
            backend: "cpu",
            stage: "experts",
            layer: 0,
            message: format!("no memory for {bytes} bytes of expert slots: {error}"),
        })
    }

    fn predict(&mut self, pass: PassId, layer: usize, margin: usize) -> Result<Option<Vec<u32>>> {
        let mut open = self.take(pass)?;
        let (spec, weights) = (&self.model.spec, &self.weights.layers[layer].moe);
        let likely = predict::predict(&mut self.team, spec, weights, &mut open, margin);
        self.passes[pass.0 as usize] = Some(open);
        Ok(likely)
    }

    fn head(&mut self, pass: PassId) -> Result<()> {
        self.stage(pass, (Stage::Head, 0..0), |cpu, open| {
            head::head(&mut cpu.team, &cpu.model.spec, &cpu.weights, open);
            Ok(())
        })
    }

    fn logits(&mut self, pass: PassId) -> Result<MatrixView<'_>> {
        let open = self.get(pass)?;
        match &open.last {
            Some((Stage::Head, _)) => Ok(head::logits(&self.model.spec, open)),
            _ => Err(Error::Pass("logits are read after the head".to_string())),
        }
    }

    fn hidden(&mut self, pass: PassId) -> Result<Matrix> {
        let open = self.get(pass)?;
        match &open.last {
            Some((Stage::Head, _)) => Ok(head::hidden(&self.model.spec, open)),
            _ => Err(Error::Pass("hidden states are read after the head".to_string())),
        }
    }

    fn read(&mut self, pass: PassId, what: Intermediate) -> Result<Option<Matrix>> {
        let spec = &self.model.clone().spec;
        let mut open = self.take(pass)?;
        let value = match open.last.clone() {
            Some((Stage::Head, _)) if what == Intermediate::Logits => {
                Some(head::logits(spec, &open).to_matrix())
            }
            Some((stage, rows)) if stage.intermediates().contains(&what) && stage != Stage::Head => {
                Some(intermediate(spec, &mut open.buffers, what, rows))
            }
            _ => None,
        };
        self.passes[pass.0 as usize] = Some(open);
        Ok(value)
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A value left by the stage called last, which is the one that makes it.
fn intermediate(spec: &Spec, buffers: &mut Buffers, what: Intermediate, rows: Range<usize>) -> Matrix {
    use Intermediate as I;
    let Buffers { hidden, norm, whole_norm, sum, block, ids, weights, .. } = buffers;
    let (delta, count) = (&spec.delta, rows.len());
    let of_pass = |numbers: &[f32], cols: usize| copy(&numbers[rows.start * cols..], cols, count, cols);
    let of_delta = |block: &mut [f32], part: usize, cols: usize| {
        copy(carve(block, delta::parts(spec, count))[part], cols, count, cols)
    };
    let of_attention = |block: &mut [f32], part: usize, cols: usize| {
        copy(carve(block, attention::parts(spec, count))[part], cols, count, cols)
    };
    match what {
        I::Embedded | I::DeltaHidden | I::AttnHidden | I::ExpertsHidden => of_pass(hidden, spec.hidden),
        I::RouteNorm => {
            let cols = spec.hidden;
            copy(Buffers::block_norm(norm, *whole_norm, rows.start, cols), cols, count, cols)
        }
        I::SharedOut => of_pass(sum, spec.hidden),
        I::RouteIds => of_pass(ids, spec.moe.used),
        I::RouteWeights => of_pass(weights, spec.moe.used),
        I::DeltaQkv => of_delta(block, 0, delta.channels()),
        I::DeltaZ => of_delta(block, 1, delta.value_dim()),
        I::DeltaBetaAlpha => of_delta(block, 2, 2 * delta.value_heads),
        I::DeltaMixed => {
            let [qkv, ..] = carve(block, delta::parts(spec, count));
            copy(&qkv[2 * delta.key_dim()..], delta.channels(), count, delta.value_dim())
        }
        I::AttnQuery | I::AttnMixed => of_attention(block, 0, spec.attention.query_dim()),
        I::AttnGate => of_attention(block, 1, spec.attention.query_dim()),
        I::AttnKey => of_attention(block, 2, spec.attention.kv_dim()),
        I::AttnValue => of_attention(block, 3, spec.attention.kv_dim()),
        I::Logits => unreachable!("logits are not in these buffers"),
    }
}

/// `count` rows of `cols` columns that lie `stride` apart.
fn copy(numbers: &[f32], stride: usize, count: usize, cols: usize) -> Matrix {
    let rows = Rows::new(numbers, stride, count);
    let data = (0..count).flat_map(|row| rows.row(row, cols).iter().copied()).collect();
    Matrix { rows: count, cols, data }
}
