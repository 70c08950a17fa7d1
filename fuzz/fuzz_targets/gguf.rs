//! Any bytes as a GGUF file: refused with an error, or accepted and then safe to read.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/gguf/tests/common/check.rs"]
mod check;

fuzz_target!(|bytes: &[u8]| {
    check::parse_and_check(bytes);
});
