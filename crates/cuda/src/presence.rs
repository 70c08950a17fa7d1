//! How many backends of this process compute on a GPU.
//!
//! Blocks of `few_experts` wait for one another, so that all of a launch have to find room at once. Where several backends launch
//! them beside each other, each takes its share of the multiprocessors; else none of them might ever have all it waits for.

use std::collections::BTreeMap;
use std::sync::Mutex;

/// Backends on each GPU.
static PRESENT: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

/// One of them, as long as it lives.
#[derive(Debug)]
pub(crate) struct Presence {
    gpu: i32,
}

impl Presence {
    pub(crate) fn on(gpu: i32) -> Presence {
        change(gpu, |count| *count += 1);
        Presence { gpu }
    }

    /// How many there are on this GPU, with this one.
    pub(crate) fn count(&self) -> usize {
        change(self.gpu, |count| *count)
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        change(self.gpu, |count| *count -= 1);
    }
}

fn change<T>(gpu: i32, work: impl FnOnce(&mut usize) -> T) -> T {
    let mut present = PRESENT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    work(present.entry(gpu).or_insert(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_those_that_live_on_the_same_gpu() {
        let first = Presence::on(-1);
        assert_eq!(first.count(), 1);
        let second = Presence::on(-1);
        let elsewhere = Presence::on(-2);
        assert_eq!((first.count(), second.count(), elsewhere.count()), (2, 2, 1));
        drop(first);
        assert_eq!(second.count(), 1);
    }
}
