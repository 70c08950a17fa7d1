//! Matrices of f32 as `.npy` files (NumPy format 1.0), written and read row by row.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Why a `.npy` file could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Not a file of ours.
    #[error("{}: {what}; expected a two-dimensional little-endian f32 array in C order", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// Writes a matrix whose size is known before its numbers. The file appears under its name when it is complete;
/// until then, and if it never is, what had that name stays.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    cols: usize,
    rows_left: usize,
}

impl Writer {
    /// Creates `path` for a matrix of `rows` × `cols`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path, rows: usize, cols: usize) -> Result<Writer, Error> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        if std::fs::metadata(path).is_ok_and(|existing| !existing.is_file()) || path.file_name().is_none() {
            let what = "not a place for a file".to_string();
            return Err(Error::Format { path: path.to_path_buf(), what });
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let file = BufWriter::new(File::create(&temporary).map_err(io)?);
        let mut writer = Writer { path: path.to_path_buf(), temporary, file, cols, rows_left: rows };
        let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
        // Magic, version and length take 10 bytes; data begin at a multiple of 64.
        let padded = (10 + header.len() + 1).next_multiple_of(64) - 10;
        header = format!("{header:<width$}\n", width = padded - 1);
        let length = (header.len() as u16).to_le_bytes();
        for part in [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes()] {
            writer.file.write_all(part).map_err(io)?;
        }
        Ok(writer)
    }

    /// Writes the next row.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a row too many or of another length.
    pub fn row(&mut self, row: &[f32]) -> Result<(), Error> {
        if row.len() != self.cols || self.rows_left == 0 {
            let what = format!("a row of {} numbers does not fit", row.len());
            return Err(Error::Format { path: self.path.clone(), what });
        }
        self.rows_left -= 1;
        for x in row {
            self.file.write_all(&x.to_le_bytes()).map_err(|source| self.io(source))?;
        }
        Ok(())
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if rows are missing.
    pub fn finish(mut self) -> Result<(), Error> {
        if self.rows_left > 0 {
            let what = format!("{} rows are missing", self.rows_left);
            return Err(Error::Format { path: self.path.clone(), what });
        }
        let stored = self.file.flush().and_then(|()| std::fs::rename(&self.temporary, &self.path));
        stored.map_err(|source| self.io(source))
    }

    fn io(&self, source: io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Gone already if the file was finished.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// Reads a matrix row by row.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    rows: usize,
    cols: usize,
}

impl Reader {
    /// Opens `path` and checks that its size is what its header says.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Format`].
    pub fn open(path: &Path) -> Result<Reader, Error> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let bad = |what: &str| Error::Format { path: path.to_path_buf(), what: what.to_string() };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut file = BufReader::new(file);
        let mut start = [0; 10];
        file.read_exact(&mut start).map_err(io)?;
        if &start[..8] != b"\x93NUMPY\x01\x00" {
            return Err(bad("not an .npy file of version 1.0"));
        }
        let mut header = vec![0; usize::from(u16::from_le_bytes([start[8], start[9]]))];
        file.read_exact(&mut header).map_err(io)?;
        let header = String::from_utf8(header).map_err(|_| bad("its header is not text"))?;
        let (rows, cols) = shape(&header)
            .ok_or_else(|| bad(&format!("its header is `{}`", header.trim().escape_default())))?;
        if rows == 0 || cols == 0 {
            // Nothing to read; and columns without rows would be believed without a byte behind them.
            return Err(bad("an empty matrix"));
        }
        let data = rows.checked_mul(cols).and_then(|n| n.checked_mul(4));
        if data.and_then(|n| n.checked_add(10 + header.len())).map(|n| n as u64) != Some(size) {
            return Err(bad(&format!("{size} bytes do not hold {rows} × {cols} numbers")));
        }
        Ok(Reader { path: path.to_path_buf(), file, rows, cols })
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Reads the next row into `row`, columns numbers.
    ///
    /// # Errors
    /// [`Error::Io`], also at the end.
    pub fn row(&mut self, row: &mut [f32]) -> Result<(), Error> {
        for x in row {
            let mut bytes = [0; 4];
            let read = self.file.read_exact(&mut bytes);
            read.map_err(|source| Error::Io { path: self.path.clone(), source })?;
            *x = f32::from_le_bytes(bytes);
        }
        Ok(())
    }
}

/// Rows and columns from a header, if it describes a matrix of f32 in C order.
fn shape(header: &str) -> Option<(usize, usize)> {
    if !header.contains("'<f4'") || !header.contains("'fortran_order': False") {
        return None;
    }
    let inner = header.split_once("'shape': (")?.1.split_once(')')?.0;
    let dims: Vec<usize> = inner
        .split(',')
        .map(str::trim)
        .filter(|d| !d.is_empty())
        .map(|d| d.parse().ok())
        .collect::<Option<_>>()?;
    let [rows, cols] = dims[..] else { return None };
    Some((rows, cols))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("redlite-npy-{}-{name}", std::process::id()))
    }

    #[test]
    fn rows_come_back() {
        let path = path("rows.npy");
        std::fs::write(&path, "an earlier file").unwrap();
        let unfinished = Writer::create(&path, 2, 3).unwrap();
        drop(unfinished);
        let mut writer = Writer::create(&path, 2, 3).unwrap();
        writer.row(&[1.0, -2.5, f32::MIN_POSITIVE]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"an earlier file", "until the new one is complete");
        assert!(writer.row(&[1.0]).is_err());
        writer.row(&[4.0, 5.0, 6.0]).unwrap();
        assert!(writer.row(&[4.0, 5.0, 6.0]).is_err());
        writer.finish().unwrap();
        let mut reader = Reader::open(&path).unwrap();
        assert_eq!((reader.rows(), reader.cols()), (2, 3));
        let mut row = [0.0; 3];
        reader.row(&mut row).unwrap();
        assert_eq!(row, [1.0, -2.5, f32::MIN_POSITIVE]);
        reader.row(&mut row).unwrap();
        assert!(reader.row(&mut row).is_err(), "the end");
        // The header as NumPy writes it: data at a multiple of 64.
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes.len() - 24) % 64, 0);
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(Reader::open(&path).unwrap_err().to_string().contains("do not hold 2 × 3"));
        // A byte that is not text must not shift where the data starts.
        let mut broken = bytes.clone();
        broken[11] = 0xff;
        std::fs::write(&path, &broken).unwrap();
        assert!(Reader::open(&path).unwrap_err().to_string().contains("not text"));
        std::fs::write(&path, b"\x93NUMPY\x01\x00\xff\xff").unwrap();
        assert!(Reader::open(&path).is_err());
        Writer::create(&path, 0, 1 << 40).unwrap().finish().unwrap();
        assert!(Reader::open(&path).unwrap_err().to_string().contains("an empty matrix"));
        std::fs::remove_file(&path).unwrap();
    }
}
