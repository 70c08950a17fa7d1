//! Products against f64 sums over decoded weights: every type, odd shapes, every variant of this machine.

use quant::Type;

use super::*;
use crate::Variant;
use crate::pool::Pool;

fn team(variant: Variant, threads: usize) -> Team {
    Team::new(Pool::new(threads, false).unwrap(), Kernels::choose(Some(variant)).unwrap(), true)
}

pub(in crate::gemm) fn variants() -> impl Iterator<Item = Variant> {
    Variant::ALL.into_iter().filter(|variant| variant.is_available())
}

/// Numbers between −1 and 1 that repeat nowhere near.
pub(in crate::gemm) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..count).map(step).collect()
}

/// Blocks of any bits whose scales are ordinary numbers: bytes that decode to something huge or not finite
/// are drawn again.
fn blocks(ty: Type, count: usize, seed: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut out = vec![0.0; ty.block_len()];
    let mut seed = seed;
    while bytes.len() < count * ty.block_bytes() {
        seed = seed.wrapping_add(1);
        let block: Vec<u8> = match ty {
            Type::F32 => numbers(1, seed)[0].to_le_bytes().to_vec(),
            _ => numbers(ty.block_bytes(), seed).iter().map(|x| (x * 127.0) as i8 as u8).collect(),
        };
        quant::decode(ty, &block, &mut out).unwrap();
        let largest = out.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        if out.iter().all(|x| x.is_finite()) && (1e-6..1e6).contains(&largest) {
            bytes.extend(block);
        }
    }
    bytes
}

pub(in crate::gemm) struct Case {
    ty: Type,
    rows: usize,
    pub(in crate::gemm) n: usize,
    pub(in crate::gemm) k: usize,
    bytes: Vec<u8>,
    pub(in crate::gemm) x: Vec<f32>,
}

impl Case {
    pub(in crate::gemm) fn new(ty: Type, rows: usize, n: usize, k: usize) -> Case {
        let seed = (rows * 7919 + n * 31 + k) as u32 ^ ty.id() << 20;
        let bytes = blocks(ty, n * k / ty.block_len(), seed);
        Case { ty, rows, n, k, bytes, x: numbers(rows * k, seed + 1) }
    }

    pub(in crate::gemm) fn weights(&self) -> Weights<'_> {
        Weights { ty: self.ty, rows: self.n, cols: self.k, bytes: &self.bytes }
    }

    /// The product of some rows.
    fn product(&self, team: &mut Team, rows: Range<usize>) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() * self.n];
        let x = Input::exact(Rows::new(&self.x[rows.start * self.k..], self.k, rows.len()));
        let target = Out::new(&mut out, self.n);
        dense(team, &[Product { weights: self.weights(), x, out: target, then: Then::Store }]);
        out
    }

    pub(in crate::gemm) fn check(&self, found: &[f32], what: &str) {
        let mut weights = vec![0.0; self.n * self.k];
        quant::decode(self.ty, &self.bytes, &mut weights).unwrap();
        for row in 0..self.rows {
            for (n, w) in weights.chunks_exact(self.k).enumerate() {
                let x = &self.x[row * self.k..][..self.k];
                let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                let error = (f64::from(found[row * self.n + n]) - sum).abs();
                let Case { ty, rows, k, .. } = self;
                assert!(
                    error <= 1e-6 * size,
                    "{what}: {ty} {rows} × {} × {k}: row {row}, {n}: {error:e}",
                    self.n
                );
            }
        }
    }
}

#[test]
fn products_of_every_type_and_odd_shapes() {
    for variant in variants() {
        let mut team = team(variant, 2);
        for ty in Type::all() {
            let mut lengths = vec![256, 512, 768];
            match ty.block_len() {
                1 => lengths.extend([1, 15, 33, 530]),
                32 => lengths.extend([32, 96, 544]),
                _ => {}
            }
            for (i, &k) in lengths.iter().enumerate() {
                // Every count of rows and outputs with some length.
                for (j, rows) in [1, 2, 3, 5, 63, 64, 65].into_iter().enumerate() {
                    let n = [1, 7, 8, 33][(i + j) % 4];
                    let case = Case::new(ty, rows, n, k);
                    case.check(&case.product(&mut team, 0..rows), variant.name());
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_any_others() {
    for variant in variants() {
        for ty in [Type::F32, Type::BF16, Type::Q8_0, Type::Q4_K, Type::IQ2_XXS] {
            let case = Case::new(ty, 131, 37, 768);
            let all = case.product(&mut team(variant, 1), 0..131);
            for threads in [1, 3] {
                let mut team = team(variant, threads);
                for rows in [0..1, 7..8, 130..131, 3..5, 1..4, 2..7, 60..131, 0..131] {
                    let some = case.product(&mut team, rows.clone());
                    let expected = &all[rows.start * case.n..rows.end * case.n];
                    let same = some.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{variant} {ty}, rows {rows:?}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn products_can_be_added_and_scaled_and_share_a_region() {
    let mut team = team(Variant::Portable, 3);
    let (one, two) = (Case::new(Type::Q8_0, 33, 20, 64), Case::new(Type::F16, 33, 70, 64));
    let (plain_one, plain_two) = (one.product(&mut team, 0..33), two.product(&mut team, 0..33));
    let factors = numbers(33, 9);
    let (mut added, mut scaled) = (vec![1.5; 33 * 20], vec![f32::NAN; 33 * 70]);
    dense(
        &mut team,
        &[
            Product {
                weights: one.weights(),
                x: Input::exact(Rows::new(&one.x, 64, 33)),
                out: Out::new(&mut added, 20),
                then: Then::Add,
            },
            Product {
                weights: two.weights(),
                x: Input::exact(Rows::new(&two.x, 64, 33)),
                out: Out::new(&mut scaled, 70),
                then: Then::Scale(&factors),
            },
        ],
    );
    assert!(added.iter().zip(&plain_one).all(|(a, b)| *a == 1.5 + b));
    assert!(scaled.iter().zip(&plain_two).enumerate().all(|(i, (a, b))| *a == b * factors[i / 70]));
}

#[test]
fn gated_networks_of_gathered_rows() {
    let (rows, hidden, width) = (50, 64, 40);
    let x = numbers(rows * hidden, 1);
    let groups: [(&[u32], &[f32]); 3] =
        [(&[3, 49, 7], &[0.5, 1.0, -2.0]), (&[], &[]), (&[7, 8, 9, 10, 3], &[0.1, 0.2, 0.3, 0.4, 0.5])];
    let networks: Vec<Network> = (0..3).map(|e| Network::new(hidden, width, 10 * e)).collect();
    let mut expected = vec![0.25 + 1.0; rows * hidden];
    for (network, (to_rows, factors)) in networks.iter().zip(groups) {
        for (&row, &factor) in to_rows.iter().zip(factors) {
            let row = row as usize * hidden..(row as usize + 1) * hidden;
            let out = network.apply(&x[row.clone()]);
            expected[row].iter_mut().zip(out).for_each(|(e, y)| *e += f64::from(factor) * y);
        }
    }
    for (variant, threads) in variants().zip([3, 1, 7]) {
        let mut team = team(variant, threads);
        let (mut inner, mut sum) = (vec![f32::NAN; 8 * width], vec![0.25; rows * hidden]);
        let mut residual = vec![1.0; rows * hidden];
        let firsts = [0, 3, 3];
        let halves: Vec<GateUp> = (0..3)
            .map(|e| GateUp {
                gate: Network::weights(&networks[e].gate, width),
                up: Network::weights(&networks[e].up, width),
                x: Input::exact(Rows::gather(&x, hidden, groups[e].0)),
                first: firsts[e],
            })
            .collect();
        gate_up(&mut team, &halves, Inner::Numbers(Out::new(&mut inner, width)));
        let halves: Vec<Down> = (0..3)
            .map(|e| Down {
                weights: Network::weights(&networks[e].down, hidden),
                x: Input::exact(Rows::new(&inner[firsts[e] * width..], width, groups[e].0.len())),
                rows: groups[e].0,
                factors: groups[e].1,
            })
            .collect();
        let to = Some((Out::new(&mut residual, hidden), rows));
        down(&mut team, &halves, hidden, Out::new(&mut sum, hidden), to);
        let error = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
        let worst = residual.iter().zip(&expected).map(error).fold(0.0, f64::max);
        let largest = expected.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
        assert!(worst < 1e-6 * largest, "{variant}: {worst:e} of {largest}");
    }
}

/// A gated network in F32.
struct Network {
    gate: Vec<u8>,
    up: Vec<u8>,
    down: Vec<u8>,
}

impl Network {
    fn new(hidden: usize, width: usize, seed: u32) -> Network {
        let make = |seed| blocks(Type::F32, hidden * width, 1000 * seed);
        Network { gate: make(seed + 1), up: make(seed + 2), down: make(seed + 3) }
    }

    fn weights(bytes: &[u8], rows: usize) -> Weights<'_> {
        Weights { ty: Type::F32, rows, cols: bytes.len() / 4 / rows, bytes }
    }

    fn apply(&self, x: &[f32]) -> Vec<f64> {
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let gates = Network::times(&self.gate, &wide);
        let ups = Network::times(&self.up, &wide);
        let inner: Vec<f64> = gates.iter().zip(ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        Network::times(&self.down, &inner)
    }

    fn times(bytes: &[u8], x: &[f64]) -> Vec<f64> {
        let weights: Vec<f64> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect();
        weights.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}
