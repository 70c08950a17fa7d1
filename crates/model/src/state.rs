//! The state of sequences: reference-counted KV pages and recurrent states.
//!
//! Both are values that many sequences may share. A pass is a transaction on them:
//!
//! - [`SequenceTable::open`] checks the runs, gives each a fresh recurrent slot to write, and private pages
//!   for the positions it will fill (a shared, partly filled page is copied first);
//! - while the pass runs, the sequences still are what they were;
//! - [`SequenceTable::commit`] swaps the new state in, [`SequenceTable::abort`] drops it. An aborted pass
//!   may have written keys and values beyond the end of a sequence, where nobody looks.
//!
//! Hence forking is free, cancelling loses nothing, and nothing is ever half restored.
//!
//! The table keeps the books only; memory belongs to the backend ([`host`] for those that compute on
//! the host).

pub mod host;
mod pool;
mod snapshot;

pub use snapshot::{Snapshot, SnapshotShape};

use crate::error::{Error, Result};
use crate::pass::Pass;
use pool::Pool;

/// Positions in a KV page. A multiple of [`GRID`](crate::GRID).
pub const PAGE: usize = 256;

/// Names a sequence of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u32);

/// Names a KV page: keys and values of [`PAGE`] positions for all attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageId(pub u32);

/// Names a recurrent slot: DeltaNet states and convolution windows of all DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId(pub u32);

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Half precision, the default: 24 KiB a position for the 80B model.
    #[default]
    F16,
    /// Single precision: twice that.
    F32,
}

impl KvType {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    position: usize,
    pages: Vec<PageId>,
    /// `None`: all zeros, the state of an empty sequence.
    slot: Option<SlotId>,
}

/// What a run of an open pass reads and writes.
#[derive(Clone, Debug)]
pub struct OpenRun {
    /// The recurrent state before the run; `None` is all zeros.
    pub from: Option<SlotId>,
    /// The recurrent state after the run.
    pub to: SlotId,
    /// Pages of the sequence from position 0, including those the run fills.
    pub pages: Vec<PageId>,
    /// States to emit: after this row of the pass, into this slot.
    pub snapshots: Vec<(usize, SlotId)>,
}

/// An open transaction: one entry for each run of the pass.
#[derive(Debug)]
pub struct OpenPass {
    /// In the order of the pass.
    pub runs: Vec<OpenRun>,
    /// Pages to copy before anything is written: from, to.
    pub copies: Vec<(PageId, PageId)>,
}

/// The books of all sequences of a backend.
#[derive(Debug)]
pub struct SequenceTable {
    sequences: Vec<Option<Sequence>>,
    pages: Pool,
    slots: Pool,
}

impl SequenceTable {
    /// A table that may hand out `pages` pages, and as many recurrent slots as are asked for.
    pub fn new(pages: usize) -> SequenceTable {
        SequenceTable { sequences: Vec::new(), pages: Pool::new(pages), slots: Pool::new(u32::MAX as usize) }
    }

    /// A new, empty sequence.
    pub fn create(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    /// A new sequence in the same state as `id`, sharing all of it.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let copy = self.get(id)?.clone();
        copy.pages.iter().for_each(|page| self.pages.retain(page.0));
        copy.slot.iter().for_each(|slot| self.slots.retain(slot.0));
        Ok(self.insert(copy))
    }

    /// Forgets a sequence; what it shared lives on. Freeing one that does not exist does nothing.
    pub fn free(&mut self, id: SequenceId) {
        if let Some(gone) = self.sequences.get_mut(id.0 as usize).and_then(Option::take) {
            self.release(&gone.pages, gone.slot);
        }
    }

    /// The length of a sequence.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn position(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.position)
    }

    /// Pages and recurrent slot of a sequence, for a copy to the host.
    ///
    /// # Errors
    /// [`Error::NoSequence`].
    pub fn parts(&self, id: SequenceId) -> Result<(usize, &[PageId], Option<SlotId>)> {
        let sequence = self.get(id)?;
        Ok((sequence.position, &sequence.pages, sequence.slot))
    }

    /// A new sequence of `position` tokens with fresh pages and slot, which the caller fills.
    ///
    /// # Errors
    /// [`Error::ContextFull`].
    pub fn restore(&mut self, position: usize) -> Result<SequenceId> {
        let pages = self.take_pages(position.div_ceil(PAGE))?;
        let slot = (position > 0).then(|| self.take_slot());
        Ok(self.insert(Sequence { position, pages, slot }))
    }

    /// Opens a transaction for `pass`.
    ///
    /// # Errors
    /// [`Error::Pass`] if a run does not start at the end of its sequence or a snapshot's target is not
    /// empty, [`Error::NoSequence`], [`Error::ContextFull`]. Nothing has changed then.
    pub fn open(&mut self, pass: &Pass) -> Result<OpenPass> {
        self.check(pass)?;
        let mut open = OpenPass { runs: Vec::new(), copies: Vec::new() };
        for run in &pass.runs {
            match self.open_run(run.sequence, run.start, run.start + run.rows.len(), &mut open.copies) {
                Ok(opened) => open.runs.push(opened),
                Err(error) => {
                    self.abort(open);
                    return Err(error);
                }
            }
        }
        for wish in &pass.snapshots {
            let slot = self.take_slot();
            let owner = pass.runs.iter().position(|run| run.rows.contains(&wish.row)).expect("checked");
            open.runs[owner].snapshots.push((wish.row, slot));
        }
        Ok(open)
    }

    /// Makes the state after `pass` the state of its sequences, and that of its snapshots.
    pub fn commit(&mut self, pass: &Pass, open: OpenPass) {
        for (run, opened) in pass.runs.iter().zip(open.runs) {
            for &(row, slot) in &opened.snapshots {
                let position = run.position(row) + 1;
                let pages = opened.pages[..position.div_ceil(PAGE)].to_vec();
                pages.iter().for_each(|page| self.pages.retain(page.0));
                let wish = pass.snapshots.iter().find(|w| w.row == row && self.is_empty(w.into));
                let into = wish.expect("a slot was taken for each wish").into;
                self.sequences[into.0 as usize] = Some(Sequence { position, pages, slot: Some(slot) });
            }
            let next =
                Sequence { position: run.start + run.rows.len(), pages: opened.pages, slot: Some(opened.to) };
            let old = self.sequences[run.sequence.0 as usize].replace(next);
            let old = old.expect("sequences of an open pass are not freed");
            self.release(&old.pages, old.slot);
        }
    }

    /// Drops what `pass` would have become.
    pub fn abort(&mut self, open: OpenPass) {
        for run in open.runs {
            self.release(&run.pages, Some(run.to));
            run.snapshots.iter().for_each(|(_, slot)| self.release(&[], Some(*slot)));
        }
    }

    /// Pages and slots in use, for tests and statistics.
    pub fn in_use(&self) -> (usize, usize) {
        (self.pages.in_use(), self.slots.in_use())
    }

    /// Ids of pages and slots that have been in use and are not any more, those handed out next at the end.
    pub fn unused(&self) -> (&[u32], &[u32]) {
        (self.pages.unused(), self.slots.unused())
    }

    fn check(&self, pass: &Pass) -> Result<()> {
        for run in &pass.runs {
            let position = self.position(run.sequence)?;
            if position != run.start {
                return Err(Error::Pass(format!(
                    "sequence {} has {position} tokens, but its run starts at {}",
                    run.sequence.0, run.start
                )));
            }
        }
        for (i, wish) in pass.snapshots.iter().enumerate() {
            let used = pass.runs.iter().any(|run| run.sequence == wish.into)
                || pass.snapshots[..i].iter().any(|other| other.into == wish.into);
            if used || self.position(wish.into)? != 0 {
                return Err(Error::Pass(format!("snapshot target {} is not an empty sequence", wish.into.0)));
            }
        }
        Ok(())
    }

    /// Pages for positions `..end` of a sequence that has `start`: shares the full ones, copies a shared
    /// partial one, adds fresh ones.
    fn open_run(
        &mut self,
        id: SequenceId,
        start: usize,
        end: usize,
        copies: &mut Vec<(PageId, PageId)>,
    ) -> Result<OpenRun> {
        let sequence = self.get(id)?.clone();
        let partial = !start.is_multiple_of(PAGE);
        // Only the sequence itself holds its last page: writing on is safe without a copy.
        let keeps = if partial && self.pages.is_shared(sequence.pages[start / PAGE].0) {
            start / PAGE
        } else {
            start.div_ceil(PAGE)
        };
        let fresh = self.take_pages(end.div_ceil(PAGE) - keeps)?;
        if keeps < start.div_ceil(PAGE) {
            copies.push((sequence.pages[keeps], fresh[0]));
        }
        let mut pages = sequence.pages[..keeps].to_vec();
        pages.iter().for_each(|page| self.pages.retain(page.0));
        pages.extend(fresh);
        Ok(OpenRun { from: sequence.slot, to: self.take_slot(), pages, snapshots: Vec::new() })
    }

    fn take_pages(&mut self, count: usize) -> Result<Vec<PageId>> {
        if count > self.pages.left() {
            return Err(Error::ContextFull { pages: self.pages.capacity(), page_positions: PAGE });
        }
        Ok((0..count).map(|_| PageId(self.pages.take().expect("counted"))).collect())
    }

    fn take_slot(&mut self) -> SlotId {
        SlotId(self.slots.take().expect("more slots than memory"))
    }

    fn release(&mut self, pages: &[PageId], slot: Option<SlotId>) {
        pages.iter().for_each(|page| self.pages.release(page.0));
        slot.iter().for_each(|slot| self.slots.release(slot.0));
    }

    fn is_empty(&self, id: SequenceId) -> bool {
        self.position(id).is_ok_and(|position| position == 0)
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(id.0 as usize).and_then(Option::as_ref).ok_or(Error::NoSequence(id.0))
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let free = self.sequences.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.sequences.push(None);
            self.sequences.len() - 1
        });
        self.sequences[index] = Some(sequence);
        SequenceId(index as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(table: &mut SequenceTable, id: SequenceId, len: usize) -> OpenPass {
        let mut pass = Pass::new();
        pass.push(id, table.position(id).unwrap(), &vec![0; len]);
        let open = table.open(&pass).unwrap();
        let copy = OpenPass { runs: open.runs.clone(), copies: open.copies.clone() };
        table.commit(&pass, open);
        copy
    }

    #[test]
    fn forks_share_until_one_writes_into_a_partial_page() {
        let mut table = SequenceTable::new(8);
        let a = table.create();
        run(&mut table, a, PAGE + 10);
        assert_eq!(table.in_use(), (2, 1));
        let b = table.fork(a).unwrap();
        assert_eq!(table.in_use(), (2, 1), "a fork owns nothing");

        let open = run(&mut table, b, 5);
        assert_eq!(open.copies.len(), 1, "the half-full page was shared");
        assert_eq!(table.in_use(), (3, 2));
        let open = run(&mut table, a, 5);
        assert!(open.copies.is_empty(), "now it is alone with its page");
        table.free(a);
        table.free(b);
        assert_eq!(table.in_use(), (0, 0));
    }

    #[test]
    fn aborting_restores_the_books() {
        let mut table = SequenceTable::new(4);
        let a = table.create();
        run(&mut table, a, 300);
        let into = table.create();
        let mut pass = Pass::new();
        pass.push(a, 300, &[0; 100]);
        pass.snapshots.push(crate::SnapshotRequest { row: 3, into });
        let before = table.in_use();
        let open = table.open(&pass).unwrap();
        table.abort(open);
        assert_eq!(table.in_use(), before);
        assert_eq!(table.position(a).unwrap(), 300);
        assert_eq!(table.position(into).unwrap(), 0);
    }

    #[test]
    fn snapshots_become_sequences_of_their_own() {
        let mut table = SequenceTable::new(8);
        let (a, mid, end) = (table.create(), table.create(), table.create());
        let mut pass = Pass::new();
        pass.push(a, 0, &[0; 600]);
        pass.snapshots.push(crate::SnapshotRequest { row: 255, into: mid });
        pass.snapshots.push(crate::SnapshotRequest { row: 599, into: end });
        let open = table.open(&pass).unwrap();
        table.commit(&pass, open);
        assert_eq!(table.position(mid).unwrap(), 256);
        assert_eq!(table.parts(mid).unwrap().1.len(), 1);
        assert_eq!(table.position(end).unwrap(), 600);
        assert_eq!(table.in_use(), (3, 3));
        assert_eq!(run(&mut table, a, 1).copies.len(), 1, "`end` still reads the last page");
        table.free(a);
        assert_eq!(table.in_use().0, 3);
    }

    #[test]
    fn a_full_context_is_refused_and_changes_nothing() {
        let mut table = SequenceTable::new(2);
        let (a, b) = (table.create(), table.create());
        run(&mut table, a, 256);
        let mut pass = Pass::new();
        pass.push(b, 0, &[0; 10]);
        pass.push(a, 256, &[0; 10]);
        assert!(matches!(table.open(&pass), Err(Error::ContextFull { pages: 2, .. })));
        assert_eq!(table.in_use(), (1, 1));
        let mut wrong = Pass::new();
        wrong.push(a, 255, &[0; 1]);
        assert!(matches!(table.open(&wrong), Err(Error::Pass(_))));
        assert!(matches!(table.position(SequenceId(9)), Err(Error::NoSequence(9))));
    }
}
