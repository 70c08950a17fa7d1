//! Files of an independent writer (`make_fixture.py`), every value of them.

use std::fs;
use std::path::Path;

use gguf::{Array, Gguf, Header, Metadata, TensorDecl, TensorInfo, TensorType, Value, Writer};
use quant::Type;

mod common;
use common::Folder;

#[test]
fn every_value_and_tensor_of_a_foreign_file() {
    let model = Gguf::open(&common::folder("fixtures/values.gguf")).unwrap();
    let mut expected = Metadata::new();
    expected.set("general.architecture", "fixture");
    expected.set("general.alignment", 64u32);
    expected.set("v.u8", Value::U8(200));
    expected.set("v.i8", Value::I8(-100));
    expected.set("v.u16", Value::U16(60000));
    expected.set("v.i16", Value::I16(-30000));
    expected.set("v.u32", 4_000_000_000u32);
    expected.set("v.i32", -2_000_000_000i32);
    expected.set("v.f32", 0.1f32);
    expected.set("v.true", true);
    expected.set("v.false", false);
    expected.set("v.string", "Grüße, 世界");
    expected.set("v.u64", u64::MAX);
    expected.set("v.i64", Value::I64(i64::MIN));
    expected.set("v.f64", Value::F64(0.1));
    expected.set("a.u8", Array::U8(vec![0, u8::MAX]));
    expected.set("a.i8", Array::I8(vec![i8::MIN, i8::MAX]));
    expected.set("a.u16", Array::U16(vec![0, u16::MAX]));
    expected.set("a.i16", Array::I16(vec![i16::MIN, i16::MAX]));
    expected.set("a.u32", vec![0, u32::MAX]);
    expected.set("a.i32", vec![i32::MIN, i32::MAX]);
    expected.set("a.u64", Array::U64(vec![0, u64::MAX]));
    expected.set("a.i64", Array::I64(vec![i64::MIN, i64::MAX]));
    expected.set("a.f32", vec![0.5f32, -1.25]);
    expected.set("a.f64", Array::F64(vec![0.1, -1e300]));
    expected.set("a.bool", Array::Bool(vec![true, false, true]));
    expected.set("a.string", Array::String(["", "a", "Ġhello", "日本"].iter().collect()));
    let inner = [vec![1, 2, 3], vec![4], vec![5, 6]].map(Array::I32);
    expected.set("a.nested", Array::Nested(inner.to_vec()));
    assert_eq!(model.metadata(), &expected);

    let f32s: Vec<u8> = (0..6).flat_map(|i| (i as f32 - 2.5).to_le_bytes()).collect();
    let f16s = [0, 0, 0, 0x3c, 0, 0x40, 0, 0x42, 0, 0x44];
    let q8: Vec<u8> = (0..4 * 34).map(|i| i as u8).collect();
    let tensors: [(&str, &[u64], TensorType, &[u8]); 3] = [
        ("f32", &[3, 2], TensorType::Known(Type::F32), &f32s),
        ("f16", &[5], TensorType::Known(Type::F16), &f16s),
        ("q8_0", &[32, 2, 2], TensorType::Known(Type::Q8_0), &q8),
    ];
    assert_eq!(model.tensors().len(), tensors.len());
    for (info, (name, dims, ty, bytes)) in model.tensors().iter().zip(tensors) {
        assert_eq!((info.name.as_str(), &info.dims[..], info.ty), (name, dims, ty));
        assert_eq!(model.bytes(info), bytes, "{name}");
        assert_eq!(info.offset % 64, 0);
    }
}

#[test]
fn a_type_we_do_not_know() {
    let model = Gguf::open(&common::folder("fixtures/unknown.gguf")).unwrap();
    let unknown = model.tensor("tq2_0").unwrap();
    assert_eq!((unknown.ty, &unknown.dims[..]), (TensorType::Unknown(35), &[256, 1][..]));
    assert_eq!(model.shards()[0].bytes()[unknown.offset as usize..][..3], [0, 1, 2]);
    assert_eq!(model.bytes(model.tensor("f32").unwrap()), 1f32.to_le_bytes());
}

#[test]
fn our_writer_writes_the_bytes_of_the_foreign_one() {
    let folder = Folder::new("same-bytes");
    for name in ["values.gguf", "split-00001-of-00003.gguf", "split-00002-of-00003.gguf"] {
        let foreign = fs::read(common::folder("fixtures").join(name)).unwrap();
        // The header alone, since a shard by itself is no model.
        let header = Header::parse(&foreign, Path::new(name)).unwrap();
        let known = |tensor: &TensorInfo| TensorDecl {
            name: tensor.name.clone(),
            dims: tensor.dims.clone(),
            ty: tensor.ty.known().unwrap(),
        };
        let tensors: Vec<_> = header.tensors.iter().map(known).collect();
        let path = folder.join("ours.gguf");
        let mut writer = Writer::create(&path, &header.metadata, &tensors).unwrap();
        for tensor in &header.tensors {
            writer.write(&foreign[tensor.offset as usize..][..tensor.len as usize]).unwrap();
        }
        writer.finish().unwrap();
        assert!(fs::read(&path).unwrap() == foreign, "{name}");
    }
}

#[test]
fn shards_of_a_foreign_writer() {
    for opened in ["split-00001-of-00003.gguf", "split-00002-of-00003.gguf", "split-00003-of-00003.gguf"] {
        let model = Gguf::open(&common::folder("fixtures").join(opened)).unwrap();
        assert_eq!(model.metadata().str("v.string").unwrap(), Some("split"));
        let names: Vec<_> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["t0", "t1", "t2", "t3", "t4"]);
        for (i, info) in model.tensors().iter().enumerate() {
            assert_eq!(info.shard, i / 2);
            let expected: Vec<u8> = (0..=i).flat_map(|_| (i as f32).to_le_bytes()).collect();
            assert_eq!(model.bytes(info), expected, "{}", info.name);
        }
    }
}
