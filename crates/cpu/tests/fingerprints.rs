//! The bits of a prompt's and of decoded tokens' logits, for every variant of the kernels: a change that alters
//! them is noticed, and says so by its kernel version.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use model::state::KvType;
use model::{Backend, Limits, Model};
use quant::Type;
use redlite_cpu::{Cpu, Options, Variant};
use testkit::{Random, TinyModel, TinyOptions, ingest};

/// Two chunks with a tail, so that blocks of 64 and short ones occur.
const PROMPT: usize = 193;

/// Tokens decoded one by one behind it.
const DECODED: usize = 3;

/// FNV-1a over the bits of numbers.
fn fingerprint(numbers: impl Iterator<Item = f32>) -> u64 {
    numbers
        .flat_map(|x| x.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A line of `fingerprints.txt`: variant, what is computed, kernel version, fingerprint.
fn line(model: &Arc<Model>, variant: Variant, (what, exact): (&str, bool)) -> String {
    let (logits, version) = logits(model, variant, exact);
    format!("{variant} {what} {version} {:016x}", fingerprint(logits.into_iter()))
}

/// Logits of a prompt and of decoded tokens, and the kernel version.
fn logits(model: &Arc<Model>, variant: Variant, exact: bool) -> (Vec<f32>, u32) {
    let weights = model.load(&mut |_, _| {}).unwrap();
    let limits = Limits { pass_rows: 256, positions: 512, kv: KvType::F16 };
    let options = Options { variant: Some(variant), exact, threads: Some(2), ..Options::default() };
    let mut cpu = Cpu::new(model.clone(), weights, limits, options).unwrap();
    let tokens = Random::new(1, "fingerprint").tokens(PROMPT + DECODED, model.spec.vocab.min(2048));
    let sequence = cpu.create();
    let mut logits = ingest(&mut cpu, model, &[(sequence, &tokens[..PROMPT])], 128).remove(0).data;
    for token in &tokens[PROMPT..] {
        logits.extend(ingest(&mut cpu, model, &[(sequence, std::slice::from_ref(token))], 1).remove(0).data);
    }
    (logits, cpu.capabilities().kernel_version)
}

#[test]
fn bits_are_those_of_the_kernel_version() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pocket.gguf");
    let model = Arc::new(Model::open(&path).unwrap());
    let committed: Vec<&str> = include_str!("fingerprints.txt").lines().collect();
    let (mut compared, mut changed) = (0, String::new());
    // Types that the other model does not have.
    let tiny = TinyModel::new(TinyOptions::quantised(Type::Q3_K, Type::Q2_K));
    for variant in Variant::ALL.into_iter().filter(|variant| variant.is_available()) {
        for (model, what) in
            [(&model, ("exact", true)), (&model, ("rounded", false)), (&tiny.model, ("k-types", false))]
        {
            let found = line(model, variant, what);
            let prefix = &found[..found.find(' ').unwrap() + 6];
            match committed.iter().find(|line| line.starts_with(prefix)) {
                Some(line) if *line == found => compared += 1,
                _ => writeln!(changed, "{found}").unwrap(),
            }
        }
    }
    assert!(
        changed.is_empty(),
        "bits differ from those of fingerprints.txt ({compared} agree); if that is wanted, raise the kernel \
         version and put these lines in:\n{changed}"
    );
}
