//! Valid files read as they should, and fast; the getters of metadata.

use std::path::Path;
use std::time::Instant;

use gguf::{Array, Gguf, Header, Metadata, Strings, TensorType, Value};

mod common;
use common::{Raw, array, id, string};

fn parse(raw: &Raw) -> Result<Header, gguf::Error> {
    Header::parse(&raw.bytes(), Path::new("m.gguf"))
}

#[test]
fn versions_2_and_3_are_the_same_layout() {
    for version in [2, 3] {
        let header = parse(&Raw { version, ..Raw::small() }).unwrap();
        assert_eq!((header.version, header.alignment), (version, 32));
        assert_eq!(header.metadata.str("general.name").unwrap(), Some("tiny"));
        let tokens: Vec<_> = header.metadata.strings("tokens").unwrap().unwrap().iter().collect();
        assert_eq!(tokens, ["a", "bc", "Ġd"]);
        assert_eq!(header.tensors.len(), 2);
    }
}

#[test]
fn bytes_of_a_tensor_are_its_own() {
    let model = Gguf::from_bytes(Raw::small().bytes()).unwrap();
    let expected: Vec<u8> = (0..66).collect();
    assert_eq!(model.bytes(model.tensor("a").unwrap()), &expected[..32]);
    assert_eq!(model.bytes(model.tensor("b").unwrap()), &expected[32..]);
    assert!(model.tensor("c").is_none());
}

#[test]
fn tensors_may_lie_in_any_order_with_gaps() {
    let raw = Raw::empty().tensor("late", &[8], 0, 64).tensor("early", &[2], 0, 0).data(96);
    let model = Gguf::from_bytes(raw.bytes()).unwrap();
    assert_eq!(model.tensors()[0].name, "late", "the order is the directory's");
    assert_eq!(model.bytes(&model.tensors()[0]), (64..96).collect::<Vec<u8>>());
    assert_eq!(model.bytes(&model.tensors()[1]), (0..8).collect::<Vec<u8>>());
}

#[test]
fn alignment_of_the_file_places_its_tensors() {
    for alignment in [8, 16, 128] {
        let raw = Raw::empty()
            .entry("general.alignment", id::U32, &(alignment as u32).to_le_bytes())
            .tensor("t", &[2], 0, 0)
            .tensor("u", &[2], 0, alignment as u64)
            .data(alignment + 8);
        let model = Gguf::from_bytes(Raw { alignment, ..raw }.bytes()).unwrap();
        for info in model.tensors() {
            let start = if info.name == "t" { 0 } else { alignment as u8 };
            let expected: Vec<u8> = (start..start + 8).collect();
            assert_eq!(model.bytes(info), expected, "{}", info.name);
        }
    }
}

#[test]
fn files_without_tensors_or_metadata() {
    let model = Gguf::from_bytes(Raw::empty().bytes()).unwrap();
    assert!(model.metadata().is_empty() && model.tensors().is_empty());
    // No data section follows, so the file need not be padded.
    let bytes = Raw::empty().entry("k", id::BOOL, &[1]).bytes();
    assert_eq!(Gguf::from_bytes(bytes).unwrap().metadata().bool("k").unwrap(), Some(true));
}

#[test]
fn tensors_of_unknown_type_are_listed() {
    let raw = Raw::empty().tensor("x", &[256], 4711, 0).tensor("t", &[2], 0, 256).data(264);
    let model = Gguf::from_bytes(raw.bytes()).unwrap();
    let x = model.tensor("x").unwrap();
    assert_eq!((x.ty, x.len, x.elements()), (TensorType::Unknown(4711), 0, 256));
    assert_eq!(x.ty.to_string(), "type 4711");
    assert!(model.bytes(x).is_empty());
}

#[test]
fn a_vocabulary_of_250000_parses_in_a_blink() {
    let count = 250_000u64;
    let words: Vec<String> = (0..count).map(|i| format!("Ġtoken{i}")).collect();
    let strings = |words: &[String]| {
        let mut all = array(id::STRING, count);
        words.iter().for_each(|word| all.extend(string(word)));
        all
    };
    let merges: Vec<String> = words.iter().map(|word| format!("{word} {word}")).collect();
    let types = [array(id::I32, count), vec![1; 4 * count as usize]].concat();
    let bytes = Raw::empty()
        .entry("tokenizer.ggml.tokens", id::ARRAY, &strings(&words))
        .entry("tokenizer.ggml.token_type", id::ARRAY, &types)
        .entry("tokenizer.ggml.merges", id::ARRAY, &strings(&merges))
        .bytes();
    // It takes some 40 ms. On a busy machine one parse may wait long for its turn, so the bound is lax;
    // work that grows with the square of the count takes minutes.
    let fast = (0..20).any(|_| parse_seconds(&bytes) < 0.5);
    assert!(fast, "never under half a second");
}

fn parse_seconds(bytes: &[u8]) -> f64 {
    let start = Instant::now();
    let header = Header::parse(bytes, Path::new("m.gguf")).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let tokens = header.metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.get(249_999)), (250_000, Some("Ġtoken249999")));
    println!("{} bytes in {:.1} ms", bytes.len(), seconds * 1e3);
    seconds
}

fn sample() -> Metadata {
    let mut m = Metadata::new();
    m.set("small", Value::U8(7));
    m.set("negative", -1i32);
    m.set("large", u64::MAX);
    m.set("half", 0.5f32);
    m.set("tenth", Value::F64(0.1));
    m.set("text", "seven");
    m.set("ints", Array::U16(vec![1, 65535]));
    m.set("large ints", Array::U64(vec![1, u64::MAX]));
    m.set("floats", Array::F64(vec![0.25]));
    m.set("flags", Array::Bool(vec![true]));
    m.set("words", ["a", "b"].iter().collect::<Strings>());
    m
}

#[test]
fn getters_accept_what_fits() {
    let m = sample();
    assert_eq!(
        (m.u32("small").unwrap(), m.u64("small").unwrap(), m.i64("negative").unwrap()),
        (Some(7), Some(7), Some(-1))
    );
    assert_eq!((m.f32("half").unwrap(), m.f32("tenth").unwrap()), (Some(0.5), Some(0.1)));
    assert_eq!(m.str("text").unwrap(), Some("seven"));
    assert_eq!(m.ints("ints").unwrap(), Some(vec![1, 65535]));
    assert_eq!(m.floats("floats").unwrap(), Some(vec![0.25]));
    assert_eq!(m.bools("flags").unwrap(), Some(&[true][..]));
    assert_eq!(m.strings("words").unwrap().unwrap().get(1), Some("b"));
    assert_eq!(m.strings("words").unwrap().unwrap().get(2), None);
    assert_eq!(
        (m.u32("absent").unwrap(), m.str("absent").unwrap(), m.ints("absent").unwrap()),
        (None, None, None)
    );
}

#[test]
fn getters_name_key_and_types_of_what_does_not_fit() {
    let m = sample();
    let text = |result: Result<(), gguf::Error>| result.unwrap_err().to_string();
    assert_eq!(
        text(m.u32("text").map(drop)),
        "(memory): metadata key `text` is of type string, where u32 is needed"
    );
    assert_eq!(
        text(m.u32("negative").map(drop)),
        "(memory): metadata key `negative` is -1, which does not fit u32"
    );
    assert_eq!(
        text(m.i64("large").map(drop)),
        "(memory): metadata key `large` is 18446744073709551615, which does not fit i64"
    );
    assert_eq!(
        text(m.ints("large ints").map(drop)),
        "(memory): metadata key `large ints` is 18446744073709551615, which does not fit i64"
    );
    assert_eq!(
        text(m.strings("ints").map(drop)),
        "(memory): metadata key `ints` is of type array of u16, where array of string is needed"
    );
    for wrong in [
        m.f32("small").map(drop),
        m.bool("small").map(drop),
        m.str("small").map(drop),
        m.ints("small").map(drop),
        m.ints("floats").map(drop),
        m.floats("ints").map(drop),
        m.bools("ints").map(drop),
    ] {
        assert!(text(wrong).contains("is of type"));
    }
    // Of a file, the error names it.
    let raw = Raw::empty().entry("k", id::BOOL, &[1]);
    assert!(text(parse(&raw).unwrap().metadata.u32("k").map(drop)).starts_with("m.gguf: "));
}

#[test]
fn setting_and_removing_keeps_the_order() {
    let mut m = Metadata::new();
    for key in ["a", "b", "c", "d"] {
        m.set(key, 1u32);
    }
    m.set("b", 2u32);
    assert_eq!(m.remove("a"), Some(Value::U32(1)));
    assert_eq!(m.remove("a"), None);
    m.set("a", 3u32);
    let keys: Vec<_> = m.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["b", "c", "d", "a"]);
    let values: Vec<_> = keys.iter().map(|key| m.u32(key).unwrap().unwrap()).collect();
    assert_eq!(values, [2, 1, 1, 3]);
}
