//! Files that appear whole or not at all, and the .npy format.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A path next to the destination that becomes the destination on `keep` and
/// vanishes when dropped without it.
pub struct Partial {
    temporary: PathBuf,
    destination: PathBuf,
}

impl Partial {
    /// Reserves the temporary name; creates nothing yet.
    pub fn new(destination: &Path) -> Partial {
        let mut name = destination.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".partial-{}", std::process::id()));
        Partial { temporary: destination.with_file_name(name), destination: destination.to_path_buf() }
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the finished file its name.
    pub fn keep(self) -> Result<(), Error> {
        fs::rename(&self.temporary, &self.destination)
            .map_err(|source| Error::Write { path: self.destination.clone(), source })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `keep` there is nothing left under this name.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Writes a two-dimensional little-endian f32 array in .npy format (version 1.0,
/// C order), row by row.
pub struct Npy {
    partial: Partial,
    out: BufWriter<File>,
    columns: usize,
    rows_left: usize,
}

impl Npy {
    /// Starts a file of shape `[rows, columns]`.
    pub fn create(path: &Path, rows: usize, columns: usize) -> Result<Npy, Error> {
        let partial = Partial::new(path);
        let start = || {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(partial.path())?);
            out.write_all(&header(rows, columns))?;
            Ok(out)
        };
        let out = start().map_err(|source| Error::Write { path: path.to_path_buf(), source })?;
        Ok(Npy { partial, out, columns, rows_left: rows })
    }

    /// Appends one row. Panics when its length is not the declared one or all
    /// declared rows are there: both are mistakes of the caller.
    pub fn row(&mut self, values: &[f32]) -> Result<(), Error> {
        assert_eq!(values.len(), self.columns, "row length");
        self.rows_left = self.rows_left.checked_sub(1).expect("a row more than declared");
        let write = |out: &mut BufWriter<File>| -> io::Result<()> {
            values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
        };
        write(&mut self.out).map_err(|source| Error::Write { path: self.partial.destination.clone(), source })
    }

    /// Completes the file. Panics when rows are missing.
    pub fn finish(mut self) -> Result<(), Error> {
        assert_eq!(self.rows_left, 0, "rows missing");
        self.out.flush().map_err(|source| Error::Write { path: self.partial.destination.clone(), source })?;
        self.partial.keep()
    }
}

/// Magic, version, header length and dictionary, padded to a multiple of 64 bytes.
fn header(rows: usize, columns: usize) -> Vec<u8> {
    let mut dictionary =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let prefix = 10;
    while (prefix + dictionary.len() + 1) % 64 != 0 {
        dictionary.push(' ');
    }
    dictionary.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((dictionary.len() as u16).to_le_bytes());
    bytes.extend(dictionary.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("redlite-oracle-{}-{name}", std::process::id()))
    }

    #[test]
    fn header_is_the_one_numpy_writes() {
        let bytes = header(700, 4096);
        assert_eq!(&bytes[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(bytes.len() % 64, 0);
        let text = std::str::from_utf8(&bytes[10..]).unwrap();
        assert_eq!(text.trim_end(), "{'descr': '<f4', 'fortran_order': False, 'shape': (700, 4096), }");
        assert!(text.ends_with(" \n"));
    }

    #[test]
    fn rows_follow_the_header_and_the_name_comes_last() {
        let path = scratch("rows.npy");
        let mut npy = Npy::create(&path, 2, 3).unwrap();
        npy.row(&[1.0, -2.5, 0.0]).unwrap();
        assert!(!path.exists());
        npy.row(&[f32::MIN_POSITIVE, 4.0, 5.0]).unwrap();
        npy.finish().unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let values: Vec<f32> =
            bytes[128..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, -2.5, 0.0, f32::MIN_POSITIVE, 4.0, 5.0]);
    }

    #[test]
    fn an_abandoned_file_leaves_nothing() {
        let path = scratch("abandoned.npy");
        let npy = Npy::create(&path, 2, 3).unwrap();
        let temporary = npy.partial.path().to_path_buf();
        assert!(temporary.exists());
        drop(npy);
        assert!(!temporary.exists() && !path.exists());
    }
}
