//! What the ladders measure with: CPU time of a thread, the rates of vpdpbusd and of multiply-adds, random numbers.

/// CPU seconds of this thread.
pub fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Median CPU seconds of five runs, after one to warm up.
pub fn median(mut work: impl FnMut()) -> f64 {
    work();
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = now();
            work();
            now() - start
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[2]
}

/// Median CPU seconds of each of N versions: all of them in turn, once to warm up, then `rounds` times, so that what a
/// shared machine takes it takes from all.
pub fn alternate<const N: usize>(rounds: usize, mut version: impl FnMut(usize)) -> [f64; N] {
    let mut times = [(); N].map(|()| Vec::new());
    for _ in 0..=rounds {
        for (index, times) in times.iter_mut().enumerate() {
            let start = now();
            version(index);
            times.push(now() - start);
        }
    }
    times.map(|mut times| {
        times[1..].sort_by(f64::total_cmp);
        times[1 + rounds / 2]
    })
}

/// Multiply-adds of a step of [`dot_products`].
pub const STEP: usize = 12 * 64;

/// So many steps of twelve vpdpbusd from registers, at least one.
///
/// # Safety
/// The processor must have AVX-512 with VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn dot_products(steps: usize) {
    // SAFETY: registers only; the features are those of the calling function.
    unsafe {
        std::arch::asm!(
            "2:",
            "vpdpbusd zmm0, zmm16, zmm16", "vpdpbusd zmm1, zmm16, zmm16",
            "vpdpbusd zmm2, zmm16, zmm16", "vpdpbusd zmm3, zmm16, zmm16",
            "vpdpbusd zmm4, zmm16, zmm16", "vpdpbusd zmm5, zmm16, zmm16",
            "vpdpbusd zmm6, zmm16, zmm16", "vpdpbusd zmm7, zmm16, zmm16",
            "vpdpbusd zmm8, zmm16, zmm16", "vpdpbusd zmm9, zmm16, zmm16",
            "vpdpbusd zmm10, zmm16, zmm16", "vpdpbusd zmm11, zmm16, zmm16",
            "dec {0}",
            "jnz 2b",
            inout(reg) steps => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
        );
    }
}

/// So many steps of twelve multiply-adds of sixteen f32 from registers.
///
/// # Safety
/// The processor must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub fn multiply_adds(steps: usize) {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};

    let factor = _mm512_set1_ps(std::hint::black_box(0.5));
    let mut sums = [factor; 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, factor);
        }
    }
    std::hint::black_box(sums);
}

/// A xorshift generator; not of zero.
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)] // it never ends
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
