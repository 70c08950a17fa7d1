//! What a GPU can do at most, measured in some tenths of a second: products, reading its memory, the link to the host.
//!
//! The best of several runs counts, since a peak is what nothing disturbed.

use std::sync::Arc;

use cudarc::driver::{DriverError, result};
use model::{Peak, Peaks};

use crate::driver::{Device, Event, Function, failed};
use crate::error::Result;
use crate::kernels;
use crate::sources::{Source, Target};

#[derive(Clone, Copy)]
#[repr(C)]
struct Parameters {
    from: u64,
    out: u64,
    count: i64,
    rounds: i32,
}

/// Operations of a round of `peak_products` in a block; an addition and a multiplication are two.
const OPERATIONS: f64 = (1 << 22) as f64;

/// Rounds of products: some 15 ms on a large GPU.
const ROUNDS: i32 = 24_000;

/// Shared memory of `peak_products`: 48 KB on a boundary of 1024.
const SHARED: usize = 49 << 10;

/// Bytes that are read, several times the largest cache, and how often.
const BYTES: usize = 512 << 20;
const PASSES: i32 = 8;

/// Bytes that are copied from pinned memory, and how often.
const COPIED: usize = 64 << 20;
const COPIES: usize = 4;

/// Runs of each kind.
const RUNS: usize = 5;

/// Measures a GPU whose context is current. Takes some of its memory meanwhile.
///
/// # Errors
/// If the memory is not there, or a kernel fails.
pub(crate) fn measure(device: &Arc<Device>, target: &Target) -> Result<Peaks> {
    let modules = kernels::load(device, &[Source::peaks(target)])?;
    let find = |name: &'static str| modules[0].function(name).map_err(failed(name));
    let (products, read) = (find("peak_products")?, find("peak_read")?);
    let rate = products_rate(device, &products).map_err(failed("measuring products"))?;
    let bytes = read_rate(device, &read).map_err(failed("measuring the GPU's memory"))?;
    let link = link_rate(device).map_err(failed("measuring the link"))?;
    let peak = Peak { unit: "bf16", rate };
    Ok(Peaks { workers: 1, quantised: peak, plain: peak, bytes, link: Some(link) })
}

/// The shortest of some runs of `work`, in seconds.
fn shortest(
    device: &Device,
    work: impl Fn() -> std::result::Result<(), DriverError>,
) -> std::result::Result<f64, DriverError> {
    // Also wakes the clocks.
    work()?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Event::record(device)?;
        work()?;
        let end = Event::record(device)?;
        end.wait()?;
        best = best.min(f64::from(start.until(&end)?) / 1e3);
    }
    Ok(best)
}

fn products_rate(device: &Arc<Device>, kernel: &Function) -> std::result::Result<f64, DriverError> {
    let out = device.allocate(16)?;
    let p = Parameters { from: 0, out: out.at, count: 0, rounds: ROUNDS };
    let blocks = device.processors as usize;
    let seconds = shortest(device, || device.launch(kernel, (blocks, 1, 1), 256, SHARED, &p))?;
    Ok(blocks as f64 * f64::from(ROUNDS) * OPERATIONS / seconds)
}

fn read_rate(device: &Arc<Device>, kernel: &Function) -> std::result::Result<f64, DriverError> {
    let memory = device.allocate(BYTES)?;
    device.zero(memory.at, BYTES)?;
    let p = Parameters { from: memory.at, out: memory.at, count: (BYTES / 16) as i64, rounds: PASSES };
    let blocks = device.processors as usize * 4;
    let seconds = shortest(device, || device.launch(kernel, (blocks, 1, 1), 512, 0, &p))?;
    Ok((BYTES * PASSES as usize) as f64 / seconds)
}

fn link_rate(device: &Arc<Device>) -> std::result::Result<f64, DriverError> {
    let (from, to) = (device.pinned(COPIED)?, device.allocate(COPIED)?);
    let copy = || {
        for _ in 0..COPIES {
            // SAFETY: both are as large, and outlive the copy, which is waited for.
            unsafe { result::memcpy_htod_async(to.at, from.as_slice(), device.stream) }?;
        }
        Ok(())
    };
    let seconds = shortest(device, copy)?;
    device.wait()?;
    Ok((COPIED * COPIES) as f64 / seconds)
}
