//! Parsing one file: head, metadata, tensor directory.

use std::collections::HashSet;
use std::path::Path;

use crate::cursor::{Cursor, What};
use crate::error::{Error, ErrorKind, label};
use crate::metadata::Metadata;
use crate::tensor::{TensorInfo, TensorType, byte_len};
use crate::value::{Array, Strings, Value};

/// Alignment of tensors in a file that does not say.
pub const ALIGNMENT: u32 = 32;
/// The largest alignment accepted: eight times the largest page anybody maps files with.
pub const MAX_ALIGNMENT: u32 = 16 << 20;
/// How deep arrays may nest. No known file needs more than two.
pub const MAX_DEPTH: usize = 8;
/// Where metadata and tensor directory must end: some twenty times the largest vocabulary in use. It
/// bounds the memory that a hostile file of terabytes (sparse, so cheap to make) can ask for.
pub const MAX_HEADER: usize = 256 << 20;

/// Least bytes of an entry: key length, type, value of one byte. (An empty key has its own message.)
const LEAST_ENTRY: u64 = 8 + 4 + 1;
/// Least bytes of a tensor: name length, dimension count, one dimension, type, offset.
const LEAST_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;
/// Least bytes of an array within an array: element type, length.
const LEAST_ARRAY: u64 = 4 + 8;

/// Everything before the tensor data of one file.
#[derive(Debug)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// What tensor offsets are multiples of, in bytes.
    pub alignment: u32,
    /// The key-value pairs.
    pub metadata: Metadata,
    /// The tensors in the order of the directory; `shard` is 0.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Parses `file`, the bytes of a whole file; errors call it `path`.
    ///
    /// Every tensor returned lies inside `file`, and no two share bytes.
    pub fn parse(file: &[u8], path: &Path) -> Result<Header, Error> {
        parse(file, path).map_err(|kind| Error::new(path, kind))
    }
}

fn parse(file: &[u8], path: &Path) -> Result<Header, ErrorKind> {
    let mut cursor = Cursor::new(file, MAX_HEADER);
    let version = read_version(&mut cursor)?;
    let tensor_count = cursor.u64(What::Head("tensor count"))?;
    let entry_count = cursor.u64(What::Head("metadata count"))?;
    cursor.check_count(tensor_count, LEAST_TENSOR, What::Head("tensor count"))?;
    cursor.check_count(entry_count, LEAST_ENTRY, What::Head("metadata count"))?;

    let mut metadata = Metadata::of_file(path);
    for index in 0..entry_count {
        let key = cursor.string(What::Key(index))?;
        if key.is_empty() {
            return Err(ErrorKind::EmptyKey { index });
        }
        if metadata.contains(key) {
            return Err(ErrorKind::DuplicateKey { key: label(key) });
        }
        let value = read_value(&mut cursor, key)?;
        metadata.set(key, value);
    }
    let alignment = alignment(&metadata)?;

    cursor.check_count(tensor_count, LEAST_TENSOR, What::Head("tensor count"))?;
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for index in 0..tensor_count {
        let name = cursor.string(What::Name(index))?;
        if name.is_empty() {
            return Err(ErrorKind::EmptyTensorName { index });
        }
        if !names.insert(name) {
            return Err(ErrorKind::DuplicateTensor { tensor: label(name), first: None });
        }
        tensors.push(read_tensor(&mut cursor, name)?);
    }
    place(&mut tensors, cursor.position(), alignment, file.len() as u64)?;
    Ok(Header { version, alignment, metadata, tensors })
}

fn read_version(cursor: &mut Cursor) -> Result<u32, ErrorKind> {
    let magic = cursor.array(What::Head("magic number"))?;
    if magic != *b"GGUF" {
        return Err(ErrorKind::Magic { found: magic });
    }
    match cursor.u32(What::Head("version"))? {
        version @ (2 | 3) => Ok(version),
        // A small number written by the other byte order.
        found if found != 0 && found & 0xffff == 0 => Err(ErrorKind::BigEndian),
        found => Err(ErrorKind::Version { found }),
    }
}

fn read_value(cursor: &mut Cursor, key: &str) -> Result<Value, ErrorKind> {
    let what = What::Value(key);
    Ok(match cursor.u32(what)? {
        0 => Value::U8(u8::from_le_bytes(cursor.array(what)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(what)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(what)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(what)?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array(what)?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array(what)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(what)?)),
        7 => Value::Bool(cursor.bool(what)?),
        8 => Value::String(cursor.string(what)?.to_owned()),
        9 => Value::Array(read_array(cursor, key, MAX_DEPTH)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array(what)?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array(what)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(what)?)),
        id => return Err(ErrorKind::ValueType { what: what.to_string(), id }),
    })
}

/// An array: element type, count, elements; at most `depth` arrays deep.
fn read_array(cursor: &mut Cursor, key: &str, depth: usize) -> Result<Array, ErrorKind> {
    let what = What::Value(key);
    if depth == 0 {
        return Err(ErrorKind::Depth { what: what.to_string(), limit: MAX_DEPTH });
    }
    let id = cursor.u32(what)?;
    let count = cursor.u64(what)?;
    Ok(match id {
        0 => Array::U8(read_numbers(cursor, count, what, u8::from_le_bytes)?),
        1 => Array::I8(read_numbers(cursor, count, what, i8::from_le_bytes)?),
        2 => Array::U16(read_numbers(cursor, count, what, u16::from_le_bytes)?),
        3 => Array::I16(read_numbers(cursor, count, what, i16::from_le_bytes)?),
        4 => Array::U32(read_numbers(cursor, count, what, u32::from_le_bytes)?),
        5 => Array::I32(read_numbers(cursor, count, what, i32::from_le_bytes)?),
        6 => Array::F32(read_numbers(cursor, count, what, f32::from_le_bytes)?),
        7 => {
            cursor.check_count(count, 1, what)?;
            Array::Bool((0..count).map(|i| cursor.bool(What::Element(key, i))).collect::<Result<_, _>>()?)
        }
        8 => Array::String(read_strings(cursor, count, key)?),
        9 => {
            cursor.check_count(count, LEAST_ARRAY, what)?;
            // Grown, not reserved: an Array is larger in memory than the least it needs in the file.
            let mut arrays = Vec::new();
            for _ in 0..count {
                arrays.push(read_array(cursor, key, depth - 1)?);
            }
            Array::Nested(arrays)
        }
        10 => Array::U64(read_numbers(cursor, count, what, u64::from_le_bytes)?),
        11 => Array::I64(read_numbers(cursor, count, what, i64::from_le_bytes)?),
        12 => Array::F64(read_numbers(cursor, count, what, f64::from_le_bytes)?),
        id => return Err(ErrorKind::ValueType { what: format!("the array of {what}"), id }),
    })
}

fn read_numbers<T, const N: usize>(
    cursor: &mut Cursor,
    count: u64,
    what: What,
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, ErrorKind> {
    cursor.check_count(count, N as u64, what)?;
    let (numbers, _) = cursor.take(count * N as u64, what)?.as_chunks::<N>();
    Ok(numbers.iter().map(|&number| decode(number)).collect())
}

fn read_strings(cursor: &mut Cursor, count: u64, key: &str) -> Result<Strings, ErrorKind> {
    /// Bytes of a string's length.
    const LEAST_STRING: u64 = 8;
    cursor.check_count(count, LEAST_STRING, What::Value(key))?;
    // As many bytes as the lengths alone occupy in the header.
    let room = (count as usize).min(MAX_HEADER / LEAST_STRING as usize);
    let mut strings = Strings::with_capacity(room, 0);
    for index in 0..count {
        strings.push(cursor.string(What::Element(key, index))?);
    }
    Ok(strings)
}

/// The value of `general.alignment`, checked; [`ALIGNMENT`] if there is none.
pub(crate) fn alignment(metadata: &Metadata) -> Result<u32, ErrorKind> {
    match metadata.get("general.alignment") {
        None => Ok(ALIGNMENT),
        Some(&Value::U32(v)) if v.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&v) => Ok(v),
        Some(other) => {
            let found = label(&format!("{other} ({})", other.type_name()));
            Err(ErrorKind::Alignment { found, most: MAX_ALIGNMENT })
        }
    }
}

/// A line of the directory. Its `offset` still counts from the start of the data section.
fn read_tensor(cursor: &mut Cursor, name: &str) -> Result<TensorInfo, ErrorKind> {
    let found = cursor.u32(What::Tensor(name, "dimension count"))?;
    if !(1..=4).contains(&found) {
        return Err(ErrorKind::DimCount { tensor: label(name), found });
    }
    let mut dims = Vec::with_capacity(found as usize);
    for _ in 0..found {
        dims.push(cursor.u64(What::Tensor(name, "dimensions"))?);
    }
    let ty = TensorType::from_id(cursor.u32(What::Tensor(name, "type"))?);
    let offset = cursor.u64(What::Tensor(name, "offset"))?;
    let len = byte_len(name, &dims, ty)?;
    Ok(TensorInfo { name: name.to_owned(), dims, ty, shard: 0, offset, len })
}

/// Turns the offsets of the directory, which ends at `end`, into offsets from the start of a file of
/// `file` bytes, and checks that every tensor lies inside it and none on another.
fn place(tensors: &mut [TensorInfo], end: u64, alignment: u32, file: u64) -> Result<(), ErrorKind> {
    let data = end.next_multiple_of(alignment.into());
    for tensor in tensors.iter_mut() {
        let (name, offset) = (&tensor.name, tensor.offset);
        if !offset.is_multiple_of(alignment.into()) {
            return Err(ErrorKind::Misaligned { tensor: label(name), offset, alignment });
        }
        // In 128 bits nothing wraps.
        let start = u128::from(data) + u128::from(offset);
        let end = start + u128::from(tensor.len);
        if end > file.into() {
            return Err(ErrorKind::BeyondEnd { tensor: label(name), start, end, file });
        }
        tensor.offset += data;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| (tensor.offset, tensor.len));
    for pair in order.windows(2) {
        // Tensors of unknown length count as empty.
        if pair[0].offset + pair[0].len > pair[1].offset {
            return Err(ErrorKind::Overlap { first: label(&pair[0].name), second: label(&pair[1].name) });
        }
    }
    Ok(())
}
