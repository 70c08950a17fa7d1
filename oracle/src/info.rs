//! `info`: what exactly is being compared with.

use std::io::{self, Write};

use crate::error::Error;
use crate::{cpu, llama};

/// Version of the llama-cpp-sys-2 crate, whose sources contain llama.cpp.
pub const CRATE_VERSION: &str = "0.1.161";

/// One line naming the library.
pub fn library() -> String {
    let (llama, ggml, commit) = llama::versions();
    format!("llama.cpp {llama} (ggml {ggml}, commit {commit}, llama-cpp-sys-2 {CRATE_VERSION})")
}

/// Print llama.cpp's system information and how it was built.
pub fn run() -> Result<(), Error> {
    let system = llama::system_info();
    let unused = cpu::unused(&system);
    let threads = if cpu::reports(&system, "OPENMP") { "OpenMP" } else { "llama.cpp's own thread pool" };
    let verdict = if unused.is_empty() {
        "everything llama.cpp has for this CPU is compiled in".to_string()
    } else {
        format!("NOT USED although this CPU has it: {}", unused.join(", "))
    };
    write!(
        io::stdout().lock(),
        "library      {}\nbuild        native CPU, {}\nthreads      {threads}\nsystem info  {system}\ncheck        {verdict}\n",
        library(),
        env!("LLAMA_LIB_PROFILE"),
    )
    .map_err(Error::Stdout)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_stated_crate_version_is_the_pinned_one() {
        let pinned = format!("llama-cpp-sys-2 = {{ version = \"={}\"", super::CRATE_VERSION);
        assert!(include_str!("../Cargo.toml").contains(&pinned));
    }
}
