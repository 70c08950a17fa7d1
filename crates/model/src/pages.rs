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
