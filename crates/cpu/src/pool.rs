//! A fixed team of threads that does one parallel region after the other.
//!
//! A region is a function of the thread's number. How its work is cut depends on the number of threads; what
//! is computed must not: every number is made by one thread, in an order that the cut does not touch.
//!
//! Regions are short (microseconds in decode), so idle threads spin for a moment before they sleep.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::{hint, io, thread};

use crate::topology;

/// How often a thread looks for work before it sleeps: some hundred microseconds, longer than the pauses
/// between the regions of a pass.
const SPINS: usize = 5000;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Number of the present region.
    region: AtomicUsize,
    /// Threads still busy with it, without the caller.
    busy: AtomicUsize,
    stop: AtomicBool,
    /// Written by the caller between regions, read by workers inside one.
    job: UnsafeCell<Option<Job>>,
    /// Workers asleep on `wake`.
    sleepers: AtomicUsize,
    /// Whether the caller sleeps on `done`.
    caller_sleeps: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    done: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only while `busy` is 0 and read only by threads counted in it; the closure behind
// it is `Sync`. Everything else synchronises itself.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The team. The thread that calls [`Pool::run`] is its member number 0.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A team of `threads` members, the caller included; with `pin`, member i stays on the i-th core. The caller
    /// itself stays free: what it starts later would inherit its core. As the others hold theirs, it finds the
    /// first one.
    pub(crate) fn new(threads: usize, pin: bool) -> io::Result<Pool> {
        let shared = Arc::new(Shared {
            region: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared: shared.clone(), workers: Vec::new() };
        for member in 1..threads {
            let shared = shared.clone();
            let body = move || {
                if pin {
                    topology::pin(member);
                }
                work(&shared, member);
            };
            pool.workers.push(thread::Builder::new().name(format!("cpu-{member}")).spawn(body)?);
        }
        Ok(pool)
    }

    /// Members of the team.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` once on every member with its number; returns when all are done.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: no worker is in a region (`busy` is 0: the last call waited for that), so nobody reads
        // `job`. The lifetime is erased, but this call does not return before every worker is done with it,
        // not even when the caller's own share panics.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job));
        }
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        shared.region.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&shared.sleep);
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.wait();
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = lock(&shared.panic).take() {
            resume_unwind(panic);
        }
    }

    fn wait(&self) {
        let shared = &*self.shared;
        for _ in 0..SPINS {
            if shared.busy.load(Ordering::Acquire) == 0 {
                return;
            }
            hint::spin_loop();
        }
        let mut guard = lock(&shared.sleep);
        shared.caller_sleeps.store(true, Ordering::SeqCst);
        while shared.busy.load(Ordering::SeqCst) != 0 {
            guard = shared.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        shared.caller_sleeps.store(false, Ordering::SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.region.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs; there is nothing else to report here.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, member: usize) {
    let mut seen = 0;
    loop {
        seen = next_region(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: this thread is counted in `busy`, so the caller neither writes `job` nor lets the closure
        // die until the count below falls.
        let job = unsafe { (*shared.job.get()).expect("a region has a job") };
        // SAFETY: as above.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(member) }));
        if let Err(panic) = result {
            lock(&shared.panic).get_or_insert(panic);
        }
        // Either this thread sees that the caller sleeps, or the caller sees that nobody is busy.
        if shared.busy.fetch_sub(1, Ordering::SeqCst) == 1 && shared.caller_sleeps.load(Ordering::SeqCst) {
            let _guard = lock(&shared.sleep);
            shared.done.notify_one();
        }
    }
}

/// Waits for a region after `seen` and returns its number. Regions are never missed: the next one begins
/// only when every worker is done with this one.
fn next_region(shared: &Shared, seen: usize) -> usize {
    for _ in 0..SPINS {
        let region = shared.region.load(Ordering::Acquire);
        if region != seen {
            return region;
        }
        hint::spin_loop();
    }
    let mut guard = lock(&shared.sleep);
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    let region = loop {
        let region = shared.region.load(Ordering::SeqCst);
        if region != seen {
            break region;
        }
        guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
    };
    shared.sleepers.fetch_sub(1, Ordering::SeqCst);
    region
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_works_once_a_region_asleep_or_awake() {
        let mut pool = Pool::new(5, false).unwrap();
        for round in 0..300 {
            let counts: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|member| {
                counts[member].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            if round % 100 == 0 {
                (0..10 * SPINS).for_each(|_| hint::spin_loop());
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let mut pool = Pool::new(3, false).unwrap();
        for culprit in [0, 2] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|member| assert_ne!(member, culprit, "on purpose"));
            }));
            assert!(result.is_err(), "member {culprit}");
        }
        let sum = AtomicUsize::new(0);
        pool.run(&|member| {
            sum.fetch_add(member, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 3);
    }
}
