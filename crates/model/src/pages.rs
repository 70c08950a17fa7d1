//! Pages of memory.

/// Asks for huge pages behind memory that is not touched yet: fewer faults now, fewer misses of the address
/// cache later. A wish: without them everything works, only slower. Small allocations are left alone.
#[cfg(target_os = "linux")]
pub fn prefer_huge_pages<T>(memory: &[T]) {
    const HUGE: usize = 2 << 20;
    let range = memory.as_ptr_range();
    let (start, end) = ((range.start as usize).next_multiple_of(HUGE), range.end as usize / HUGE * HUGE);
    if start < end {
        // SAFETY: whole pages inside memory that is borrowed; the advice does not change what they hold.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Asks for nothing: there is no such wish on this system.
#[cfg(not(target_os = "linux"))]
pub fn prefer_huge_pages<T>(_memory: &[T]) {}

/// Gives the whole pages of some memory back to the system. They hold anything until they are written again.
///
/// # Safety
/// The memory is a private mapping of no file, alive, and nobody needs what it holds.
#[cfg(target_os = "linux")]
pub(crate) unsafe fn give_back(start: *mut u8, len: usize) {
    // SAFETY: asks a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(1 << 16);
    let (first, end) = ((start as usize).next_multiple_of(page), (start as usize + len) / page * page);
    if first < end {
        // SAFETY: whole pages inside memory whose contents nobody needs, by the caller's promise.
        unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_DONTNEED) };
    }
}

/// Keeps them: there is no such call on this system.
///
/// # Safety
/// As above.
#[cfg(not(target_os = "linux"))]
pub(crate) unsafe fn give_back(_start: *mut u8, _len: usize) {}

/// Gives memory that was freed back to the system, where the allocator keeps some of it for later.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn trim() {
    // SAFETY: touches free memory of the allocator only.
    unsafe { libc::malloc_trim(0) };
}

/// Nothing to do: the allocator gives back large blocks when they are freed.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn trim() {}
