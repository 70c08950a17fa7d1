//! The `redlite` binary.
fn main() {}
