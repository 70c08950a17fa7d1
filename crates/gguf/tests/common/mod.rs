//! GGUF files made byte by byte, without the crate's writer.

#![allow(dead_code)] // each test program uses a part

use std::fs;
use std::path::{Path, PathBuf};

pub mod check;

/// Type ids of metadata values in the format.
pub mod id {
    pub const U8: u32 = 0;
    pub const U16: u32 = 2;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
}

/// A file in the making. Counts and alignment may lie.
#[derive(Clone)]
pub struct Raw {
    pub version: u32,
    pub alignment: usize,
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
    pub entry_count: Option<u64>,
    pub tensor_count: Option<u64>,
}

impl Raw {
    /// No metadata, no tensors.
    pub fn empty() -> Raw {
        Raw {
            version: 3,
            alignment: 32,
            entries: vec![],
            tensors: vec![],
            data: vec![],
            entry_count: None,
            tensor_count: None,
        }
    }

    /// A small valid file: a string, a vocabulary of three, tensors `a` (F32, 4 × 2) and `b` (Q8_0, 32).
    pub fn small() -> Raw {
        let tokens = [array(id::STRING, 3), string("a"), string("bc"), string("Ġd")].concat();
        Raw::empty()
            .entry("general.name", id::STRING, &string("tiny"))
            .entry("tokens", id::ARRAY, &tokens)
            .tensor("a", &[4, 2], 0, 0)
            .tensor("b", &[32], 8, 32)
            .data(66)
    }

    pub fn entry(mut self, key: &str, ty: u32, value: &[u8]) -> Raw {
        self.entries.push([string(key), ty.to_le_bytes().to_vec(), value.to_vec()].concat());
        self
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Raw {
        let mut line = string(name);
        line.extend((dims.len() as u32).to_le_bytes());
        line.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        line.extend(ty.to_le_bytes());
        line.extend(offset.to_le_bytes());
        self.tensors.push(line);
        self
    }

    /// A data section of so many bytes: 0, 1, 2, ….
    pub fn data(mut self, len: usize) -> Raw {
        self.data = (0..len).map(|i| i as u8).collect();
        self
    }

    /// All before the data, unpadded.
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        out.extend(self.entries.concat());
        out.extend(self.tensors.concat());
        out
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        if !self.data.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out.extend(&self.data);
        out
    }
}

/// A string of the format: length and bytes.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The head of an array: element type and count.
pub fn array(ty: u32, count: u64) -> Vec<u8> {
    [ty.to_le_bytes().as_slice(), &count.to_le_bytes()].concat()
}

/// A fresh folder for one test, removed with the value.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("redlite-gguf-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and returns its path.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.join(name), bytes).unwrap();
        self.join(name)
    }

    /// The names of the files in it, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A folder beside the tests: `corpus`, `fixtures`.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}
