//! Chores of the repository.
//!
//! ```text
//! cargo run --release -p xtask -- kernels FOLDER [SOURCE …]      compiles every CUDA kernel, for those who have a driver only;
//!                                                                or those of sources whose names begin so
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [task, folder, names @ ..] if task == "kernels" => kernels(folder.as_ref(), names),
        _ => {
            eprintln!("usage: xtask kernels FOLDER [SOURCE …]");
            ExitCode::from(2)
        }
    }
}

/// Compiles every kernel that a program without the run-time compiler asks for, into `folder`; or those of sources whose names
/// begin with one of `names`. Needs the compiler, no GPU.
fn kernels(folder: &Path, names: &[String]) -> ExitCode {
    if let Err(error) = std::fs::create_dir_all(folder) {
        eprintln!("{}: {error}", folder.display());
        return ExitCode::FAILURE;
    }
    let mut sources = cuda::package();
    sources.retain(|source| names.is_empty() || names.iter().any(|name| source.name.starts_with(name)));
    if sources.is_empty() {
        eprintln!("no source begins with {}", names.join(" or "));
        return ExitCode::from(2);
    }
    let (next, bytes, failures) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            match compile(folder, source) {
                Ok(len) => drop(bytes.fetch_add(len, Ordering::Relaxed)),
                Err(message) => {
                    failures.fetch_add(1, Ordering::Relaxed);
                    eprintln!("{}: {message}", source.name);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let (bytes, failures) = (bytes.into_inner(), failures.into_inner());
    println!("{} sources in {}, {} KiB, {failures} failures", sources.len(), folder.display(), bytes >> 10);
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Bytes of the code of a source.
fn compile(folder: &Path, source: &cuda::Source) -> Result<usize, String> {
    let (code, _) = cuda::compile(source).map_err(|error| error.to_string())?;
    std::fs::write(folder.join(source.file_name()), &code).map_err(|error| error.to_string())?;
    Ok(code.len())
}
