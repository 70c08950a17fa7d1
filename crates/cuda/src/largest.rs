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

/// Numbers that may be wanted of a row: each piece has room for a few times as many.
const MOST: usize = 64;

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

    /// Of each row of `cols` numbers, candidates among which are as many of the largest as `counts` says; `None` if that is
    /// none or more than [`MOST`], or a piece of the row has too many that are as large. Waits.
    fn pick(
        &mut self,
        (device, kernel): (&Arc<Device>, &Function),
        (x, cols): (u64, usize),
        counts: &[usize],
    ) -> Result<Vec<Option<Vec<Candidate>>>, DriverError> {
        let wanted = |count: usize| (1..=MOST).contains(&count);
        let Some(most) = counts.iter().copied().filter(|&count| wanted(count)).max() else {
            return Ok(vec![None; counts.len()]);
        };
        let (rows, pieces) = (counts.len(), cols.div_ceil(THREADS * EACH));
        let room = self.room(device, rows * pieces)?;
        let out = room.host() as u64;
        let lengths = out + (rows * pieces * ROOM * size_of::<[u32; 2]>()) as u64;
        let p = Largest { x, out, counts: lengths, cols: cols as i32, count: most as i32 };
        device.launch(kernel, (pieces, rows, 1), THREADS, 0, &p)?;
        device.wait()?;
        // SAFETY: the kernel that wrote it has ended, and no other writes it while it is lent.
        let (found, lengths) = unsafe { room.words() }.split_at(rows * pieces * ROOM * 2);
        let rows = found.as_chunks::<2>().0.chunks(ROOM * pieces).zip(lengths.chunks(pieces));
        let of_row = |(&count, (found, lengths))| if wanted(count) { gather(found, lengths) } else { None };
        Ok(counts.iter().zip(rows).map(of_row).collect())
    }
}

impl Cuda {
    /// Candidates of rows of logits; see [`Backend::largest`](model::Backend::largest).
    pub(crate) fn pick(
        &mut self,
        logits: (u64, usize),
        counts: &[usize],
    ) -> Result<Vec<Option<Vec<Candidate>>>, DriverError> {
        self.candidates.pick((&self.device, &self.kernels.largest), logits, counts)
    }
}

/// Candidates of rows of `cols` numbers picked out on the GPU as those of logits are, for checks against the host's choice.
///
/// # Errors
/// Those of starting the backend.
///
/// # Panics
/// If the rows are not whole.
pub fn largest(x: &[f32], cols: usize, counts: &[usize]) -> crate::Result<Vec<Option<Vec<Candidate>>>> {
    assert_eq!(x.len(), cols * counts.len(), "whole rows");
    let device = Device::open(0)?;
    let target = compile::target(device.capability, device.shared);
    let modules = kernels::load(&device, &[Source::rows(&target)])?;
    let run = || {
        let kernel = modules[0].function("largest")?;
        let rows = device.allocate(4 * x.len())?;
        device.upload(x, rows.at)?;
        Candidates::default().pick((&device, &kernel), (rows.at, cols), counts)
    };
    run().map_err(failed("picking out the largest numbers"))
}

/// The candidates of a row: of each of its pieces as many pairs of index and bits as `lengths` says, of `ROOM`. `None` if
/// there were more.
fn gather(found: &[[u32; 2]], lengths: &[u32]) -> Option<Vec<Candidate>> {
    if lengths.iter().any(|&length| length as usize > ROOM) {
        return None;
    }
    let pairs = found.chunks(ROOM).zip(lengths).flat_map(|(piece, &length)| &piece[..length as usize]);
    Some(pairs.map(|&[id, bits]| Candidate { id, logit: f32::from_bits(bits) }).collect())
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
        let bits = |piece: u32, place: u32| (piece as f32 + place as f32 / 1024.0).to_bits();
        let found: Vec<[u32; 2]> = (0..3)
            .flat_map(|piece| (0..ROOM as u32).map(move |place| [1000 * piece + place, bits(piece, place)]))
            .collect();
        let row = gather(&found, &[2, 0, 1]).expect("room for all");
        assert_eq!(row.iter().map(|c| c.id).collect::<Vec<_>>(), [0, 1, 2000]);
        assert_eq!(row[1].logit.to_bits(), bits(0, 1));
        let row = gather(&found, &[0, ROOM as u32, 1]).expect("room for all");
        assert_eq!((row.len(), row[0].id, row[ROOM].id), (ROOM + 1, 1000, 2000));
        assert_eq!(gather(&found, &[0, 0, ROOM as u32 + 1]), None);
    }
}
