//! The largest logits, picked out by the GPU: a token is chosen from a few of them, and copying and going through all
//! would take longer than some stages.

use std::sync::Arc;

use cudarc::driver::DriverError;
use model::Candidate;

use crate::driver::{Device, Function, Pinned, failed};
use crate::sources::Source;
use crate::{Cuda, compile, kernels};

/// Threads of a block of `largest`, numbers of a thread, and candidates of a piece that there is room for.
const THREADS: usize = 1024;
const EACH: usize = 8;
const ROOM: usize = 256;

/// Parameters of `largest`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Largest {
    x: u64,
    out: u64,
    counts: u64,
    cols: i32,
    count: i32,
}

/// Where candidates arrive on the host: of each piece of a row `ROOM` of them, then their numbers.
#[derive(Default)]
pub(crate) struct Candidates(Option<Pinned>);

impl Candidates {
    /// Memory for so many pieces.
    fn room(&mut self, device: &Arc<Device>, pieces: usize) -> Result<&Pinned, DriverError> {
        let bytes = pieces * (ROOM * size_of::<[u32; 2]>() + size_of::<u32>());
        if self.0.as_ref().is_none_or(|room| room.bytes < bytes) {
            self.0 = None;
            self.0 = Some(device.pinned(bytes)?);
        }
        Ok(self.0.as_ref().expect("just made"))
    }

    /// Of each of `rows` rows of `cols` numbers, candidates among which are the `count` largest; `None` if a piece of a row
    /// has too many of them. Waits.
    fn pick(
        &mut self,
        (device, kernel): (&Arc<Device>, &Function),
        (x, rows, cols): (u64, usize, usize),
        count: usize,
    ) -> Result<Option<Vec<Vec<Candidate>>>, DriverError> {
        let pieces = cols.div_ceil(THREADS * EACH);
        let room = self.room(device, rows * pieces)?;
        let out = room.host() as u64;
        let counts = out + (rows * pieces * ROOM * size_of::<[u32; 2]>()) as u64;
        let p = Largest { x, out, counts, cols: cols as i32, count: count as i32 };
        device.launch(kernel, (pieces, rows, 1), THREADS, 0, &p)?;
        device.wait()?;
        // SAFETY: the kernel that wrote it has ended, and no other writes it while it is lent.
        let (found, counts) = unsafe { room.words() }.split_at(rows * pieces * ROOM * 2);
        Ok(gather(found, &counts[..rows * pieces], pieces))
    }
}

impl Cuda {
    /// Candidates of rows of logits; see [`Backend::largest`](model::Backend::largest).
    pub(crate) fn pick(
        &mut self,
        logits: (u64, usize, usize),
        count: usize,
    ) -> Result<Option<Vec<Vec<Candidate>>>, DriverError> {
        self.candidates.pick((&self.device, &self.kernels.largest), logits, count)
    }
}

/// Candidates of rows of `cols` numbers picked out on the GPU as those of logits are, for checks against the host's choice.
///
/// # Errors
/// Those of starting the backend.
///
/// # Panics
/// If the rows are not whole.
pub fn largest(x: &[f32], cols: usize, count: usize) -> crate::Result<Option<Vec<Vec<Candidate>>>> {
    assert!(x.len().is_multiple_of(cols), "whole rows");
    let device = Device::open(0)?;
    let target = compile::target(device.capability, device.shared);
    let modules = kernels::load(&device, &[Source::rows(&target)])?;
    let run = || {
        let kernel = modules[0].function("largest")?;
        let rows = device.allocate(4 * x.len())?;
        device.upload(x, rows.at)?;
        Candidates::default().pick((&device, &kernel), (rows.at, x.len() / cols, cols), count)
    };
    run().map_err(failed("picking out the largest numbers"))
}

/// The candidates of rows of `pieces` pieces: of each piece `ROOM` pairs of index and bits, of which `counts` says how many
/// there are. `None` if there are more.
fn gather(found: &[u32], counts: &[u32], pieces: usize) -> Option<Vec<Vec<Candidate>>> {
    if counts.iter().any(|&count| count as usize > ROOM) {
        return None;
    }
    let rows = found.as_chunks::<2>().0.chunks(ROOM * pieces).zip(counts.chunks(pieces));
    let candidates = rows.map(|(found, counts)| {
        let pairs = found.chunks(ROOM).zip(counts).flat_map(|(piece, &count)| &piece[..count as usize]);
        pairs.map(|&[id, bits]| Candidate { id, logit: f32::from_bits(bits) }).collect()
    });
    Some(candidates.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        let text = include_str!("../kernels/largest.cu");
        for (name, value) in [("LARGEST_THREADS", THREADS), ("LARGEST_EACH", EACH), ("LARGEST_ROOM", ROOM)] {
            assert!(text.contains(&format!(" {name} = {value}")), "{name}");
        }
    }

    #[test]
    fn candidates_of_a_row_are_those_of_its_pieces() {
        let (rows, pieces) = (2, 3);
        let counts = [2, 0, 1, 0, ROOM as u32, 1];
        let bits = |piece: usize, place: usize| (piece as f32 + place as f32 / 1024.0).to_bits();
        let found: Vec<u32> = (0..rows * pieces)
            .flat_map(|piece| {
                (0..ROOM).flat_map(move |place| [(1000 * piece + place) as u32, bits(piece, place)])
            })
            .collect();
        let all = gather(&found, &counts, pieces).expect("room for all");
        let ids: Vec<Vec<u32>> = all.iter().map(|row| row.iter().map(|c| c.id).collect()).collect();
        assert_eq!(ids[0], [0, 1, 2000]);
        assert_eq!((ids[1].len(), ids[1][0], ids[1][ROOM]), (ROOM + 1, 4000, 5000));
        assert_eq!(all[0][1].logit.to_bits(), bits(0, 1));
        let more = [0, 0, 0, 0, 0, ROOM as u32 + 1];
        assert_eq!(gather(&found, &more, pieces), None);
    }
}
