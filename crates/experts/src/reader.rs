//! Reading bytes of the model's files into slots.

mod direct;

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, IoSliceMut};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use gguf::Shard;
use model::Model;

use crate::error::{Error, Result};

/// Block of direct reads: offsets, lengths and addresses are multiples of it.
pub const DIRECT_BLOCK: usize = 4096;

/// How bytes come from the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Around the system's file cache.
    Direct,
    /// Through the system's file cache.
    Cached,
    /// Copied from the mapped file.
    Mapped,
}

impl Io {
    /// The name users type.
    pub fn name(self) -> &'static str {
        match self {
            Io::Direct => "direct",
            Io::Cached => "cached",
            Io::Mapped => "mmap",
        }
    }
}

/// Reads from the files of a model. Called by several threads at once.
pub trait Reader: Send + Sync {
    /// What offsets, lengths and addresses must be multiples of; 1 if anything will do.
    fn alignment(&self) -> usize;

    /// The bytes of a file themselves, if they lie in memory that a device can read (by default they do not).
    fn bytes(&self, _shard: usize, _offset: u64, _len: usize) -> Option<&[u8]> {
        None
    }

    /// Fills `buffers`, one after the other, with the bytes of file number `shard` from `offset` on. At least
    /// the first `needed` bytes must be there; behind them the file may end.
    ///
    /// # Errors
    /// What the system says; [`ErrorKind::UnexpectedEof`] for a file that has become too short. The buffers then
    /// hold anything.
    fn read(
        &self,
        shard: usize,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        needed: usize,
    ) -> io::Result<()>;
}

/// The reader for a model.
///
/// # Errors
/// If files cannot be opened that way, are no longer those the model was opened from, or there are none.
pub fn open(model: &Arc<Model>, io: Io) -> Result<Box<dyn Reader>> {
    match io {
        Io::Mapped => Ok(Box::new(Mapped(model.clone()))),
        Io::Cached => Ok(Box::new(Files::open(model, false)?)),
        Io::Direct => Ok(Box::new(Files::open(model, true)?)),
    }
}

/// Copies from the mapping.
struct Mapped(Arc<Model>);

impl Reader for Mapped {
    fn alignment(&self) -> usize {
        1
    }

    fn read(&self, shard: usize, offset: u64, buffers: &mut [IoSliceMut<'_>], _: usize) -> io::Result<()> {
        let mut from = &self.0.gguf.shards()[shard].bytes()[offset as usize..];
        for buffer in buffers {
            let (part, rest) = from.split_at_checked(buffer.len()).ok_or(ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(part);
            from = rest;
        }
        Ok(())
    }
}

/// An open file, and what it was like then.
struct Opened {
    file: File,
    len: u64,
    changed: Option<SystemTime>,
}

/// Positional reads.
struct Files {
    files: Vec<Opened>,
    alignment: usize,
}

impl Files {
    fn open(model: &Model, direct: bool) -> Result<Files> {
        let open = |shard: &Shard| {
            let path = shard.path();
            let fail = |action| move |source| Error::File { file: path.to_owned(), action, source };
            let first = shard.file().ok_or(Error::NoFile)?;
            let known = first.metadata().map_err(fail("ask for its size"))?;
            let file = if direct {
                let file = direct::open(path).map_err(fail("open for direct reads (try --io cached)"))?;
                let found = file.metadata().map_err(fail("ask for its size"))?;
                same_file(&known, &found, shard.size()).map_err(fail("open a second time"))?;
                probe(&file).map_err(fail("read directly (try --io cached)"))?;
                file
            } else {
                first.try_clone().map_err(fail("open a second time"))?
            };
            Ok(Opened { file, len: shard.size(), changed: known.modified().ok() })
        };
        let files = model.gguf.shards().iter().map(open).collect::<Result<_>>()?;
        Ok(Files { files, alignment: if direct { DIRECT_BLOCK } else { 1 } })
    }
}

impl Reader for Files {
    fn alignment(&self) -> usize {
        self.alignment
    }

    fn read(
        &self,
        shard: usize,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        needed: usize,
    ) -> io::Result<()> {
        let opened = &self.files[shard];
        let mut read = |at: u64, buffers: &mut [IoSliceMut<'_>]| direct::read_at(&opened.file, at, buffers);
        fill(offset, buffers, needed, self.alignment, &mut read)?;
        let now = opened.file.metadata()?;
        if now.len() != opened.len || now.modified().ok() != opened.changed {
            return Err(io::Error::other("the file was changed while it was in use; start again"));
        }
        Ok(())
    }
}

/// Checks that a file opened again is the one the model was opened from.
fn same_file(known: &Metadata, found: &Metadata, len: u64) -> io::Result<()> {
    let same = direct::identity(known) == direct::identity(found) && found.len() == len;
    if same { Ok(()) } else { Err(io::Error::other("another file has taken its place; start again")) }
}

/// Reads one block, to see whether the file system can.
fn probe(file: &File) -> io::Result<()> {
    let mut memory = vec![0; 2 * DIRECT_BLOCK];
    let skip = memory.as_ptr().align_offset(DIRECT_BLOCK);
    let mut buffers = [IoSliceMut::new(&mut memory[skip..skip + DIRECT_BLOCK])];
    retry(|| direct::read_at(file, 0, &mut buffers)).map(drop)
}

/// One positional read into several buffers: bytes read, 0 at the end of the file.
type ReadAt<'a> = dyn FnMut(u64, &mut [IoSliceMut<'_>]) -> io::Result<usize> + 'a;

/// Reads until `needed` bytes are there: short reads go on where they ended (or at the last block before, for
/// direct reads), interrupted ones are repeated.
fn fill(
    offset: u64,
    buffers: &mut [IoSliceMut<'_>],
    needed: usize,
    alignment: usize,
    read: &mut ReadAt<'_>,
) -> io::Result<()> {
    let mut rest = buffers;
    let mut done = 0;
    loop {
        let count = retry(|| read(offset + done as u64, rest))?;
        if done + count >= needed {
            return Ok(());
        }
        let whole = count / alignment * alignment;
        if whole == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file ends before"));
        }
        done += whole;
        IoSliceMut::advance_slices(&mut rest, whole);
    }
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Rates of reading `path` in bytes a second, direct (where possible) and through the file cache: `reads` large reads
/// at places spread over the file, by so many threads.
///
/// # Errors
/// If the file cannot be read at all.
pub fn measure(path: &Path, reads: usize, threads: usize) -> io::Result<(Option<f64>, f64)> {
    let direct = direct::open(path).and_then(|file| rate(&file, reads, threads)).ok();
    Ok((direct, rate(&File::open(path)?, reads, threads)?))
}

/// Bytes a second of `reads` reads by some threads.
fn rate(file: &File, reads: usize, threads: usize) -> io::Result<f64> {
    const READ: usize = 4 << 20;
    let len = file.metadata()?.len();
    let step = (len / reads.max(1) as u64) / DIRECT_BLOCK as u64 * DIRECT_BLOCK as u64;
    let read = |first: usize, buffer: &mut [u8]| -> io::Result<usize> {
        let places = (first..reads).step_by(threads.max(1));
        places
            .map(|index| retry(|| direct::read_at(file, index as u64 * step, &mut [IoSliceMut::new(buffer)])))
            .sum()
    };
    let mut memory = vec![0; threads.max(1) * READ + DIRECT_BLOCK];
    let skip = memory.as_ptr().align_offset(DIRECT_BLOCK);
    let buffers = memory[skip..].chunks_exact_mut(READ).take(threads.max(1));
    let started = std::time::Instant::now();
    let bytes: io::Result<usize> = std::thread::scope(|scope| {
        let read = &read;
        let running: Vec<_> =
            buffers.enumerate().map(|(first, buffer)| scope.spawn(move || read(first, buffer))).collect();
        let gone = || Err(io::Error::other("a thread that read has panicked"));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| gone())).sum()
    });
    Ok(bytes? as f64 / started.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of bytes that count up, read in pieces of at most `most`, interrupted every other time.
    fn read_from(len: usize, most: usize) -> impl FnMut(u64, &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut calls = 0;
        move |at, buffers| {
            calls += 1;
            if calls % 2 == 1 {
                return Err(ErrorKind::Interrupted.into());
            }
            let mut next = at as usize;
            for buffer in buffers {
                for byte in buffer.iter_mut() {
                    if next == len || next - at as usize == most {
                        return Ok(next - at as usize);
                    }
                    *byte = next as u8;
                    next += 1;
                }
            }
            Ok(next - at as usize)
        }
    }

    #[test]
    fn short_and_interrupted_reads_go_on() {
        for (most, alignment) in [(1, 1), (7, 1), (1000, 1), (10, 8), (16, 8), (1000, 8)] {
            let (mut a, mut b) = ([0; 16], [0; 24]);
            let mut buffers = [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)];
            fill(8, &mut buffers, 37, alignment, &mut read_from(1000, most)).unwrap();
            let found: Vec<u8> = a.iter().chain(&b).copied().take(37).collect();
            assert_eq!(found, (8..45).collect::<Vec<u8>>(), "{most} {alignment}");
        }
    }

    #[test]
    fn rates_are_measured_whatever_the_file_and_the_threads() {
        let path = std::env::temp_dir().join(format!("redlite-rates-{}", std::process::id()));
        std::fs::write(&path, vec![1; 3 * DIRECT_BLOCK + 1]).unwrap();
        for (reads, threads) in [(0, 0), (1, 1), (6, 4), (2, 8)] {
            let (direct, cached) = measure(&path, reads, threads).unwrap();
            assert!(direct.is_none_or(f64::is_finite) && cached.is_finite());
            assert_eq!(cached > 0.0, reads > 0, "{reads} reads");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(measure(&path, 1, 1).is_err());
    }

    #[test]
    fn a_file_that_ends_early_is_an_error_unless_enough_is_there() {
        let mut a = [0; 40];
        let mut fill = |needed| {
            let mut buffers = [IoSliceMut::new(&mut a)];
            fill(0, &mut buffers, needed, 1, &mut read_from(30, 16))
        };
        assert!(fill(30).is_ok());
        assert_eq!(fill(31).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
