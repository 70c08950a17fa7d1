//! Refuses to build llama.cpp slower than its users have it: `.cargo/config.toml`
//! asks for native code and full optimisation, and this checks that it was heard.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LLAMA_LIB_PROFILE");
    let rustflags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    if !rustflags.split('\x1f').any(|flag| flag.ends_with("target-cpu=native")) {
        println!(
            "cargo::error=no `-C target-cpu=native` in RUSTFLAGS, so llama.cpp would be compiled for a generic \
             CPU: run cargo inside oracle/ with RUSTFLAGS unset, or add the flag to RUSTFLAGS"
        );
    }
    let profile = env::var("LLAMA_LIB_PROFILE").unwrap_or_default();
    if profile != "Release" {
        println!(
            "cargo::error=LLAMA_LIB_PROFILE is {profile:?}, not \"Release\", so llama.cpp might be compiled with \
             -O2: run cargo inside oracle/, or set the variable"
        );
    }
}
