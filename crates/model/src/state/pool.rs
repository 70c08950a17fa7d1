//! Reference-counted ids.

/// Hands out ids below a capacity, reusing those nobody holds any more.
#[derive(Debug)]
pub(super) struct Pool {
    references: Vec<u32>,
    free: Vec<u32>,
    capacity: usize,
}

impl Pool {
    pub(super) fn new(capacity: usize) -> Pool {
        Pool { references: Vec::new(), free: Vec::new(), capacity }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn in_use(&self) -> usize {
        self.references.len() - self.free.len()
    }

    /// Ids that nobody holds, those handed out next at the end.
    pub(super) fn unused(&self) -> &[u32] {
        &self.free
    }

    pub(super) fn left(&self) -> usize {
        self.capacity - self.in_use()
    }

    /// A fresh id with one reference.
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.left() == 0 {
            return None;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.references.push(0);
            self.references.len() as u32 - 1
        });
        self.references[id as usize] = 1;
        Some(id)
    }

    pub(super) fn retain(&mut self, id: u32) {
        self.references[id as usize] += 1;
    }

    pub(super) fn release(&mut self, id: u32) {
        let count = &mut self.references[id as usize];
        *count -= 1;
        if *count == 0 {
            self.free.push(id);
        }
    }

    pub(super) fn is_shared(&self, id: u32) -> bool {
        self.references[id as usize] > 1
    }
}
