//! Kernels that leave out part of their work, so that one sees what it costs. Measurement only: results are wrong.

use crate::Cpu;
use crate::kernels::{GEMV_ROWS, Kernels};

/// Rows up to which some kernels decode weights as they multiply them, so that decoding cannot be left out.
pub const FUSED_ROWS: usize = GEMV_ROWS;

/// Makes the backend multiply with whatever lies in its panels instead of decoded weights: the weights' bytes are
/// neither read nor decoded, everything else is done as ever. Only where activations are rounded; F32, F16 and BF16
/// weights have no decoding to speak of.
pub fn without_decoding(cpu: &mut Cpu) {
    let kernels = Kernels { fill: |_, _, _, _| (), gemv: None, ..*cpu.team.kernels };
    // A table for the rest of the program, as the others are.
    cpu.team.kernels = Box::leak(Box::new(kernels));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::state::KvType;
    use model::{Backend, Driver, Limits, MappedExperts, Pass, Quiet};
    use quant::Type;
    use testkit::{TinyModel, TinyOptions};

    use super::*;
    use crate::{Options, Variant};

    /// Logits of some rows.
    fn logits(cpu: &mut Cpu, model: &Arc<model::Model>) -> Vec<f32> {
        let mut pass = Pass::new();
        let sequence = cpu.create();
        pass.push(sequence, 0, &[1; 2 * FUSED_ROWS]);
        pass.logits = vec![2 * FUSED_ROWS - 1];
        let mut driver = Driver::begin(cpu, &model.spec, &pass).unwrap();
        driver.finish(cpu, &mut MappedExperts::new(model), &mut Quiet).unwrap();
        let logits = cpu.logits(driver.pass()).unwrap().data.to_vec();
        cpu.abort(driver.pass());
        logits
    }

    #[test]
    fn without_decoding_results_are_others() {
        if !Variant::Vnni.is_available() {
            return;
        }
        let tiny = TinyModel::new(TinyOptions::quantised(Type::Q8_0, Type::IQ2_XS));
        let limits = Limits { pass_rows: 64, positions: 256, kv: KvType::F16 };
        let options = Options { variant: Some(Variant::Vnni), threads: Some(1), ..Options::default() };
        let weights = tiny.model.load(&mut |_, _| {}).unwrap();
        let mut cpu = Cpu::new(tiny.model.clone(), weights, limits, options).unwrap();
        let right = logits(&mut cpu, &tiny.model);
        assert_eq!(right, logits(&mut cpu, &tiny.model));
        without_decoding(&mut cpu);
        assert_ne!(right, logits(&mut cpu, &tiny.model));
    }
}
