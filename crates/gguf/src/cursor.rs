//! Reading little-endian fields from a slice, every length checked before it is used.

use std::fmt;

use crate::error::{ErrorKind, label};

/// What is being read, for the error message; formatted only when there is one.
#[derive(Clone, Copy)]
pub(crate) enum What<'a> {
    /// A field of the file's head.
    Head(&'static str),
    /// The key of the n-th metadata entry.
    Key(u64),
    /// Something of the value of a key.
    Value(&'a str),
    /// The n-th element of the array of a key.
    Element(&'a str, u64),
    /// The name of the n-th tensor.
    Name(u64),
    /// A field of a tensor.
    Tensor(&'a str, &'static str),
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Head(field) => write!(f, "the {field}"),
            What::Key(index) => write!(f, "the key of metadata entry {index}"),
            What::Value(key) => write!(f, "metadata key `{}`", label(key)),
            What::Element(key, index) => write!(f, "element {index} of metadata key `{}`", label(key)),
            What::Name(index) => write!(f, "the name of tensor {index}"),
            What::Tensor(name, field) => write!(f, "the {field} of tensor `{}`", label(name)),
        }
    }
}

/// A position in the head of a file.
pub(crate) struct Cursor<'a> {
    /// The file, or as much of it as a header may occupy.
    bytes: &'a [u8],
    at: usize,
    file_len: u64,
}

impl<'a> Cursor<'a> {
    /// At the start of a file, of which only the first `limit` bytes may be read.
    pub fn new(file: &'a [u8], limit: usize) -> Cursor<'a> {
        Cursor { bytes: &file[..file.len().min(limit)], at: 0, file_len: file.len() as u64 }
    }

    /// Bytes from the start of the file.
    pub fn position(&self) -> u64 {
        self.at as u64
    }

    fn left(&self) -> u64 {
        self.file_len - self.position()
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: u64, what: What) -> Result<&'a [u8], ErrorKind> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(len).ok().and_then(|len| rest.get(..len)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None if len <= self.left() => Err(ErrorKind::HeaderTooLarge {
                what: what.to_string(),
                offset: self.position(),
                limit: self.bytes.len() as u64,
            }),
            None => Err(ErrorKind::Truncated {
                what: what.to_string(),
                offset: self.position(),
                need: len,
                left: self.left(),
            }),
        }
    }

    /// The next `N` bytes as an array, for `from_le_bytes`.
    pub fn array<const N: usize>(&mut self, what: What) -> Result<[u8; N], ErrorKind> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    /// The next four bytes as an integer.
    pub fn u32(&mut self, what: What) -> Result<u32, ErrorKind> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// The next eight bytes as an integer.
    pub fn u64(&mut self, what: What) -> Result<u64, ErrorKind> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: its length, then its bytes.
    pub fn string(&mut self, what: What) -> Result<&'a str, ErrorKind> {
        let len = self.u64(what)?;
        let offset = self.position();
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|error| ErrorKind::Utf8 {
            what: what.to_string(),
            offset,
            at: error.valid_up_to(),
        })
    }

    /// A bool: one byte, 0 or 1.
    pub fn bool(&mut self, what: What) -> Result<bool, ErrorKind> {
        match self.array(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(ErrorKind::Bool { what: what.to_string(), byte }),
        }
    }

    /// Refuses a count of things of at least `each` bytes that the rest of the file cannot hold.
    pub fn check_count(&self, count: u64, each: u64, what: What) -> Result<(), ErrorKind> {
        if count <= self.left() / each {
            return Ok(());
        }
        Err(ErrorKind::Count { what: what.to_string(), count, each, left: self.left() })
    }
}
