//! Model files that can be changed before they are opened.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::{Gguf, Metadata, TensorDecl, TensorType, Value, Writer};
use model::{Error, Model, Result};
use quant::Type;
use testkit::{TinyModel, TinyOptions};

/// A tensor: name, type, shape (row-major) and bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub ty: Type,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A file in the making.
#[derive(Clone)]
pub struct Draft {
    pub metadata: Metadata,
    pub tensors: Vec<Tensor>,
}

impl Draft {
    /// A good file.
    pub fn tiny(options: TinyOptions) -> Draft {
        let tiny = TinyModel::new(options);
        let gguf = &tiny.model.gguf;
        let tensor = |info: &gguf::TensorInfo| Tensor {
            name: info.name.clone(),
            ty: known(info.ty),
            shape: info.dims.iter().rev().map(|&d| d as usize).collect(),
            bytes: gguf.bytes(info).to_vec(),
        };
        Draft { metadata: gguf.metadata().clone(), tensors: gguf.tensors().iter().map(tensor).collect() }
    }

    /// Sets `qwen3next.KEY`.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Draft {
        self.metadata.set(format!("qwen3next.{key}"), value);
        self
    }

    /// Removes `qwen3next.KEY`.
    pub fn unset(mut self, key: &str) -> Draft {
        self.metadata.remove(&format!("qwen3next.{key}")).expect("a key of the tiny model");
        self
    }

    /// Adds a tensor of zeros.
    pub fn add(mut self, name: &str, ty: Type, shape: &[usize]) -> Draft {
        let len = ty.bytes(shape.iter().product()).expect("whole blocks");
        self.tensors.push(Tensor { name: name.to_string(), ty, shape: shape.to_vec(), bytes: vec![0; len] });
        self
    }

    /// Removes a tensor.
    pub fn drop(mut self, name: &str) -> Draft {
        self.tensors.remove(self.index(name));
        self
    }

    /// Replaces a tensor by zeros of another type and shape.
    pub fn replace(self, name: &str, ty: Type, shape: &[usize]) -> Draft {
        self.drop(name).add(name, ty, shape)
    }

    pub fn tensor(&self, name: &str) -> &Tensor {
        &self.tensors[self.index(name)]
    }

    pub fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        let index = self.index(name);
        &mut self.tensors[index]
    }

    fn index(&self, name: &str) -> usize {
        self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    /// Writes the tensors `from..to` as a file.
    pub fn write(&self, path: &Path, metadata: &Metadata, tensors: &[Tensor]) {
        let decl = |t: &Tensor| TensorDecl {
            name: t.name.clone(),
            dims: t.shape.iter().rev().map(|&d| d as u64).collect(),
            ty: t.ty,
        };
        let decls: Vec<TensorDecl> = tensors.iter().map(decl).collect();
        let mut writer = Writer::create(path, metadata, &decls).expect("a file in the temporary folder");
        tensors.iter().for_each(|t| writer.write(&t.bytes).expect("room in the temporary folder"));
        writer.finish().expect("all tensors are written");
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let folder = Folder::new();
        let path = folder.0.join("draft.gguf");
        self.write(&path, &self.metadata, &self.tensors);
        std::fs::read(&path).expect("the file just written")
    }

    pub fn open(&self) -> Result<Model> {
        open_bytes(self.bytes())
    }

    /// The file with other type ids for some tensors, as a newer program would write it.
    pub fn with_type_ids(&self, ids: &[(&str, u32)]) -> Vec<u8> {
        let mut bytes = self.bytes();
        for &(name, id) in ids {
            let tensor = self.tensor(name);
            let mut entry = (name.len() as u64).to_le_bytes().to_vec();
            entry.extend(name.as_bytes());
            let at = bytes.windows(entry.len()).position(|window| window == entry).expect("its entry");
            let ty = at + entry.len() + 4 + 8 * tensor.shape.len();
            assert_eq!(bytes[ty..ty + 4], tensor.ty.id().to_le_bytes());
            bytes[ty..ty + 4].copy_from_slice(&id.to_le_bytes());
        }
        bytes
    }

    /// The error of opening it, as the user sees it.
    #[track_caller]
    pub fn refused(&self) -> Error {
        self.open().expect_err("a file that cannot be run")
    }
}

pub fn open_bytes(bytes: Vec<u8>) -> Result<Model> {
    Model::from_gguf(Gguf::from_bytes(bytes).expect("a good container"))
}

pub fn known(ty: TensorType) -> Type {
    match ty {
        TensorType::Known(ty) => ty,
        TensorType::Unknown(id) => panic!("type {id}"),
    }
}

/// A fresh folder, removed with the value.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("redlite-model-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder left behind does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
