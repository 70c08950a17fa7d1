//! Which cores the process may use.

use std::collections::BTreeSet;
use std::thread;

/// Physical cores available to this process: those of its affinity mask, but no more than the control
/// group's quota allows.
pub fn physical_cores() -> usize {
    // The standard library counts the affinity mask and the quota.
    let available = thread::available_parallelism().map_or(1, |n| n.get());
    let cores: BTreeSet<String> = allowed_cpus().iter().map(|&cpu| siblings(cpu)).collect();
    if cores.is_empty() { available } else { available.min(cores.len()) }
}

/// Keeps the calling thread on the `member`-th physical core the process may use (round and round if there
/// are more members than cores). Best effort: where the system refuses, the thread stays free.
pub(crate) fn pin(member: usize) {
    let mut seen = BTreeSet::new();
    let firsts: Vec<usize> = allowed_cpus().into_iter().filter(|&cpu| seen.insert(siblings(cpu))).collect();
    if !firsts.is_empty() {
        pin_to(firsts[member % firsts.len()]);
    }
}

/// The hardware threads that share a core with `cpu`, as the system writes them.
fn siblings(cpu: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    // SAFETY: a cpu_set_t is a plain array of bits, for which all zeros is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is writable and of the size given; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
        return Vec::new();
    }
    // SAFETY: CPU numbers below CPU_SETSIZE lie inside the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

#[cfg(target_os = "linux")]
fn pin_to(cpu: usize) {
    // SAFETY: a cpu_set_t is a plain array of bits, for which all zeros is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` came from a set of this size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: `set` is readable and of the size given; 0 is the calling thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
fn pin_to(_cpu: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_core_and_no_more_than_hardware_threads() {
        let cores = physical_cores();
        assert!(cores >= 1 && cores <= thread::available_parallelism().unwrap().get());
    }
}
