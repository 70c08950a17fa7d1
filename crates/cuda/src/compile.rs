//! Compiling kernels with NVRTC, once: results are kept on disk.

use std::ffi::CString;
use std::path::PathBuf;

use cudarc::nvrtc::{result, sys};

use crate::error::{Error, Result};
use crate::sources::{Source, Target};

/// Whether the compiler's library can be loaded.
pub(crate) fn present() -> bool {
    // SAFETY: probes for the library, before anything of it is called.
    unsafe { sys::is_culib_present() }
}

/// The compiler's version, such as `13.0`.
fn version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid to write.
    let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    if result == sys::nvrtcResult::NVRTC_SUCCESS { format!("{major}.{minor}") } else { "?".to_string() }
}

/// Compiles to machine code of the source's architecture, without looking for it on disk. Returns it with what the
/// compiler said.
///
/// # Errors
/// [`Error::NoCompiler`], [`Error::Compile`].
pub fn compile(source: &Source) -> Result<(Vec<u8>, String)> {
    if !present() {
        return Err(Error::NoCompiler);
    }
    let fail = |log: String| Error::Compile {
        module: source.name.clone(),
        arch: source.options[0].clone(),
        version: version(),
        log,
    };
    let text = CString::new(source.text.as_str()).map_err(|error| fail(error.to_string()))?;
    let program = result::create_program(&text, None).map_err(|error| fail(error.to_string()))?;
    // SAFETY: the program was made just now and is destroyed below.
    let compiled = unsafe { result::compile_program(program, &source.options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
    let log = String::from_utf8_lossy(&log.iter().map(|&c| c as u8).collect::<Vec<u8>>())
        .trim_end_matches('\0')
        .to_string();
    let code = compiled
        .and_then(|()| if source.is_portable() { portable_code(program) } else { machine_code(program) });
    // SAFETY: not used any more. A failure would leak it.
    let _ = unsafe { result::destroy_program(program) };
    match code {
        Ok(code) => Ok((code, log)),
        Err(error) => Err(fail(if log.is_empty() { error.to_string() } else { log })),
    }
}

type Code = std::result::Result<Vec<u8>, result::NvrtcError>;

/// What a compiled program is on one architecture.
fn machine_code(program: sys::nvrtcProgram) -> Code {
    let mut size = 0;
    // SAFETY: the program is compiled; `size` is valid to write.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: the buffer has the size the compiler gave.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

/// What the driver compiles further (PTX), with the zero that ends it.
fn portable_code(program: sys::nvrtcProgram) -> Code {
    let mut size = 0;
    // SAFETY: as above.
    unsafe { sys::nvrtcGetPTXSize(program, &mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: as above.
    unsafe { sys::nvrtcGetPTX(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

/// What kernels are compiled for on a GPU: itself, or what the kernels that come with the program were compiled for, if
/// there is no compiler.
pub(crate) fn target(capability: (i32, i32), shared: usize) -> Target {
    if present() { Target::of(capability, shared) } else { Target::packaged(capability) }
}

/// A source that comes compiled with the program: `REDLITE_KERNELS`, or the folder `kernels` beside it.
fn packaged(source: &Source) -> Option<Vec<u8>> {
    let named = std::env::var_os("REDLITE_KERNELS").filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = named.or_else(|| Some(std::env::current_exe().ok()?.parent()?.join("kernels")))?;
    std::fs::read(folder.join(source.file_name())).ok()
}

/// As [`compile`], from disk if it was compiled before.
pub(crate) fn cached(source: &Source) -> Result<Vec<u8>> {
    let file = cache_file(source);
    if let Some(code) = file.as_ref().and_then(|file| std::fs::read(file).ok()) {
        return Ok(code);
    }
    if let Some(code) = packaged(source) {
        return Ok(code);
    }
    let (cubin, _) = compile(source)?;
    if let Some(file) = file {
        // A cache that cannot be written costs time, nothing else.
        let _ = store(&file, &cubin);
    }
    Ok(cubin)
}

/// Forgets what is on disk for a source, which turned out to be unusable.
pub(crate) fn forget(source: &Source) {
    if let Some(file) = cache_file(source) {
        let _ = std::fs::remove_file(file);
    }
}

/// Writes beside the file first, so that no other process reads half of it.
fn store(file: &PathBuf, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let partial = file.with_extension(format!("{}", std::process::id()));
    std::fs::write(&partial, cubin)?;
    std::fs::rename(partial, file)
}

/// `redlite/kernels` in the user's cache folder.
fn cache_file(source: &Source) -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(cache.join("redlite/kernels").join(source.file_name()))
}
