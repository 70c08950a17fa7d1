//! Any bytes as an `.npy` file: refused with an error, or as many rows as its header says.

#![no_main]

use std::sync::LazyLock;

use engine::npy::Reader;
use libfuzzer_sys::fuzz_target;

/// The reader wants a file: one for each process.
static PATH: LazyLock<std::path::PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("redlite-fuzz-{}.npy", std::process::id())));

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(&*PATH, bytes).expect("room for a small file");
    if let Ok(mut reader) = Reader::open(&PATH) {
        assert!(reader.rows().checked_mul(reader.cols()).is_some_and(|n| n <= bytes.len()));
        let mut row = vec![0.0; reader.cols()];
        if reader.cols() > 0 {
            (0..reader.rows()).for_each(|_| reader.row(&mut row).expect("a row that the header promised"));
            assert!(reader.row(&mut row).is_err(), "the end");
        }
    }
    let _ = std::fs::remove_file(&*PATH);
});
