//! Random numbers that are the same everywhere.

/// The SplitMix64 generator (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for `seed` and a name, so that a tensor's numbers do not depend on the tensors before it.
    pub fn new(seed: u64, name: &str) -> Random {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3) // FNV-1a
        });
        Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ hash)
    }

    /// A generator whose state begins as `seed`.
    pub fn from_seed(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An integer below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A number from `low` up to, but not including, `high`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        (f64::from(low) + unit * f64::from(high - low)) as f32
    }

    /// Mean 0 and the given standard deviation, nearly normal: the sum of four uniform numbers.
    pub fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform(-0.5, 0.5)).sum();
        sum * deviation * 3.0f32.sqrt()
    }

    /// `len` numbers of [`Random::normal`].
    pub fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal(deviation)).collect()
    }

    /// `len` token ids below `vocab`.
    pub fn tokens(&mut self, len: usize, vocab: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(vocab) as u32).collect()
    }
}
