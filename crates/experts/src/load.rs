//! Carrying out a load: a run of experts of one layer, read part by part into their slots.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::path::PathBuf;

use model::{Error, SlotMemory};

use crate::layout::{Layout, Part};
use crate::reader::Reader;
use crate::slots::SlotId;

/// One expert of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Its number in the layer.
    pub(crate) expert: u32,
    /// Its slot.
    pub(crate) slot: SlotId,
    /// The slot's number in its class.
    pub(crate) index: usize,
}

/// A run of consecutive experts of a layer, to be read into slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) layer: usize,
    pub(crate) items: Vec<Item>,
}

/// What loads need.
pub(crate) struct Loader {
    pub(crate) layout: Layout,
    pub(crate) reader: Box<dyn Reader>,
    pub(crate) memory: std::sync::Arc<dyn SlotMemory>,
    /// Files, for messages.
    pub(crate) paths: Vec<PathBuf>,
}

impl Loader {
    /// Reads all of a load. Returns the bytes of its experts.
    ///
    /// The caller's slots are loading: nobody else writes them, and no wave names them.
    pub(crate) fn carry_out(&self, load: &Load) -> Result<u64, Error> {
        let mut bytes = 0;
        for part in &self.layout.layers[load.layer].parts {
            let stride = part.stride as usize;
            let together = part.is_contiguous() && stride.is_multiple_of(self.layout.alignment);
            let pieces = load.items.chunks(if together { load.items.len() } else { 1 });
            for items in pieces {
                self.read(load.layer, part, items).map_err(|source| Error::Load {
                    file: self.paths[part.shard].clone(),
                    tensor: part.tensor.clone(),
                    offset: part.file_offset(items[0].expert),
                    len: (items.len() * part.bytes) as u64,
                    source,
                })?;
            }
            bytes += (load.items.len() * part.bytes) as u64;
        }
        Ok(bytes)
    }

    /// A load that failed for a reason of our own.
    pub(crate) fn failure(&self, load: &Load, message: &str) -> Error {
        let part = &self.layout.layers[load.layer].parts[0];
        Error::Load {
            file: self.paths[part.shard].clone(),
            tensor: part.tensor.clone(),
            offset: part.file_offset(load.items[0].expert),
            len: (load.items.len() * part.bytes) as u64,
            source: io::Error::other(message.to_string()),
        }
    }

    /// Reads one part of consecutive experts with a single call.
    ///
    /// Direct reads begin `slack` bytes before the first expert, at a multiple of the block. If there are several
    /// experts, their stride is a multiple of it too, so each buffer takes a whole stride, which ends `slack`
    /// bytes too early for its expert: those bytes open the next buffer, and are copied from there.
    fn read(&self, layer: usize, part: &Part, items: &[Item]) -> io::Result<()> {
        let (alignment, last) = (self.layout.alignment, items.len() - 1);
        let slack = self.layout.slack(part, items[0].expert);
        let ranges: Vec<Range<usize>> = (items.iter())
            .map(|item| {
                let at = self.layout.part_at(layer, item.index, part);
                at..at + (slack + part.bytes).next_multiple_of(alignment)
            })
            .collect();
        let offset = part.file_offset(items[0].expert) - slack as u64;
        let needed = slack + items.len() * part.bytes;
        if let Some(bytes) = self.reader.bytes(part.shard, offset + slack as u64, items.len() * part.bytes) {
            let inside = |range: &Range<usize>| range.start + slack..range.start + slack + part.bytes;
            let targets: Vec<Range<usize>> = ranges.iter().map(inside).collect();
            let from: Vec<&[u8]> = bytes.chunks_exact(part.bytes).collect();
            // SAFETY: as below.
            return unsafe { self.memory.write_from(&targets, &from) };
        }
        let mut fill = |buffers: &mut [IoSliceMut<'_>]| {
            let strides = buffers.iter_mut().enumerate().map(|(index, buffer)| {
                let len = if index == last { buffer.len() } else { part.bytes };
                IoSliceMut::new(&mut buffer[..len])
            });
            self.reader.read(part.shard, offset, &mut strides.collect::<Vec<_>>(), needed)?;
            for index in 0..last {
                let (before, after) = buffers.split_at_mut(index + 1);
                before[index][part.bytes..part.bytes + slack].copy_from_slice(&after[0][..slack]);
            }
            Ok(())
        };
        // SAFETY: the slots are loading, so they are this load's alone and no wave names them.
        unsafe { self.memory.write(&ranges, &mut fill) }
    }
}
