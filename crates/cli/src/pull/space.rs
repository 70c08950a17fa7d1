//! Free space, where the system tells.

use std::path::Path;

use super::error::Error;

/// Bytes that are left to others.
const RESERVE: u64 = 64 << 20;

/// Checks that `needed` bytes fit on the disk of `folder`.
///
/// # Errors
/// [`Error::Space`].
pub fn check(folder: &Path, needed: u64) -> Result<(), Error> {
    match free(folder) {
        Some(free) if needed.saturating_add(RESERVE) > free => {
            Err(Error::Space { folder: folder.to_path_buf(), needed, free })
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn free(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// This system does not tell; a full disk is told when it is met.
#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}
