//! Writing a model of any size as a stream.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, label};
use crate::header::{MAX_DEPTH, MAX_HEADER, alignment};
use crate::metadata::Metadata;
use crate::tensor::{TensorType, byte_len};
use crate::value::{Array, Strings, Value};

/// Version of the format that is written.
const VERSION: u32 = 3;
/// Longest tensor name that ggml reads, without its terminating zero.
const MAX_TENSOR_NAME: usize = 63;
/// Bytes gathered before they go to the file; longer pieces go there directly.
const BUFFER: usize = 1 << 20;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Its name, unique in the file and at most 63 bytes long.
    pub name: String,
    /// One to four dimensions, the fastest first, none of them zero.
    pub dims: Vec<u64>,
    /// The type of its weights; a row of `dims[0]` weights must be a whole number of its blocks.
    pub ty: quant::Type,
}

/// Streams a GGUF file (version 3, little-endian) to disk.
///
/// Everything but the tensor data is declared first; then the bytes of each tensor follow in the order of
/// declaration, in pieces of any size. The file appears under its name when [`finish`](Writer::finish)
/// succeeds. Until then it has a temporary name in the same folder and is removed on failure or drop.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    temporary: PathBuf,
    /// None once finished or failed.
    out: Option<BufWriter<File>>,
    alignment: u64,
    /// Name and bytes of each tensor.
    tensors: Vec<(String, u64)>,
    /// The tensor being written, and how many of its bytes are.
    current: usize,
    written: u64,
}

impl Writer {
    /// Checks all declarations, then starts the file and writes all but the tensor data.
    ///
    /// Tensors are aligned to `general.alignment` of the metadata, or 32.
    pub fn create(path: &Path, metadata: &Metadata, tensors: &[TensorDecl]) -> Result<Writer, Error> {
        let refuse = |kind| Error::new(path, kind);
        let alignment = u64::from(alignment(metadata).map_err(refuse)?);
        let lengths = tensor_lengths(tensors).map_err(refuse)?;
        let header = encode_header(metadata, tensors, &lengths, alignment).map_err(refuse)?;

        let temporary = temporary_name(path).map_err(refuse)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = file.map_err(|error| refuse(ErrorKind::Io { action: "create the file", error }))?;
        let names = tensors.iter().map(|tensor| tensor.name.clone());
        let mut writer = Writer {
            path: path.to_owned(),
            temporary,
            out: Some(BufWriter::with_capacity(BUFFER, file)),
            alignment,
            tensors: names.zip(lengths).collect(),
            current: 0,
            written: 0,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Name of the tensor that the next bytes belong to; `None` when all are written.
    pub fn tensor(&self) -> Option<&str> {
        self.tensors.get(self.current).map(|(name, _)| name.as_str())
    }

    /// Writes the next bytes of the current tensor; its last ones make the next tensor current.
    ///
    /// An error if `bytes` runs over the end of the tensor: nothing of it is written then.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let more = bytes.len() as u64;
        if more == 0 {
            return Ok(());
        }
        let Some((name, len)) = self.tensors.get(self.current) else {
            let (tensor, len) = self.tensors.last().cloned().unwrap_or_default();
            return Err(self.refuse(ErrorKind::TooManyBytes { tensor, len, written: len, more }));
        };
        let (len, written) = (*len, self.written);
        if more > len - written {
            return Err(self.refuse(ErrorKind::TooManyBytes { tensor: name.clone(), len, written, more }));
        }
        self.put(bytes)?;
        self.written += more;
        if self.written == len {
            let padding = vec![0; (len.next_multiple_of(self.alignment) - len) as usize];
            self.put(&padding)?;
            self.current += 1;
            self.written = 0;
        }
        Ok(())
    }

    /// Brings the file safely to disk and gives it its name, replacing a file that had it.
    ///
    /// An error if a tensor is incomplete.
    pub fn finish(mut self) -> Result<(), Error> {
        if let Some((tensor, len)) = self.tensors.get(self.current).cloned() {
            return Err(self.refuse(ErrorKind::TooFewBytes { tensor, len, written: self.written }));
        }
        let out = self.open_file()?;
        let stored = out.flush().and_then(|()| out.get_ref().sync_data());
        // Closed before it is renamed, which some systems require.
        self.out = None;
        let renamed = stored.and_then(|()| fs::rename(&self.temporary, &self.path));
        renamed.map_err(|error| self.refuse(ErrorKind::Io { action: "finish the file", error }))?;
        Ok(())
    }

    /// Writes bytes to the file; a failure makes it unusable, since some of them may be there.
    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let result = self.open_file()?.write_all(bytes);
        result.map_err(|error| {
            self.out = None;
            self.refuse(ErrorKind::Io { action: "write to the file", error })
        })
    }

    fn open_file(&mut self) -> Result<&mut BufWriter<File>, Error> {
        let closed = || io::Error::other("an earlier write failed");
        let path = &self.path;
        self.out
            .as_mut()
            .ok_or_else(|| Error::new(path, ErrorKind::Io { action: "go on writing", error: closed() }))
    }

    fn refuse(&self, kind: ErrorKind) -> Error {
        Error::new(&self.path, kind)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(out) = self.out.take() {
            // What is buffered need not be written: the file goes.
            let _ = out.into_parts();
        }
        // After `finish` there is nothing of that name. Else nobody is there to hear of a failure.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// A hidden name beside `path` that no other writer uses.
fn temporary_name(path: &Path) -> Result<PathBuf, ErrorKind> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let refuse = |reason| {
        let error = io::Error::new(io::ErrorKind::InvalidInput, reason);
        Err(ErrorKind::Io { action: "create the file", error })
    };
    let Some(name) = path.file_name() else { return refuse("the path has no file name") };
    // Renaming would replace a device by a file, and fail on a folder after all the work.
    if fs::metadata(path).is_ok_and(|existing| !existing.is_file()) {
        return refuse("the path is a folder or a device");
    }
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}-{}.partial", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    Ok(path.with_file_name(hidden))
}

/// Bytes of each tensor, all names and shapes checked.
fn tensor_lengths(tensors: &[TensorDecl]) -> Result<Vec<u64>, ErrorKind> {
    let mut names = std::collections::HashSet::new();
    let mut lengths = Vec::with_capacity(tensors.len());
    for (index, TensorDecl { name, dims, ty }) in tensors.iter().enumerate() {
        if name.is_empty() {
            return Err(ErrorKind::EmptyTensorName { index: index as u64 });
        }
        if name.len() > MAX_TENSOR_NAME {
            return Err(ErrorKind::LongTensorName { tensor: label(name), limit: MAX_TENSOR_NAME });
        }
        if !names.insert(name) {
            return Err(ErrorKind::DuplicateTensor { tensor: name.clone(), first: None });
        }
        lengths.push(byte_len(name, dims, TensorType::Known(*ty))?);
    }
    Ok(lengths)
}

/// Head, metadata and tensor directory, padded to the start of the data section.
fn encode_header(
    metadata: &Metadata,
    tensors: &[TensorDecl],
    lengths: &[u64],
    alignment: u64,
) -> Result<Vec<u8>, ErrorKind> {
    let mut out = b"GGUF".to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (index, (key, value)) in metadata.iter().enumerate() {
        if key.is_empty() {
            return Err(ErrorKind::EmptyKey { index: index as u64 });
        }
        put_string(&mut out, key);
        put_value(&mut out, key, value)?;
    }
    let mut offset = 0u64;
    for (tensor, &len) in tensors.iter().zip(lengths) {
        put_string(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        put_numbers(&mut out, &tensor.dims, u64::to_le_bytes);
        out.extend(tensor.ty.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        // A length is below 2^63, so this is exact as long as the sum is.
        offset = offset
            .checked_add(len.next_multiple_of(alignment))
            .filter(|&offset| offset <= i64::MAX as u64)
            .ok_or_else(|| ErrorKind::Overflow { tensor: tensor.name.clone(), dims: tensor.dims.clone() })?;
    }
    if out.len() > MAX_HEADER {
        let what = "the end of the tensor list".to_owned();
        return Err(ErrorKind::HeaderTooLarge { what, offset: out.len() as u64, limit: MAX_HEADER as u64 });
    }
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    Ok(out)
}

fn put_string(out: &mut Vec<u8>, string: &str) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string.as_bytes());
}

fn put_numbers<T: Copy, const N: usize>(out: &mut Vec<u8>, numbers: &[T], encode: fn(T) -> [u8; N]) {
    out.reserve(numbers.len() * N);
    for &number in numbers {
        out.extend(encode(number));
    }
}

fn put_value(out: &mut Vec<u8>, key: &str, value: &Value) -> Result<(), ErrorKind> {
    out.extend(value.type_id().to_le_bytes());
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::String(v) => put_string(out, v),
        Value::Array(v) => put_array(out, key, v, MAX_DEPTH)?,
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
    Ok(())
}

fn put_array(out: &mut Vec<u8>, key: &str, array: &Array, depth: usize) -> Result<(), ErrorKind> {
    if depth == 0 {
        return Err(ErrorKind::Depth { what: format!("metadata key `{key}`"), limit: MAX_DEPTH });
    }
    out.extend(array.type_id().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => put_numbers(out, v, i8::to_le_bytes),
        Array::U16(v) => put_numbers(out, v, u16::to_le_bytes),
        Array::I16(v) => put_numbers(out, v, i16::to_le_bytes),
        Array::U32(v) => put_numbers(out, v, u32::to_le_bytes),
        Array::I32(v) => put_numbers(out, v, i32::to_le_bytes),
        Array::F32(v) => put_numbers(out, v, f32::to_le_bytes),
        Array::Bool(v) => put_numbers(out, v, |v| [u8::from(v)]),
        Array::String(v) => put_strings(out, v),
        Array::Nested(v) => {
            for inner in v {
                put_array(out, key, inner, depth - 1)?;
            }
        }
        Array::U64(v) => put_numbers(out, v, u64::to_le_bytes),
        Array::I64(v) => put_numbers(out, v, i64::to_le_bytes),
        Array::F64(v) => put_numbers(out, v, f64::to_le_bytes),
    }
    Ok(())
}

fn put_strings(out: &mut Vec<u8>, strings: &Strings) {
    for string in strings.iter() {
        put_string(out, string);
    }
}
