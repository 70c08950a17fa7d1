//! A safe, small face of llama.cpp's C interface: as much as the commands need.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard};

use llama_cpp_sys_2 as sys;

use crate::error::Error;

/// What llama.cpp logged: shown at once when verbose, and its errors kept for our own messages.
struct Log {
    verbose: bool,
    errors: String,
    continues_error: bool,
}

static LOG: Mutex<Log> = Mutex::new(Log { verbose: false, errors: String::new(), continues_error: false });

/// Errors are kept up to this many bytes: the first ones say most.
const KEPT: usize = 2000;

fn locked() -> MutexGuard<'static, Log> {
    LOG.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    // SAFETY: llama.cpp passes a NUL-terminated string that lives through the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let mut log = locked();
    if log.verbose {
        eprint!("{text}");
    }
    let continuation = level == sys::GGML_LOG_LEVEL_CONT;
    log.continues_error = level == sys::GGML_LOG_LEVEL_ERROR || (continuation && log.continues_error);
    if log.continues_error && log.errors.len() < KEPT {
        log.errors.push_str(&text);
    }
}

/// What llama.cpp has logged as errors so far, on one line.
pub fn errors() -> String {
    let log = locked();
    let lines: Vec<&str> = log.errors.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() { "no message (try --verbose)".to_string() } else { lines.join("; ") }
}

/// Starts the library; its own log goes to standard error when `verbose`, else nowhere.
pub fn start(verbose: bool) {
    locked().verbose = verbose;
    // SAFETY: `log` has the required signature and is valid for the whole run; called once, before
    // any other use of the library.
    unsafe {
        sys::llama_log_set(Some(log), ptr::null_mut());
        sys::llama_backend_init();
    }
}

/// Copies a C string that the library owns.
///
/// # Safety
/// `text` must be null or a valid NUL-terminated string.
pub unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the contract above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The instruction sets and options the library was compiled with, as it reports them.
pub fn system_info() -> String {
    // SAFETY: returns a NUL-terminated string, static until the next call; only this thread calls it.
    unsafe { owned(sys::llama_print_system_info()) }.trim_end_matches([' ', '|']).to_string()
}

/// (llama.cpp version, ggml version, ggml commit), as compiled in.
pub fn versions() -> (String, String, String) {
    // SAFETY: all three return static NUL-terminated strings.
    unsafe { (owned(sys::llama_version()), owned(sys::ggml_version()), owned(sys::ggml_commit())) }
}

/// A path for the C interface.
pub fn c_path(path: &Path) -> Result<CString, Error> {
    path.to_str()
        .and_then(|text| CString::new(text).ok())
        .ok_or_else(|| Error::Path { path: path.to_path_buf() })
}

/// A loaded model.
pub struct Model {
    raw: NonNull<sys::llama_model>,
}

/// How much of a model to load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Tokenizer only.
    Vocabulary,
    /// Weights as the file stores them.
    Plain,
    /// Weights, some of them copied into layouts with faster kernels.
    Repacked,
}

impl Model {
    /// Loads a GGUF file, all on the CPU.
    pub fn load(path: &Path, load: Load) -> Result<Model, Error> {
        let name = c_path(path)?;
        // The library reports a missing file only in its log, in many words.
        std::fs::File::open(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
        // SAFETY: plain data; the path outlives the call.
        let raw = unsafe {
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = 0;
            params.vocab_only = load == Load::Vocabulary;
            params.use_extra_bufts = load == Load::Repacked;
            sys::llama_model_load_from_file(name.as_ptr(), params)
        };
        match NonNull::new(raw) {
            Some(raw) => Ok(Model { raw }),
            None => Err(Error::Load { path: path.to_path_buf(), detail: errors() }),
        }
    }

    fn vocabulary_ptr(&self) -> *const sys::llama_vocab {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_get_vocab(self.raw.as_ptr()) }
    }

    /// Number of tokens, the width of a row of logits.
    pub fn vocabulary(&self) -> usize {
        // SAFETY: the vocabulary belongs to the living model.
        usize::try_from(unsafe { sys::llama_vocab_n_tokens(self.vocabulary_ptr()) }).unwrap_or(0)
    }

    /// One line on the architecture, size class and type.
    pub fn description(&self) -> String {
        let mut buffer = [0u8; 256];
        // SAFETY: the buffer is writable for the stated length; the call always terminates the string.
        unsafe { sys::llama_model_desc(self.raw.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
        CStr::from_bytes_until_nul(&buffer)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// (bytes of all tensors, number of parameters).
    pub fn size(&self) -> (u64, u64) {
        // SAFETY: the model is alive.
        unsafe { (sys::llama_model_size(self.raw.as_ptr()), sys::llama_model_n_params(self.raw.as_ptr())) }
    }

    /// Token ids of a text; `special` also recognises control tokens written in it. BOS is not added.
    /// `None` when the text is too long for the interface.
    pub fn tokenize(&self, text: &str, special: bool) -> Option<Vec<i32>> {
        let length = i32::try_from(text.len()).ok()?;
        let call = |out: &mut [i32]| {
            // SAFETY: both buffers are valid for the lengths passed with them.
            unsafe {
                sys::llama_tokenize(
                    self.vocabulary_ptr(),
                    text.as_ptr().cast(),
                    length,
                    out.as_mut_ptr(),
                    i32::try_from(out.len()).unwrap_or(i32::MAX),
                    false,
                    special,
                )
            }
        };
        // Called with no room it returns the negated number of tokens.
        let needed = call(&mut []).checked_neg()?;
        let mut ids = vec![0; usize::try_from(needed).ok()?];
        let written = call(&mut ids);
        (written == needed).then_some(ids)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: owned; contexts borrow the model, so none is left.
        unsafe { sys::llama_model_free(self.raw.as_ptr()) }
    }
}

/// Shape and arithmetic of a context.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Room for so many tokens.
    pub context: usize,
    /// Most tokens of one `decode`.
    pub batch: usize,
    /// Most tokens evaluated together.
    pub ubatch: usize,
    /// Most rows of logits of one `decode`.
    pub outputs: usize,
    /// CPU threads.
    pub threads: usize,
    /// KV cache in f32 instead of f16.
    pub kv_f32: bool,
    /// Flash attention on, off or llama.cpp's choice.
    pub flash_attention: Option<bool>,
}

/// One sequence being evaluated, with a thread pool of its own that lives as
/// long as it does (llama.cpp otherwise starts threads for every graph).
pub struct Context<'model> {
    raw: NonNull<sys::llama_context>,
    pool: NonNull<sys::ggml_threadpool>,
    vocabulary: usize,
    batch: usize,
    position: usize,
    model: PhantomData<&'model Model>,
}

impl<'model> Context<'model> {
    /// Allocates KV, state and compute buffers.
    pub fn new(model: &'model Model, options: Options) -> Result<Context<'model>, Error> {
        let failed = |detail: String| Error::Context { tokens: options.context, detail };
        let narrow = |value: usize| u32::try_from(value).map_err(|_| failed(format!("{value} is too large")));
        let threads = i32::try_from(options.threads).map_err(|_| failed("too many threads".to_string()))?;
        let kv = if options.kv_f32 { sys::GGML_TYPE_F32 } else { sys::GGML_TYPE_F16 };
        // SAFETY: plain data, fully initialised by the defaults; the model is alive and stays borrowed.
        let raw = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = narrow(options.context)?;
            params.n_batch = narrow(options.batch)?;
            params.n_ubatch = narrow(options.ubatch)?;
            params.n_seq_max = 1;
            params.n_outputs_max = narrow(options.outputs)?;
            params.n_outputs_max_per_seq = params.n_outputs_max;
            params.n_threads = threads;
            params.n_threads_batch = threads;
            params.flash_attn_type = match options.flash_attention {
                None => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
                Some(false) => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
                Some(true) => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            };
            params.type_k = kv;
            params.type_v = kv;
            params.no_perf = true;
            sys::llama_init_from_model(model.raw.as_ptr(), params)
        };
        let raw = NonNull::new(raw).ok_or_else(|| failed(errors()))?;
        // SAFETY: the parameters are initialised by the library; the pool is freed after the context.
        let pool = unsafe {
            let mut params = sys::ggml_threadpool_params_default(threads);
            NonNull::new(sys::ggml_threadpool_new(&mut params))
        };
        let Some(pool) = pool else {
            // SAFETY: owned and not used again.
            unsafe { sys::llama_free(raw.as_ptr()) };
            return Err(failed("no thread pool".to_string()));
        };
        // SAFETY: both are alive; the pool outlives the context (see `drop`).
        unsafe { sys::llama_attach_threadpool(raw.as_ptr(), pool.as_ptr(), ptr::null_mut()) };
        Ok(Context {
            raw,
            pool,
            vocabulary: model.vocabulary(),
            batch: options.batch,
            position: 0,
            model: PhantomData,
        })
    }

    /// Most tokens of one `decode`.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Appends `tokens` to the sequence and waits; `wanted[i]` asks for the logits after `tokens[i]`.
    /// Panics when the two differ in length.
    pub fn decode(&mut self, tokens: &[i32], wanted: &[bool]) -> Result<(), Error> {
        assert_eq!(tokens.len(), wanted.len(), "one flag per token");
        let batch = sys::llama_batch {
            n_tokens: i32::try_from(tokens.len()).expect("a batch fits the context"),
            token: tokens.as_ptr().cast_mut(),
            embd: ptr::null_mut(),
            pos: ptr::null_mut(),
            n_seq_id: ptr::null_mut(),
            seq_id: ptr::null_mut(),
            logits: wanted.as_ptr().cast::<i8>().cast_mut(),
        };
        // SAFETY: the arrays hold `n_tokens` entries (bool has the size of i8 and is 0 or 1) and are
        // only read; null positions and sequences mean the next positions of sequence 0.
        let code = unsafe {
            let code = sys::llama_decode(self.raw.as_ptr(), batch);
            sys::llama_synchronize(self.raw.as_ptr());
            code
        };
        if code != 0 {
            return Err(Error::Decode { position: self.position, code, detail: errors() });
        }
        self.position += tokens.len();
        Ok(())
    }

    /// Logits after token `index` of the last `decode`; `None` when they were not asked for.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the library checks the index and returns null when there is no such row.
        let row = unsafe { sys::llama_get_logits_ith(self.raw.as_ptr(), index) };
        // SAFETY: a row holds one f32 per token and stays valid until the next `decode`, which needs
        // `&mut self`.
        (!row.is_null()).then(|| unsafe { std::slice::from_raw_parts(row, self.vocabulary) })
    }

    /// Forgets the sequence: KV and recurrent state are zeroed.
    pub fn clear(&mut self) {
        // SAFETY: the context is alive.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.raw.as_ptr()), true) };
        self.position = 0;
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: both are owned; the context goes first because it refers to the pool.
        unsafe {
            sys::llama_free(self.raw.as_ptr());
            sys::ggml_threadpool_free(self.pool.as_ptr());
        }
    }
}
