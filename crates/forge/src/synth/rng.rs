//! Random numbers: fast, seeded, and independent of who computes which piece.

/// xoshiro256++ of Blackman and Vigna: 256 bits of state, one 64-bit number per step.
pub(crate) struct Rng([u64; 4]);

impl Rng {
    /// The stream of one piece of one tensor: equal arguments, equal numbers.
    pub(crate) fn new(seed: u64, tensor: &str, piece: u64) -> Rng {
        let mut state =
            mix(seed) ^ mix(fnv1a(tensor.as_bytes())).rotate_left(21) ^ mix(!piece).rotate_left(42);
        Rng([0; 4].map(|_: u64| {
            state = state.wrapping_add(GOLDEN);
            mix(state)
        }))
    }

    /// The next 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Fills `out`.
    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        for bytes in out.chunks_mut(8) {
            let random = self.bits().to_le_bytes();
            bytes.copy_from_slice(&random[..bytes.len()]);
        }
    }

    /// Uniform in [0, 1).
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal, mean 0 and deviation 1: the sum of four uniform numbers, never beyond ±3.47.
    pub(crate) fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u32 = [0, 16, 32, 48].iter().map(|shift| (bits >> shift) as u32 & 0xffff).sum();
        // Each part has variance 65536²/12 and mean 65535/2.
        (sum as f32 - 131_070.0) / (65_536.0 * (4.0f32 / 12.0).sqrt())
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64: every input bit reaches every output bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
