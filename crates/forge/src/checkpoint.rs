//! Reading safetensors checkpoints: one file or shards, by position, without mapping or loading them.
//!
//! A file is the length of its header (8 bytes, little-endian), the header (a JSON object from tensor name to
//! element type, shape and byte range), and the data.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::Value;

use crate::error::Error;

/// Headers are a few MB even for tens of thousands of tensors; more is a damaged length.
const MAX_HEADER: u64 = 256 << 20;

/// An element type this crate converts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dtype {
    Bf16,
    F16,
    F32,
}

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// A tensor of the checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    /// Slowest dimension first, as stored.
    pub(crate) shape: Vec<u64>,
    /// `None` for a type we cannot convert, kept so that it is refused only if somebody needs the tensor.
    dtype: Option<Dtype>,
    /// The type as the file calls it.
    dtype_name: String,
    shard: usize,
    /// Absolute position of the data.
    offset: u64,
}

/// All tensors of a checkpoint directory.
pub(crate) struct Checkpoint {
    shards: Vec<(PathBuf, File)>,
    tensors: HashMap<String, Stored>,
}

impl Checkpoint {
    /// Opens the weights in `dir`: the shards that `model.safetensors.index.json` names, or else
    /// `model.safetensors`.
    pub(crate) fn open(dir: &Path) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint { shards: Vec::new(), tensors: HashMap::new() };
        for path in shard_paths(dir)? {
            checkpoint.add_shard(path)?;
        }
        Ok(checkpoint)
    }

    /// Every tensor, in no particular order.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Stored> {
        self.tensors.values()
    }

    /// The tensor called `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// Refuses a tensor whose elements cannot be converted.
    pub(crate) fn check_dtype(&self, tensor: &Stored) -> Result<(), Error> {
        match tensor.dtype {
            Some(_) => Ok(()),
            None => Err(Error::Dtype { name: tensor.name.clone(), dtype: tensor.dtype_name.clone() }),
        }
    }

    /// Reads `out.len()` elements of a tensor, from element `first` on, as f32.
    pub(crate) fn read(&self, tensor: &Stored, first: u64, out: &mut [f32]) -> Result<(), Error> {
        let dtype = tensor
            .dtype
            .ok_or_else(|| Error::Dtype { name: tensor.name.clone(), dtype: tensor.dtype_name.clone() })?;
        let (path, file) = &self.shards[tensor.shard];
        let mut bytes = vec![0; out.len() * dtype.bytes() as usize];
        read_at(file, &mut bytes, tensor.offset + first * dtype.bytes())
            .map_err(|source| Error::Read { path: path.clone(), source })?;
        match dtype {
            Dtype::F32 => widen(&bytes, out, f32::from_le_bytes),
            Dtype::Bf16 => widen(&bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => widen(&bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        }
        Ok(())
    }

    fn add_shard(&mut self, path: PathBuf) -> Result<(), Error> {
        let failed = |source| Error::Read { path: path.clone(), source };
        let broken = |what: String| Error::Safetensors { path: path.clone(), what };
        let file = File::open(&path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();

        let mut head = [0; 8];
        read_at(&file, &mut head, 0).map_err(failed)?;
        let header_len = u64::from_le_bytes(head);
        if header_len > MAX_HEADER || header_len > len.saturating_sub(8) {
            return Err(broken(format!("its header claims {header_len} bytes of {len}")));
        }
        let mut header = vec![0; header_len as usize];
        read_at(&file, &mut header, 8).map_err(failed)?;
        let header: serde_json::Map<String, Value> =
            serde_json::from_slice(&header).map_err(|source| Error::Json { path: path.clone(), source })?;

        let data = 8 + header_len;
        for (name, entry) in header {
            if name == "__metadata__" {
                continue;
            }
            let stored = parse_entry(&name, &entry, self.shards.len(), data, len)
                .map_err(|what| broken(format!("tensor {name}: {what}")))?;
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(broken(format!("tensor {name} is in another shard too")));
            }
        }
        self.shards.push((path, file));
        Ok(())
    }
}

/// One entry of a header; `data` is where the data starts and `len` where the file ends.
fn parse_entry(name: &str, entry: &Value, shard: usize, data: u64, len: u64) -> Result<Stored, String> {
    let numbers =
        |key: &str| -> Option<Vec<u64>> { entry.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let dtype_name = entry.get("dtype").and_then(Value::as_str).ok_or("no element type")?;
    let shape = numbers("shape").ok_or("no shape")?;
    let offsets = numbers("data_offsets").ok_or("no byte range")?;
    let &[begin, end] = offsets.as_slice() else { return Err("its byte range is not a pair".into()) };
    if begin > end || end > len - data {
        return Err(format!("bytes {begin}..{end} lie outside the file"));
    }
    let dtype = match dtype_name {
        "BF16" => Some(Dtype::Bf16),
        "F16" => Some(Dtype::F16),
        "F32" => Some(Dtype::F32),
        _ => None,
    };
    if let Some(dtype) = dtype {
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        if bytes != Some(end - begin) {
            return Err(format!("shape {shape:?} of {dtype_name} does not fill its {} bytes", end - begin));
        }
    }
    Ok(Stored {
        name: name.to_owned(),
        shape,
        dtype,
        dtype_name: dtype_name.to_owned(),
        shard,
        offset: data + begin,
    })
}

/// The weight files of a checkpoint directory, each once, in ascending order.
fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() {
        let single = dir.join("model.safetensors");
        return if single.exists() { Ok(vec![single]) } else { Err(Error::NoWeights(dir.to_owned())) };
    }
    let value = read_json(&index)?;
    let broken = |what: &str| Error::Safetensors { path: index.clone(), what: what.to_owned() };
    let map =
        value.get("weight_map").and_then(Value::as_object).ok_or_else(|| broken("it has no weight_map"))?;
    let mut names = Vec::new();
    for name in map.values() {
        let name = name.as_str().ok_or_else(|| broken("its weight_map holds something other than names"))?;
        // A name, not a path: an index must not reach outside its directory.
        if Path::new(name).file_name().is_none_or(|file| file != name) {
            return Err(broken(&format!("its weight_map points to {name:?}, outside the directory")));
        }
        names.push(name);
    }
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Parses a JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Value, Error> {
    let bytes = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.to_owned(), source })
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, &element) in out.iter_mut().zip(elements) {
        *out = convert(element);
    }
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, out, offset)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out = &mut out[read..];
        offset += read as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(header: &str, data: usize) -> Result<Checkpoint, Error> {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        Checkpoint::open(dir.path())
    }

    #[test]
    fn broken_headers_are_refused_by_name() {
        let good = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
        assert!(open(good, 24).is_ok());
        let cases = [
            (good, 23, "outside the file"),
            (r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[8,4]}}"#, 24, "outside the file"),
            (r#"{"a":{"dtype":"F32","shape":[2,4],"data_offsets":[0,24]}}"#, 24, "does not fill"),
            (
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,24]}}"#,
                24,
                "does not fill",
            ),
            (r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,24]}}"#, 24, "no shape"),
            (r#"{"a":{"shape":[6],"data_offsets":[0,24]}}"#, 24, "no element type"),
            (r#"{"a":{"dtype":"F32","shape":[6],"data_offsets":[0]}}"#, 24, "not a pair"),
            (r#"{"a":3}"#, 24, "tensor a"),
            ("[", 24, "not valid JSON"),
        ];
        for (header, data, expected) in cases {
            let error = open(header, data).err().expect(header).to_string();
            assert!(error.contains(expected), "{header}: {error}");
        }
    }

    #[test]
    fn a_header_longer_than_the_file_is_not_allocated() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), u64::MAX.to_le_bytes()).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains("claims 18446744073709551615 bytes"), "{error}");
    }

    #[test]
    fn an_index_cannot_leave_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let index = r#"{"weight_map":{"a":"../model.safetensors"}}"#;
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains("outside the directory"), "{error}");
    }
}
