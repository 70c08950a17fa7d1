//! The tensors that a GGUF file declares, through ggml's own reader.

use std::path::Path;
use std::ptr;

use llama_cpp_sys_2 as sys;

use crate::error::Error;
use crate::llama;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Length of a row.
    pub columns: usize,
    /// Slices of the third dimension: experts, 1 for plain matrices.
    pub experts: usize,
    /// Has at least two dimensions above one.
    pub matrix: bool,
    /// Stored type.
    pub ty: sys::ggml_type,
}

/// ggml's name of a type, in capitals.
pub fn type_name(ty: sys::ggml_type) -> String {
    // SAFETY: ggml returns a static string for the types it read from a file.
    unsafe { llama::owned(sys::ggml_type_name(ty)) }.to_uppercase()
}

/// All tensors of an unsplit file, in file order.
pub fn tensors(path: &Path) -> Result<Vec<Tensor>, Error> {
    let fail = |detail: String| Error::Quantize { path: path.to_path_buf(), detail };
    std::fs::File::open(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
    let name = llama::c_path(path)?;
    let mut metadata: *mut sys::ggml_context = ptr::null_mut();
    // SAFETY: the path outlives the call; `metadata` receives a context that is freed below.
    let header = unsafe {
        let params = sys::gguf_init_params { no_alloc: true, ctx: &mut metadata };
        sys::gguf_init_from_file(name.as_ptr(), params)
    };
    if header.is_null() {
        return Err(fail(llama::errors()));
    }
    let mut tensors = Vec::new();
    // SAFETY: header and context are valid until freed at the end; tensor pointers are walked only
    // inside the context that holds them.
    let split = unsafe {
        let mut current = sys::ggml_get_first_tensor(metadata);
        while !current.is_null() {
            let tensor = &*current;
            let dimension = |index: usize| usize::try_from(tensor.ne[index]).unwrap_or(0);
            tensors.push(Tensor {
                name: llama::owned(tensor.name.as_ptr()),
                columns: dimension(0),
                experts: dimension(2),
                matrix: sys::ggml_n_dims(current) >= 2,
                ty: tensor.type_,
            });
            current = sys::ggml_get_next_tensor(metadata, current);
        }
        let key = sys::gguf_find_key(header, c"split.count".as_ptr());
        let split = key >= 0
            && sys::gguf_get_kv_type(header, key) == sys::GGUF_TYPE_UINT16
            && sys::gguf_get_val_u16(header, key) > 1;
        sys::gguf_free(header);
        sys::ggml_free(metadata);
        split
    };
    if split {
        return Err(fail("it is one part of a split model; merge the parts first".to_string()));
    }
    Ok(tensors)
}
