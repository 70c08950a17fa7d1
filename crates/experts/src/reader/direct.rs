//! What systems do differently: opening for direct reads, positional reads into several buffers, identity.

pub(super) use system::{identity, open, read_at};

#[cfg(target_os = "linux")]
mod system {
    use std::fs::{File, Metadata, OpenOptions};
    use std::io::{self, IoSliceMut};
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::path::Path;

    use rustix::fs::OFlags;

    pub(crate) fn open(path: &Path) -> io::Result<File> {
        let flags = OFlags::DIRECT.bits() as i32;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    }

    pub(crate) fn read_at(file: &File, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::preadv(file, buffers, offset)?)
    }

    pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
        (metadata.dev(), metadata.ino())
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::{File, Metadata};
    use std::io::{self, ErrorKind, IoSliceMut};
    use std::path::Path;

    pub(crate) fn open(_: &Path) -> io::Result<File> {
        Err(io::Error::new(ErrorKind::Unsupported, "direct reads are not available on this system"))
    }

    /// One buffer at a time: the first that is not full ends the read.
    pub(crate) fn read_at(file: &File, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut done = 0;
        for buffer in buffers {
            let count = one(file, offset + done as u64, buffer)?;
            done += count;
            if count < buffer.len() {
                break;
            }
        }
        Ok(done)
    }

    #[cfg(unix)]
    fn one(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(file, buffer, offset)
    }

    #[cfg(windows)]
    fn one(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
    }

    /// There is no second file to compare with, since direct reads are not available.
    pub(crate) fn identity(_: &Metadata) -> (u64, u64) {
        (0, 0)
    }
}
