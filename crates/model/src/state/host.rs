//! Sequence state in host memory, for backends that compute there.

use half::f16;

use super::{KvType, OpenPass, PAGE, PageId, SequenceId, SequenceTable, SlotId, Snapshot, SnapshotShape};
use crate::error::Result;
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

/// Books and memory of all sequences.
#[derive(Debug)]
pub struct HostState {
    shape: SnapshotShape,
    table: SequenceTable,
    pages: Vec<Option<Page>>,
    slots: Vec<Option<Box<[f32]>>>,
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
        for run in &open.runs {
            run.pages.iter().for_each(|&page| self.back_page(page));
            self.back_slot(run.to);
            run.snapshots.iter().for_each(|&(_, slot)| self.back_slot(slot));
        }
        for &(from, to) in &open.copies {
            self.pages[to.0 as usize] = self.pages[from.0 as usize].clone();
        }
        Ok(open)
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
        self.slots[slot.0 as usize].as_mut().expect("backed")[layer].split_at_mut(window)
    }

    /// Copies the state of one DeltaNet layer from one slot to another; `None` is all zeros.
    pub fn copy_recurrent(&mut self, from: Option<SlotId>, to: SlotId, delta_layer: usize) {
        let layer = self.layer_range(delta_layer);
        let Some(from) = from else {
            self.slots[to.0 as usize].as_mut().expect("backed")[layer].fill(0.0);
            return;
        };
        let (from, to) = (from.0 as usize, to.0 as usize);
        let [from, to] = self.slots.get_disjoint_mut([from, to]).expect("a pass writes a slot of its own");
        let from = from.as_ref().expect("backed");
        to.as_mut().expect("backed")[layer.clone()].copy_from_slice(&from[layer]);
    }

    /// Keys or values of one head in one page.
    pub fn rows(&self, page: PageId, attention_layer: usize, side: Side, head: usize) -> Rows<'_> {
        let range = self.head_range(attention_layer, side, head);
        match self.pages[page.0 as usize].as_ref().expect("backed") {
            Page::F16(data) => Rows::F16(&data[range]),
            Page::F32(data) => Rows::F32(&data[range]),
        }
    }

    /// A page to write, for backends that store rows from several threads; [`HostState::head_range`] says
    /// what lies where.
    ///
    /// # Panics
    /// If the page has no memory; those of an open pass have.
    pub fn page_mut(&mut self, page: PageId) -> &mut Page {
        self.pages[page.0 as usize].as_mut().expect("backed")
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
        match self.pages[pages[position / PAGE].0 as usize].as_mut().expect("backed") {
            Page::F16(data) => {
                let out = data[start..start + row.len()].iter_mut();
                out.zip(row).for_each(|(out, &x)| *out = f16::from_f32(x));
            }
            Page::F32(data) => data[start..start + row.len()].copy_from_slice(row),
        }
    }

    /// Copies a sequence's state out.
    ///
    /// # Errors
    /// [`crate::Error::NoSequence`].
    pub fn snapshot(&self, id: SequenceId) -> Result<Snapshot> {
        let (position, pages, slot) = self.table.parts(id)?;
        let recurrent =
            slot.map_or(Vec::new(), |slot| self.slots[slot.0 as usize].as_ref().expect("backed").to_vec());
        let mut kv = Vec::with_capacity(position * self.shape.position_len() * self.shape.kv.bytes());
        for (layer, side, head) in self.heads() {
            for (i, &page) in pages.iter().enumerate() {
                let len = (position - i * PAGE).min(PAGE) * self.shape.head_dim;
                match self.rows(page, layer, side, head) {
                    Rows::F16(row) => kv.extend(row[..len].iter().flat_map(|x| x.to_le_bytes())),
                    Rows::F32(row) => kv.extend(row[..len].iter().flat_map(|x| x.to_le_bytes())),
                }
            }
        }
        Ok(Snapshot { shape: self.shape, position, recurrent, kv })
    }

    /// A new sequence in the state of `snapshot`.
    ///
    /// # Errors
    /// [`crate::Error::Snapshot`] if it does not belong here, [`crate::Error::ContextFull`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        snapshot.check(&self.shape)?;
        let id = self.table.restore(snapshot.position)?;
        let (_, pages, slot) = self.table.parts(id)?;
        let pages = pages.to_vec();
        if let Some(slot) = slot {
            self.back_slot(slot);
            self.slots[slot.0 as usize].as_mut().expect("backed").copy_from_slice(&snapshot.recurrent);
        }
        pages.iter().for_each(|&page| self.back_page(page));
        let row_bytes = self.shape.head_dim * self.shape.kv.bytes();
        let mut rows = snapshot.kv.chunks_exact(row_bytes.max(1));
        for (layer, side, head) in self.heads() {
            for position in 0..snapshot.position {
                let row = decode_row(rows.next().expect("length was checked"), self.shape.kv);
                self.store(&pages, position, (layer, side, head), &row);
            }
        }
        Ok(id)
    }

    fn heads(&self) -> impl Iterator<Item = (usize, Side, usize)> + use<> {
        let (layers, heads) = (self.shape.attention_layers, self.shape.kv_heads);
        (0..layers).flat_map(move |layer| {
            [Side::Key, Side::Value]
                .into_iter()
                .flat_map(move |side| (0..heads).map(move |head| (layer, side, head)))
        })
    }

    fn layer_range(&self, delta_layer: usize) -> std::ops::Range<usize> {
        let len = self.shape.window + self.shape.state;
        delta_layer * len..(delta_layer + 1) * len
    }

    /// Where in a page the numbers of one head lie, position-major: [PAGE][head_dim].
    pub fn head_range(&self, attention_layer: usize, side: Side, head: usize) -> std::ops::Range<usize> {
        let len = PAGE * self.shape.head_dim;
        let index = (attention_layer * 2 + side as usize) * self.shape.kv_heads + head;
        index * len..(index + 1) * len
    }

    fn back_page(&mut self, page: PageId) {
        let len = PAGE * self.shape.position_len();
        let kv = self.shape.kv;
        back(&mut self.pages, page.0, || match kv {
            KvType::F16 => Page::F16(vec![f16::ZERO; len].into_boxed_slice()),
            KvType::F32 => Page::F32(vec![0.0; len].into_boxed_slice()),
        });
    }

    fn back_slot(&mut self, slot: SlotId) {
        let len = self.shape.slot_len();
        back(&mut self.slots, slot.0, || vec![0.0; len].into_boxed_slice());
    }
}

fn back<T>(memory: &mut Vec<Option<T>>, id: u32, make: impl FnOnce() -> T) {
    let index = id as usize;
    if memory.len() <= index {
        memory.resize_with(index + 1, || None);
    }
    memory[index].get_or_insert_with(make);
}

fn decode_row(bytes: &[u8], kv: KvType) -> Vec<f32> {
    match kv {
        KvType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        KvType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}
