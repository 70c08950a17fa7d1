//! A model on disk: one file or several shards, mapped and checked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::{Error, ErrorKind, label};
use crate::header::Header;
use crate::metadata::Metadata;
use crate::split;
use crate::tensor::TensorInfo;

/// A model whose files are mapped and whose sizes are all checked.
///
/// The files must not be shortened while this value lives: reading a mapped page that is gone ends the
/// process, as with every mapped file. Replacing a file by renaming, as [`Writer`](crate::Writer) does,
/// is harmless.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    shards: Vec<Shard>,
}

/// One of the files of a model.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap, File),
    Owned(Vec<u8>),
}

impl Shard {
    /// Where the file is, as it was opened; `(memory)` if it is none.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map, _) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// The open file; none if the bytes were handed over.
    pub fn file(&self) -> Option<&File> {
        match &self.bytes {
            Bytes::Mapped(_, file) => Some(file),
            Bytes::Owned(_) => None,
        }
    }

    /// Takes part of a mapped file out of this process's memory, after it has been copied: reading it again
    /// brings it back. Of no effect where the system does not offer it.
    fn forget(&self, start: usize, len: usize) {
        if let Bytes::Mapped(map, _) = &self.bytes {
            forget(map, start, len);
        }
    }

    /// Bytes in the file.
    pub fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn map(path: &Path) -> Result<Shard, Error> {
        let io = |action| move |error| Error::new(path, ErrorKind::Io { action, error });
        // Before opening: opening a pipe would wait for its other end.
        if !fs::metadata(path).map_err(io("open the file"))?.is_file() {
            return Err(Error::new(path, ErrorKind::NotAFile));
        }
        let file = File::open(path).map_err(io("open the file"))?;
        // SAFETY: the map is read-only and private to this value, which hands out `&[u8]` for its own
        // lifetime only. That nobody changes or shortens the file meanwhile cannot be enforced; it is
        // the stated condition of `Gguf`.
        let map = unsafe { Mmap::map(&file) }.map_err(io("map the file into memory"))?;
        Ok(Shard { path: path.to_owned(), bytes: Bytes::Mapped(map, file) })
    }
}

#[cfg(unix)]
fn forget(map: &Mmap, start: usize, len: usize) {
    // SAFETY: the map is shared and read-only, so dropped pages come back from the file with the same bytes. A wish
    // that is refused costs memory, nothing else.
    let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
}

#[cfg(not(unix))]
fn forget(_: &Mmap, _: usize, _: usize) {}

/// A shard with its header.
pub(crate) struct Part {
    pub shard: Shard,
    pub header: Header,
}

impl Part {
    pub fn open(path: &Path) -> Result<Part, Error> {
        let shard = Shard::map(path)?;
        let header = Header::parse(shard.bytes(), path)?;
        Ok(Part { shard, header })
    }
}

impl Gguf {
    /// Opens a model: its file, any of its shards, or the folder that holds it and no other.
    ///
    /// Shards are found by their names (`NAME-00001-of-00003.gguf`) and ordered by their metadata.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let mut path = path.to_owned();
        let mut candidates = Vec::new();
        if path.is_dir() {
            let folder = path;
            candidates = split::candidates(&folder)?;
            path = folder.join(&candidates[0]);
        }
        let part = Part::open(&path)?;
        let count = split::count(&part.header.metadata)?;
        if count > 1 {
            return Gguf::assemble(split::gather(part, count)?);
        }
        if candidates.len() > 1 {
            // Named like shards, but whole models.
            let folder = path.parent().unwrap_or(&path);
            return Err(Error::new(folder, ErrorKind::SeveralModels { found: candidates }));
        }
        Gguf::assemble(vec![part])
    }

    /// A model from the bytes of its one file.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Gguf, Error> {
        let path = Path::new("(memory)");
        let header = Header::parse(&bytes, path)?;
        let count = split::count(&header.metadata)?;
        if count > 1 {
            return Err(Error::new(path, ErrorKind::ShardAlone { count }));
        }
        let shard = Shard { path: path.to_owned(), bytes: Bytes::Owned(bytes) };
        Gguf::assemble(vec![Part { shard, header }])
    }

    /// One model of its parts, in order. There is at least one.
    fn assemble(parts: Vec<Part>) -> Result<Gguf, Error> {
        let mut metadata = None;
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut index = HashMap::new();
        let mut shards: Vec<Shard> = Vec::new();
        for (number, part) in parts.into_iter().enumerate() {
            for mut tensor in part.header.tensors {
                tensor.shard = number;
                match index.entry(tensor.name.clone()) {
                    Entry::Vacant(entry) => entry.insert(tensors.len()),
                    Entry::Occupied(entry) => {
                        let first: &TensorInfo = &tensors[*entry.get()];
                        let first = Some(shards[first.shard].path.clone());
                        let kind = ErrorKind::DuplicateTensor { tensor: label(&tensor.name), first };
                        return Err(Error::new(part.shard.path(), kind));
                    }
                };
                tensors.push(tensor);
            }
            metadata.get_or_insert(part.header.metadata);
            shards.push(part.shard);
        }
        let mut metadata = metadata.unwrap_or_default();
        if shards.len() > 1 {
            split::forget(&mut metadata);
        }
        Ok(Gguf { metadata, tensors, index, shards })
    }

    /// The model's metadata: that of its first shard. Of a split model the `split.*` keys are left out,
    /// since they describe a file and not the model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors of all shards, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&at| &self.tensors[at])
    }

    /// The bytes of a tensor, from the mapping; none if its type is unknown.
    ///
    /// # Panics
    /// If `info` is not one of this model's [`tensors`](Gguf::tensors).
    pub fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let start = info.offset as usize;
        &self.shards[info.shard].bytes()[start..start + info.len as usize]
    }

    /// Takes a tensor's bytes out of this process's memory, after they have been copied: reading them again brings
    /// them back.
    pub fn forget(&self, info: &TensorInfo) {
        self.shards[info.shard].forget(info.offset as usize, info.len as usize);
    }

    /// The files of the model, in the order of their shard numbers.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }
}
