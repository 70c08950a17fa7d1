//! What `Writer` writes, `Gguf` reads, and nothing is left behind otherwise.

use std::fs;
use std::path::Path;

use gguf::{Array, ErrorKind, Gguf, Metadata, Strings, TensorDecl, TensorType, Value, Writer};
use quant::Type;

mod common;
use common::Folder;

/// Every type of value and of array, at its extremes.
fn every_value() -> Metadata {
    let mut m = Metadata::new();
    m.set("general.architecture", "test");
    m.set("u8", Value::U8(u8::MAX));
    m.set("i8", Value::I8(i8::MIN));
    m.set("u16", Value::U16(u16::MAX));
    m.set("i16", Value::I16(i16::MIN));
    m.set("u32", u32::MAX);
    m.set("i32", i32::MIN);
    m.set("f32", f32::MIN_POSITIVE);
    m.set("bool", true);
    m.set("string", "naïve 文字\0 end");
    m.set("empty string", "");
    m.set("u64", u64::MAX);
    m.set("i64", Value::I64(i64::MIN));
    m.set("f64", Value::F64(std::f64::consts::PI));
    m.set("a.u8", Array::U8(vec![0, 255]));
    m.set("a.i8", Array::I8(vec![-128, 127]));
    m.set("a.u16", Array::U16(vec![1, 65535]));
    m.set("a.i16", Array::I16(vec![-32768]));
    m.set("a.u32", vec![7u32, u32::MAX]);
    m.set("a.i32", vec![-1i32, 2, 3]);
    m.set("a.f32", vec![0.5f32, f32::INFINITY]);
    m.set("a.bool", Array::Bool(vec![true, false, true]));
    m.set("a.string", ["", "a", "ßß"].iter().collect::<Strings>());
    m.set("a.u64", Array::U64(vec![u64::MAX]));
    m.set("a.i64", Array::I64(vec![i64::MIN, 0]));
    m.set("a.f64", Array::F64(vec![-0.0, 1e300]));
    m.set("a.empty", Array::Nested(vec![]));
    let inner = Array::Nested(vec![Array::U8(vec![1]), Array::String(["x"].iter().collect())]);
    m.set("a.nested", Array::Nested(vec![inner, Array::F32(vec![]), Array::Nested(vec![])]));
    m
}

fn decl(name: &str, dims: &[u64], ty: Type) -> TensorDecl {
    TensorDecl { name: name.to_owned(), dims: dims.to_owned(), ty }
}

fn kind<T>(result: Result<T, gguf::Error>) -> String {
    match result {
        Ok(_) => "no error".to_owned(),
        Err(error) => format!("{:?}", error.kind()),
    }
}

#[test]
fn everything_written_is_read_back() {
    let folder = Folder::new("everything");
    for alignment in [None, Some(8u32), Some(4096)] {
        let mut metadata = every_value();
        if let Some(alignment) = alignment {
            metadata.set("general.alignment", alignment);
        }
        let path = folder.join("m.gguf");
        let tensors = [
            decl("a", &[3, 1, 2, 1], Type::F32),
            decl("b", &[256, 3], Type::Q4_K),
            decl("c", &[5], Type::F16),
        ];
        let data: Vec<Vec<u8>> =
            [24, 432, 10].iter().map(|&len| (0..len).map(|i| (i * 7 + len) as u8).collect()).collect();
        let mut writer = Writer::create(&path, &metadata, &tensors).unwrap();
        for (tensor, bytes) in tensors.iter().zip(&data) {
            assert_eq!(writer.tensor(), Some(tensor.name.as_str()));
            for piece in bytes.chunks(97) {
                writer.write(piece).unwrap();
            }
        }
        assert_eq!(writer.tensor(), None);
        writer.finish().unwrap();
        assert_eq!(folder.names(), ["m.gguf"]);

        let read = Gguf::open(&path).unwrap();
        assert_eq!(read.metadata(), &metadata);
        assert_eq!(read.tensors().len(), 3);
        for (tensor, bytes) in tensors.iter().zip(&data) {
            let info = read.tensor(&tensor.name).unwrap();
            assert_eq!((&info.dims, info.ty), (&tensor.dims, TensorType::Known(tensor.ty)));
            assert_eq!(info.offset % u64::from(alignment.unwrap_or(32)), 0);
            assert_eq!(read.bytes(info), &bytes[..], "{}", tensor.name);
            assert_eq!(info.elements(), tensor.dims.iter().product::<u64>());
        }
        assert_eq!(read.shards().len(), 1);
        assert_eq!(read.shards()[0].path(), path);
        assert_eq!(read.shards()[0].size(), fs::metadata(&path).unwrap().len());
    }
}

#[test]
fn an_unfinished_file_leaves_nothing_and_keeps_the_old_one() {
    let folder = Folder::new("unfinished");
    let path = folder.join("m.gguf");
    fs::write(&path, "old").unwrap();
    let tensors = [decl("t", &[4], Type::F32)];
    let mut writer = Writer::create(&path, &Metadata::new(), &tensors).unwrap();
    writer.write(&[1; 10]).unwrap();
    assert_eq!(folder.names().len(), 2, "the temporary file lies beside the target");
    assert_eq!(kind(writer.finish()), r#"TooFewBytes { tensor: "t", len: 16, written: 10 }"#);
    drop(Writer::create(&path, &Metadata::new(), &tensors).unwrap());
    assert_eq!(folder.names(), ["m.gguf"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn lengths_are_checked_and_a_refused_piece_is_not_written() {
    let folder = Folder::new("lengths");
    let path = folder.join("m.gguf");
    let tensors = [decl("t", &[4], Type::F32), decl("u", &[1], Type::F32)];
    let mut writer = Writer::create(&path, &Metadata::new(), &tensors).unwrap();
    writer.write(&[1; 10]).unwrap();
    assert_eq!(kind(writer.write(&[9; 7])), r#"TooManyBytes { tensor: "t", len: 16, written: 10, more: 7 }"#);
    writer.write(&[2; 6]).unwrap();
    writer.write(&[]).unwrap();
    writer.write(&[3; 4]).unwrap();
    assert_eq!(kind(writer.write(&[9; 1])), r#"TooManyBytes { tensor: "u", len: 4, written: 4, more: 1 }"#);
    writer.finish().unwrap();
    let read = Gguf::open(&path).unwrap();
    assert_eq!(read.bytes(&read.tensors()[0]), [[1; 10].as_slice(), &[2; 6]].concat());
    assert_eq!(read.bytes(&read.tensors()[1]), [3; 4]);
}

#[test]
fn impossible_declarations_are_refused_before_a_file_exists() {
    let folder = Folder::new("impossible");
    let create = |metadata: &Metadata, tensors: &[TensorDecl]| {
        kind(Writer::create(&folder.join("m.gguf"), metadata, tensors))
    };
    let with = |key: &str, value: Value| {
        let mut metadata = Metadata::new();
        metadata.set(key, value);
        create(&metadata, &[])
    };
    let tensors = |tensors: &[TensorDecl]| create(&Metadata::new(), tensors);
    let mut deep = Array::U8(vec![1]);
    for _ in 0..gguf::MAX_DEPTH {
        deep = Array::Nested(vec![deep]);
    }
    let f32 = Type::F32;
    for (found, expected) in [
        (with("", Value::U8(1)), "EmptyKey"),
        (with("deep", Value::Array(deep)), "Depth"),
        (with("general.alignment", Value::U32(24)), "Alignment"),
        (tensors(&[decl("", &[1], f32)]), "EmptyTensorName"),
        (tensors(&[decl(&"n".repeat(64), &[1], f32)]), "LongTensorName"),
        (tensors(&[decl("t", &[1], f32), decl("t", &[2], f32)]), "DuplicateTensor"),
        (tensors(&[decl("t", &[], f32)]), "DimCount"),
        (tensors(&[decl("t", &[1; 5], f32)]), "DimCount"),
        (tensors(&[decl("t", &[4, 0], f32)]), "ZeroDim"),
        (tensors(&[decl("t", &[1 << 40, 1 << 40], f32)]), "Overflow"),
        (tensors(&[decl("t", &[1 << 60], f32), decl("u", &[1 << 60], f32)]), "Overflow"),
        (tensors(&[decl("t", &[100], Type::Q8_0)]), "PartialBlock"),
    ] {
        assert!(found.starts_with(expected), "{found} should be {expected}");
    }
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn errors_of_the_system_name_the_file() {
    let path = Path::new("/nonexistent-folder/m.gguf");
    let error = Writer::create(path, &Metadata::new(), &[]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io { action: "create the file", .. }));
    assert!(error.to_string().starts_with("/nonexistent-folder/m.gguf: cannot create the file: "), "{error}");
    let error = Gguf::open(path).unwrap_err();
    assert!(error.to_string().starts_with("/nonexistent-folder/m.gguf: cannot open the file: "), "{error}");
    for path in ["/", "..", "/dev/null"] {
        let error = Writer::create(Path::new(path), &Metadata::new(), &[]).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("{path}: cannot create the file: the path ")),
            "{error}"
        );
    }
}
