//! Sequence state in host memory, for backends that compute there.

use std::ops::Range;
use std::sync::Arc;

use half::f16;

use super::{KvType, OpenPass, PAGE, PageId, SequenceId, SequenceTable, SlotId, Snapshot, SnapshotShape};
use crate::error::Result;
use crate::pages::prefer_huge_pages;
use crate::pass::Pass;
use crate::spec::Spec;

/// Keys and values of [`PAGE`] positions: [attention layer][key, value][kv head][PAGE][head_dim].
#[derive(Clone, Debug)]
pub enum Page {
    /// Half precision.
    F16(Box<[f16]>),
    /// Single precision.
    F32(Box<[f32]>),
}

impl Page {
    /// A page of zeros.
    pub fn new(shape: &SnapshotShape) -> Page {
        let len = PAGE * shape.position_len();
        match shape.kv {
            KvType::F16 => Page::F16(zeros(len, f16::ZERO).into_boxed_slice()),
            KvType::F32 => Page::F32(zeros(len, 0.0).into_boxed_slice()),
        }
    }

    /// How its numbers are stored.
    pub fn kv(&self) -> KvType {
        match self {
            Page::F16(_) => KvType::F16,
            Page::F32(_) => KvType::F32,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Page::F16(data) => data.len(),
            Page::F32(data) => data.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends some of its numbers to `out`, little-endian.
    ///
    /// # Panics
    /// If there are not that many.
    pub fn append_bytes(&self, range: Range<usize>, out: &mut Vec<u8>) {
        match self {
            Page::F16(data) => out.extend(data[range].iter().flat_map(|x| x.to_le_bytes())),
            Page::F32(data) => out.extend(data[range].iter().flat_map(|x| x.to_le_bytes())),
        }
    }

    /// Replaces numbers from number `at` on by those in `bytes`, little-endian.
    ///
    /// # Panics
    /// If they are more than there is room for.
    pub fn write_bytes(&mut self, at: usize, bytes: &[u8]) {
        match self {
            Page::F16(data) => {
                let numbers = bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]));
                data[at..at + bytes.len() / 2].iter_mut().zip(numbers).for_each(|(x, new)| *x = new);
            }
            Page::F32(data) => {
                let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                data[at..at + bytes.len() / 4].iter_mut().zip(numbers).for_each(|(x, new)| *x = new);
            }
        }
    }
}

/// The numbers of one head in one page, position-major: [PAGE][head_dim].
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
}

/// Key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Key = 0,
    /// Values.
    Value = 1,
}

/// `len` times `zero`, in huge pages where the system has them: states are read from one end to the other for every token.
fn zeros<T: Copy>(len: usize, zero: T) -> Vec<T> {
    let mut zeros = Vec::with_capacity(len);
    prefer_huge_pages(zeros.spare_capacity_mut());
    zeros.resize(len, zero);
    zeros
}

/// Memory behind pages and slots that nobody holds any more, kept for the next passes.
const SPARE_PAGES: usize = 16;
/// As [`SPARE_PAGES`], for slots.
const SPARE_SLOTS: usize = 4;

/// Books and memory of all sequences.
#[derive(Debug)]
pub struct HostState {
    shape: SnapshotShape,
    table: SequenceTable,
    /// Shared with snapshots.
    pages: Vec<Option<Arc<Page>>>,
    slots: Vec<Option<Arc<Vec<f32>>>>,
}

impl HostState {
    /// Room for `positions` positions over all sequences (rounded up to pages); memory is taken as it is
    /// needed and kept for reuse.
    pub fn new(spec: &Spec, kv: KvType, positions: usize) -> HostState {
        let table = SequenceTable::new(positions.div_ceil(PAGE));
        HostState { shape: SnapshotShape::new(spec, kv), table, pages: Vec::new(), slots: Vec::new() }
    }

    /// The dimensions.
    pub fn shape(&self) -> &SnapshotShape {
        &self.shape
    }

    /// The books.
    pub fn table(&self) -> &SequenceTable {
        &self.table
    }

    /// The books, to create, fork and free.
    pub fn table_mut(&mut self) -> &mut SequenceTable {
        &mut self.table
    }

    /// Opens a transaction, with memory behind every page and slot it names and shared pages copied.
    ///
    /// # Errors
    /// As [`SequenceTable::open`].
    pub fn open(&mut self, pass: &Pass) -> Result<OpenPass> {
        let open = self.table.open(pass)?;
        self.make_room(&open);
        for &(from, to) in &open.copies {
            let copy = self.pages[from.0 as usize].as_deref().expect("backed").clone();
            put(&mut self.pages, to.0, Arc::new(copy));
        }
        for run in &open.runs {
            run.pages.iter().for_each(|&page| self.back_page(page));
            self.back_slot(run.to);
            run.snapshots.iter().for_each(|&(_, slot)| self.back_slot(slot));
        }
        Ok(open)
    }

    /// Bytes of memory behind pages and slots, those that snapshots share among them.
    pub fn bytes(&self) -> usize {
        let pages = self.pages.iter().flatten().count() * PAGE * self.shape.position_len();
        pages * self.shape.kv.bytes() + self.slots.iter().flatten().count() * self.shape.slot_len() * 4
    }

    /// Gives memory behind unused pages back when slots need new memory, and the other way round: what a budget for
    /// both allows is not taken twice.
    fn make_room(&mut self, open: &OpenPass) {
        let lacks_page =
            open.runs.iter().flat_map(|run| &run.pages).any(|page| !is_backed(&self.pages, page.0));
        let slots = |run: &super::OpenRun| {
            let snapshots: Vec<SlotId> = run.snapshots.iter().map(|&(_, slot)| slot).collect();
            [vec![run.to], snapshots].concat()
        };
        let lacks_slot = open.runs.iter().flat_map(slots).any(|slot| !is_backed(&self.slots, slot.0));
        let (pages, slots) = self.table.unused();
        if lacks_page {
            release(&mut self.slots, slots, SPARE_SLOTS);
        }
        if lacks_slot {
            release(&mut self.pages, pages, SPARE_PAGES);
        }
    }

    /// The recurrent state of DeltaNet layer number `delta_layer` (counted among DeltaNet layers) in a
    /// slot: window, state.
    pub fn recurrent(&self, slot: SlotId, delta_layer: usize) -> (&[f32], &[f32]) {
        let layer = self.layer_range(delta_layer);
        self.slots[slot.0 as usize].as_ref().expect("backed")[layer].split_at(self.shape.window)
    }

    /// As [`HostState::recurrent`], to write.
    pub fn recurrent_mut(&mut self, slot: SlotId, delta_layer: usize) -> (&mut [f32], &mut [f32]) {
        let (layer, window) = (self.layer_range(delta_layer), self.shape.window);
        written(&mut self.slots[slot.0 as usize])[layer].split_at_mut(window)
    }

    /// Copies the state of one DeltaNet layer from one slot to another; `None` is all zeros.
    pub fn copy_recurrent(&mut self, from: Option<SlotId>, to: SlotId, delta_layer: usize) {
        let layer = self.layer_range(delta_layer);
        let Some(from) = from else {
            written(&mut self.slots[to.0 as usize])[layer].fill(0.0);
            return;
        };
        let (from, to) = (from.0 as usize, to.0 as usize);
        let [from, to] = self.slots.get_disjoint_mut([from, to]).expect("a pass writes a slot of its own");
        let from = from.as_ref().expect("backed");
        written(to)[layer.clone()].copy_from_slice(&from[layer]);
    }

    /// Keys or values of one head in one page.
    pub fn rows(&self, page: PageId, attention_layer: usize, side: Side, head: usize) -> Rows<'_> {
        let range = self.head_range(attention_layer, side, head);
        match self.pages[page.0 as usize].as_deref().expect("backed") {
            Page::F16(data) => Rows::F16(&data[range]),
            Page::F32(data) => Rows::F32(&data[range]),
        }
    }

    /// A page to write, for backends that store rows from several threads; [`HostState::head_range`] says
    /// what lies where. Copied first if a snapshot shares it.
    ///
    /// # Panics
    /// If the page has no memory; those of an open pass have.
    pub fn page_mut(&mut self, page: PageId) -> &mut Page {
        Arc::make_mut(self.pages[page.0 as usize].as_mut().expect("backed"))
    }

    /// Stores the key or value of one position, rounded to the KV type.
    pub fn store(
        &mut self,
        pages: &[PageId],
        position: usize,
        (attention_layer, side, head): (usize, Side, usize),
        row: &[f32],
    ) {
        let start = self.head_range(attention_layer, side, head).start + position % PAGE * row.len();
        match self.page_mut(pages[position / PAGE]) {
            Page::F16(data) => {
                let out = data[start..start + row.len()].iter_mut();
                out.zip(row).for_each(|(out, &x)| *out = f16::from_f32(x));
            }
            Page::F32(data) => data[start..start + row.len()].copy_from_slice(row),
        }
    }

    /// A sequence's state, shared: nothing is copied.
    ///
    /// # Errors
    /// [`crate::Error::NoSequence`].
    pub fn snapshot(&self, id: SequenceId) -> Result<Snapshot> {
        let (position, pages, slot) = self.table.parts(id)?;
        let recurrent = slot.map(|slot| self.slots[slot.0 as usize].clone().expect("backed"));
        let pages = pages.iter().map(|page| self.pages[page.0 as usize].clone().expect("backed")).collect();
        Ok(Snapshot { shape: self.shape, position, recurrent: recurrent.unwrap_or_default(), pages })
    }

    /// A new sequence in the state of `snapshot`, which it shares.
    ///
    /// # Errors
    /// [`crate::Error::Snapshot`] if it does not belong here, [`crate::Error::ContextFull`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        snapshot.check(&self.shape)?;
        let id = self.table.restore(snapshot.position)?;
        let (_, pages, slot) = self.table.parts(id)?;
        if let Some(slot) = slot {
            put(&mut self.slots, slot.0, snapshot.recurrent.clone());
        }
        for (page, shared) in pages.iter().zip(&snapshot.pages) {
            put(&mut self.pages, page.0, shared.clone());
        }
        Ok(id)
    }

    fn layer_range(&self, delta_layer: usize) -> Range<usize> {
        let len = self.shape.window + self.shape.state;
        delta_layer * len..(delta_layer + 1) * len
    }

    /// Where in a page the numbers of one head lie, position-major: [PAGE][head_dim].
    pub fn head_range(&self, attention_layer: usize, side: Side, head: usize) -> Range<usize> {
        let len = PAGE * self.shape.head_dim;
        let index = (attention_layer * 2 + side as usize) * self.shape.kv_heads + head;
        index * len..(index + 1) * len
    }

    fn back_page(&mut self, page: PageId) {
        if !is_backed(&self.pages, page.0) {
            put(&mut self.pages, page.0, Arc::new(Page::new(&self.shape)));
        }
    }

    /// Memory of its own behind a slot that is going to be written.
    fn back_slot(&mut self, slot: SlotId) {
        let own = self.slots.get_mut(slot.0 as usize).and_then(Option::as_mut).and_then(Arc::get_mut);
        if own.is_none() {
            put(&mut self.slots, slot.0, Arc::new(zeros(self.shape.slot_len(), 0.0)));
        }
    }
}

/// A slot that an open pass writes: it was given memory of its own.
fn written(slot: &mut Option<Arc<Vec<f32>>>) -> &mut [f32] {
    slot.as_mut().and_then(Arc::get_mut).expect("slots of an open pass are nobody else's")
}

fn is_backed<T>(memory: &[Option<T>], id: u32) -> bool {
    memory.get(id as usize).is_some_and(Option::is_some)
}

fn put<T>(memory: &mut Vec<Option<T>>, id: u32, new: T) {
    let index = id as usize;
    if memory.len() <= index {
        memory.resize_with(index + 1, || None);
    }
    memory[index] = Some(new);
}

/// Gives the memory behind `unused` ids back, but for a few: those that are handed out next.
fn release<T>(memory: &mut [Option<T>], unused: &[u32], spare: usize) {
    for &id in &unused[..unused.len().saturating_sub(spare)] {
        if let Some(memory) = memory.get_mut(id as usize) {
            *memory = None;
        }
    }
}
