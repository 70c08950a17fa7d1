//! The state of sequences in the GPU's memory: KV pages and recurrent slots, laid out as in a snapshot.

use std::sync::Arc;

use cudarc::driver::DriverError;
use model::state::host::Page;
use model::state::{OpenPass, PAGE, PageId, SequenceTable, SlotId};
use model::{KvType, Pass, SequenceId, Snapshot, Spec, state::SnapshotShape};

use crate::driver::{Buffer, Device};
use crate::fail;

/// Books and memory of all sequences.
pub(crate) struct DeviceState {
    device: Arc<Device>,
    pub(crate) shape: SnapshotShape,
    pub(crate) table: SequenceTable,
    /// [attention layer][key, value][kv head][PAGE][head_dim] each.
    pages: Vec<Option<Buffer>>,
    /// For each DeltaNet layer window [taps − 1][channels], then states [value head][key][value].
    slots: Vec<Option<Buffer>>,
}

impl DeviceState {
    pub(crate) fn new(device: &Arc<Device>, spec: &Spec, kv: KvType, positions: usize) -> DeviceState {
        DeviceState {
            device: device.clone(),
            shape: SnapshotShape::new(spec, kv),
            table: SequenceTable::new(positions.div_ceil(PAGE)),
            pages: Vec::new(),
            slots: Vec::new(),
        }
    }

    fn page_bytes(&self) -> usize {
        PAGE * self.shape.position_len() * self.shape.kv.bytes()
    }

    /// Bytes of `positions` positions and `slots` recurrent slots.
    pub(crate) fn bytes(spec: &Spec, kv: KvType, positions: usize, slots: usize) -> usize {
        let shape = SnapshotShape::new(spec, kv);
        positions.next_multiple_of(PAGE) * shape.position_len() * kv.bytes() + slots * shape.slot_len() * 4
    }

    /// Opens a transaction, with memory behind everything it names and shared pages copied.
    pub(crate) fn open(&mut self, pass: &Pass) -> model::Result<OpenPass> {
        let open = self.table.open(pass)?;
        match self.back(&open) {
            Ok(()) => Ok(open),
            Err(error) => {
                self.table.abort(open);
                Err(fail("begin", 0)(error))
            }
        }
    }

    fn back(&mut self, open: &OpenPass) -> Result<(), DriverError> {
        let (page, slot) = (self.page_bytes(), self.shape.slot_len() * 4);
        for run in &open.runs {
            for id in &run.pages {
                allocate(&self.device, &mut self.pages, id.0, page)?;
            }
            let slots = std::iter::once(run.to).chain(run.snapshots.iter().map(|&(_, slot)| slot));
            for id in slots {
                allocate(&self.device, &mut self.slots, id.0, slot)?;
            }
        }
        for &(from, to) in &open.copies {
            self.device.copy(self.page(from.0), self.page(to.0), page)?;
        }
        Ok(())
    }

    /// The address of a page that has memory.
    pub(crate) fn page(&self, id: u32) -> u64 {
        self.pages[id as usize].as_ref().expect("pages of an open pass have memory").at
    }

    /// The address of a slot that has memory.
    pub(crate) fn slot(&self, id: SlotId) -> u64 {
        self.slots[id.0 as usize].as_ref().expect("slots of an open pass have memory").at
    }

    /// Offset of a DeltaNet layer in a slot and its length, in numbers.
    pub(crate) fn layer(&self, ordinal: usize) -> (usize, usize) {
        let len = self.shape.window + self.shape.state;
        (ordinal * len, len)
    }

    /// Numbers of a layer's convolution window, which lies before its states.
    pub(crate) fn window(&self) -> usize {
        self.shape.window
    }

    /// Copies the state of a sequence to the host. Waits.
    pub(crate) fn snapshot(&self, id: SequenceId) -> model::Result<Snapshot> {
        let (position, pages, slot) = self.table.parts(id)?;
        let fail = fail("snapshot", 0);
        let recurrent = match slot {
            Some(slot) => self.device.download(self.slot(slot), self.shape.slot_len()).map_err(&fail)?,
            None => Vec::new(),
        };
        let copy = |page: &PageId| {
            let bytes: Vec<u8> = self.device.download(self.page(page.0), self.page_bytes())?;
            let mut page = Page::new(&self.shape);
            page.write_bytes(0, &bytes);
            Ok(Arc::new(page))
        };
        let pages = pages.iter().map(copy).collect::<Result<_, _>>().map_err(&fail)?;
        Ok(Snapshot { shape: self.shape, position, recurrent: Arc::new(recurrent), pages })
    }

    /// A new sequence in a state copied to the host before.
    pub(crate) fn restore(&mut self, snapshot: &Snapshot) -> model::Result<SequenceId> {
        snapshot.check(&self.shape)?;
        let id = self.table.restore(snapshot.position)?;
        match self.fill(id, snapshot) {
            Ok(()) => Ok(id),
            Err(error) => {
                self.table.free(id);
                Err(fail("restore", 0)(error))
            }
        }
    }

    fn fill(&mut self, id: SequenceId, snapshot: &Snapshot) -> Result<(), DriverError> {
        let (_, pages, slot) = self.table.parts(id).expect("just made");
        let (pages, page_bytes) = (pages.to_vec(), self.page_bytes());
        if let Some(slot) = slot {
            allocate(&self.device, &mut self.slots, slot.0, self.shape.slot_len() * 4)?;
            self.device.upload(&snapshot.recurrent[..], self.slot(slot))?;
        }
        let mut copies = Vec::new();
        for (page, from) in pages.iter().zip(&snapshot.pages) {
            allocate(&self.device, &mut self.pages, page.0, page_bytes)?;
            let mut copy = Vec::with_capacity(page_bytes);
            from.append_bytes(0..from.len(), &mut copy);
            self.device.upload(&copy, self.page(page.0))?;
            copies.push(copy);
        }
        // The copies must not go away before they are read.
        self.device.wait()
    }
}

/// Memory behind an id, zeroed: positions nobody wrote are read, though not used.
fn allocate(
    device: &Arc<Device>,
    memory: &mut Vec<Option<Buffer>>,
    id: u32,
    bytes: usize,
) -> Result<(), DriverError> {
    let index = id as usize;
    if memory.len() <= index {
        memory.resize_with(index + 1, || None);
    }
    if memory[index].is_none() {
        let buffer = device.allocate(bytes)?;
        device.zero(buffer.at, bytes)?;
        memory[index] = Some(buffer);
    }
    Ok(())
}
