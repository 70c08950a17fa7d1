//! Broken files, one test each. The same bytes lie in `tests/corpus`, where the fuzzers start from them;
//! after a change, `WRITE_CORPUS=1 cargo test -p redlite-gguf --test broken` writes them anew.

use std::fs;

use gguf::{ErrorKind, Gguf};

mod common;
use common::{Raw, array, id, string};

/// The error for these bytes, which are those of the corpus file `name`, without the path.
fn refusal(name: &str, bytes: &[u8]) -> String {
    let path = common::folder("corpus").join(format!("{name}.gguf"));
    if std::env::var_os("WRITE_CORPUS").is_some() {
        fs::write(&path, bytes).unwrap();
    }
    assert!(fs::read(&path).unwrap() == bytes, "{} is not what this test builds", path.display());
    let error = Gguf::open(&path).unwrap_err();
    assert_eq!(error.path(), path);
    error.to_string().strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned()
}

/// A file whose one metadata entry, `key`, has this type and these bytes, and then `Raw::small`'s rest.
fn value(ty: u32, bytes: &[u8]) -> Vec<u8> {
    Raw::empty().entry("key", ty, bytes).bytes()
}

/// A file with the one tensor `t`.
fn tensor(dims: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    Raw::empty().tensor("t", dims, ty, offset).data(64).bytes()
}

const FETCH: &str = "it is truncated or damaged, so fetch or convert it again";

#[test]
fn other_magic() {
    let mut bytes = Raw::small().bytes();
    bytes[..4].copy_from_slice(b"ggjt");
    assert_eq!(refusal("magic", &bytes), "not a GGUF file: it starts with \"ggjt\", not \"GGUF\"");
}

#[test]
fn empty_file() {
    let message = format!("the magic number at byte 0 needs 4 bytes, but the file has 0 left: {FETCH}");
    assert_eq!(refusal("empty", b""), message);
}

#[test]
fn version_1() {
    assert_eq!(
        refusal("version-1", &Raw { version: 1, ..Raw::small() }.bytes()),
        "GGUF version 1; versions 2 and 3 are read, so convert the model again with a current tool"
    );
}

#[test]
fn version_4() {
    assert_eq!(
        refusal("version-4", &Raw { version: 4, ..Raw::small() }.bytes()),
        "GGUF version 4; versions 2 and 3 are read; this file needs a newer version of this program"
    );
}

#[test]
fn big_endian() {
    assert_eq!(
        refusal("big-endian", &Raw { version: 3u32.swap_bytes(), ..Raw::small() }.bytes()),
        "a big-endian GGUF file; only little-endian files are read, so convert it again without that option"
    );
}

#[test]
fn tensor_count_beyond_the_file() {
    let raw = Raw { tensor_count: Some(1 << 40), ..Raw::small() };
    assert_eq!(
        refusal("tensor-count", &raw.bytes()),
        format!(
            "the tensor count says 1099511627776 elements of at least 32 bytes, but the file has 266 bytes left: {FETCH}"
        )
    );
}

#[test]
fn tensor_count_more_than_the_directory() {
    let raw = Raw { tensor_count: Some(3), ..Raw::small() };
    assert!(refusal("tensor-count-3", &raw.bytes()).starts_with("the name of tensor 2 "));
}

#[test]
fn metadata_count_beyond_the_file() {
    let raw = Raw { entry_count: Some(u64::MAX), ..Raw::small() };
    assert_eq!(
        refusal("metadata-count", &raw.bytes()),
        format!(
            "the metadata count says 18446744073709551615 elements of at least 13 bytes, but the file has 266 bytes \
             left: {FETCH}"
        )
    );
}

#[test]
fn empty_key() {
    // 37 bytes, as in the report of another program's abort.
    let bytes = Raw::empty().entry("", id::BOOL, &[1]).bytes();
    assert_eq!(bytes.len(), 37);
    let message = "the key of metadata entry 0 is empty; the file is damaged or its writer is";
    assert_eq!(refusal("key-empty", &bytes), message);
}

#[test]
fn duplicate_key() {
    let raw = Raw::empty().entry("k", id::BOOL, &[1]).entry("k", id::BOOL, &[0]);
    let message = "metadata key `k` occurs twice; remove one, since nothing says which holds";
    assert_eq!(refusal("key-duplicate", &raw.bytes()), message);
}

#[test]
fn key_that_is_not_utf8() {
    let mut bytes = Raw::empty().entry("abcd", id::BOOL, &[1]).bytes();
    bytes[34] = 0xff;
    assert_eq!(
        refusal("key-utf8", &bytes),
        "the key of metadata entry 0 is not valid UTF-8 (byte 2 of the string at byte 32)"
    );
}

#[test]
fn key_longer_than_the_file() {
    let mut bytes = Raw::empty().entry("k", id::BOOL, &[1]).bytes();
    bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(
        refusal("key-length", &bytes),
        format!(
            "the key of metadata entry 0 at byte 32 needs 18446744073709551615 bytes, but the file has 6 left: {FETCH}"
        )
    );
}

#[test]
fn string_longer_than_the_file() {
    let bytes = value(id::STRING, &(1u64 << 60).to_le_bytes());
    assert_eq!(
        refusal("string-length", &bytes),
        format!(
            "metadata key `key` at byte 47 needs 1152921504606846976 bytes, but the file has 0 left: {FETCH}"
        )
    );
}

#[test]
fn string_that_is_not_utf8() {
    let bytes = value(id::STRING, &[&2u64.to_le_bytes()[..], &[b'a', 0x80]].concat());
    assert_eq!(
        refusal("string-utf8", &bytes),
        "metadata key `key` is not valid UTF-8 (byte 1 of the string at byte 47)"
    );
}

#[test]
fn element_that_is_not_utf8_though_the_whole_would_be() {
    // "é" cut in two: each half must be refused, not their concatenation accepted.
    let half = |byte: u8| [&1u64.to_le_bytes()[..], &[byte]].concat();
    let bytes = value(id::ARRAY, &[array(id::STRING, 2), half(0xc3), half(0xa9)].concat());
    assert_eq!(
        refusal("element-utf8", &bytes),
        "element 0 of metadata key `key` is not valid UTF-8 (byte 0 of the string at byte 59)"
    );
}

#[test]
fn unknown_value_type() {
    let message = "metadata key `key` has value type 13, which GGUF does not define (0 to 12)";
    assert_eq!(refusal("value-type", &value(13, &[0; 8])), message);
}

#[test]
fn unknown_element_type() {
    let bytes = value(id::ARRAY, &array(77, 0));
    let message = "the array of metadata key `key` has value type 77, which GGUF does not define (0 to 12)";
    assert_eq!(refusal("element-type", &bytes), message);
}

#[test]
fn bool_that_is_neither() {
    let message = "metadata key `key` is a bool with the byte 2; 0 and 1 are valid";
    assert_eq!(refusal("bool", &value(id::BOOL, &[2])), message);
}

#[test]
fn bool_element_that_is_neither() {
    let bytes = value(id::ARRAY, &[array(id::BOOL, 3), vec![0, 1, 255]].concat());
    let message = "element 2 of metadata key `key` is a bool with the byte 255; 0 and 1 are valid";
    assert_eq!(refusal("bool-element", &bytes), message);
}

#[test]
fn array_count_beyond_the_file() {
    for (name, ty, each) in [
        ("bools", id::BOOL, 1),
        ("strings", id::STRING, 8),
        ("numbers", id::U64, 8),
        ("arrays", id::ARRAY, 12),
    ] {
        for count in [1 << 40, u64::MAX, 64 / each + 1] {
            let bytes = value(id::ARRAY, &[array(ty, count), vec![0; 64]].concat());
            let found = match count {
                // Counts that wrap when multiplied.
                u64::MAX => refusal(&format!("array-{name}"), &bytes),
                _ => Gguf::from_bytes(bytes).unwrap_err().to_string().replace("(memory): ", ""),
            };
            let expected = format!(
                "metadata key `key` says {count} elements of at least {each} bytes, but the file has 64 bytes left: \
                 {FETCH}"
            );
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn array_size_that_wraps_to_a_small_one() {
    // 8 × (2^61 + 1) is 8 in 64 bits.
    let bytes = value(id::ARRAY, &[array(id::U64, (1 << 61) + 1), vec![0; 64]].concat());
    assert!(
        refusal("array-wraps", &bytes).starts_with("metadata key `key` says 2305843009213693953 elements")
    );
}

#[test]
fn arrays_nested_without_end() {
    let bytes = value(id::ARRAY, &array(id::ARRAY, 1).repeat(40));
    assert_eq!(refusal("depth", &bytes), "metadata key `key` nests arrays more than 8 deep");
    // The stack must hold out whatever the depth.
    let bomb = value(id::ARRAY, &array(id::ARRAY, 1).repeat(1_000_000));
    assert!(matches!(Gguf::from_bytes(bomb).unwrap_err().kind(), ErrorKind::Depth { .. }));
    let deepest = [array(id::ARRAY, 1).repeat(7), array(id::BOOL, 0)].concat();
    assert!(Gguf::from_bytes(value(id::ARRAY, &deepest)).is_ok());
}

fn alignment(ty: u32, value: &[u8]) -> Vec<u8> {
    Raw::empty().entry("general.alignment", ty, value).tensor("t", &[1], 0, 0).data(64).bytes()
}

const ALIGNMENT: &str = "it must be a u32, a power of two from 8 to 16777216 (32 if the key is absent)";

#[test]
fn alignment_zero() {
    let message = format!("`general.alignment` is 0 (u32); {ALIGNMENT}");
    assert_eq!(refusal("alignment-zero", &alignment(id::U32, &[0; 4])), message);
}

#[test]
fn alignment_not_a_power_of_two() {
    let message = format!("`general.alignment` is 48 (u32); {ALIGNMENT}");
    assert_eq!(refusal("alignment-48", &alignment(id::U32, &48u32.to_le_bytes())), message);
}

#[test]
fn alignment_negative() {
    let message = format!("`general.alignment` is -32 (i32); {ALIGNMENT}");
    assert_eq!(refusal("alignment-negative", &alignment(id::I32, &(-32i32).to_le_bytes())), message);
}

#[test]
fn alignment_of_another_type() {
    let message = format!("`general.alignment` is \"32\" (string); {ALIGNMENT}");
    assert_eq!(refusal("alignment-string", &alignment(id::STRING, &string("32"))), message);
}

#[test]
fn alignment_huge() {
    let message = format!("`general.alignment` is 2147483648 (u32); {ALIGNMENT}");
    assert_eq!(refusal("alignment-huge", &alignment(id::U32, &(1u32 << 31).to_le_bytes())), message);
}

#[test]
fn alignment_of_less_than_a_word() {
    let message = format!("`general.alignment` is 4 (u32); {ALIGNMENT}");
    assert_eq!(refusal("alignment-4", &alignment(id::U32, &4u32.to_le_bytes())), message);
}

#[test]
fn empty_tensor_name() {
    let message = "the name of tensor 0 is empty; the file is damaged or its writer is";
    assert_eq!(refusal("tensor-name-empty", &Raw::empty().tensor("", &[1], 0, 0).data(64).bytes()), message);
}

#[test]
fn tensor_name_that_is_not_utf8() {
    let mut bytes = Raw::empty().tensor("tt", &[1], 0, 0).data(64).bytes();
    bytes[32] = 0xc0;
    let message = "the name of tensor 0 is not valid UTF-8 (byte 0 of the string at byte 32)";
    assert_eq!(refusal("tensor-name-utf8", &bytes), message);
}

#[test]
fn duplicate_tensor() {
    let raw = Raw::empty().tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 32).data(64);
    let message = "tensor `t` occurs twice; the file is damaged or its writer is";
    assert_eq!(refusal("tensor-duplicate", &raw.bytes()), message);
}

#[test]
fn no_dimensions() {
    assert_eq!(refusal("dims-0", &tensor(&[], 0, 0)), "tensor `t` has 0 dimensions; 1 to 4 are valid");
}

#[test]
fn five_dimensions() {
    assert_eq!(refusal("dims-5", &tensor(&[1; 5], 0, 0)), "tensor `t` has 5 dimensions; 1 to 4 are valid");
}

#[test]
fn a_million_dimensions() {
    let mut bytes = tensor(&[1], 0, 0);
    bytes[33..37].copy_from_slice(&1_000_000u32.to_le_bytes());
    assert_eq!(refusal("dims-million", &bytes), "tensor `t` has 1000000 dimensions; 1 to 4 are valid");
}

#[test]
fn zero_dimension() {
    assert_eq!(refusal("dims-zero", &tensor(&[4, 0], 0, 0)), "tensor `t` has a zero dimension: 4 × 0");
}

#[test]
fn dimensions_that_overflow() {
    let message = "tensor `t` with dimensions 4294967296 × 4294967296 overflows a 63-bit size";
    assert_eq!(refusal("dims-overflow", &tensor(&[1 << 32, 1 << 32], 0, 0)), message);
    // 2^62 × 4 bytes is 0 in 64 bits; and a negative number must not come of it either.
    for dims in [[1 << 62, 1], [1 << 61, 1], [1 << 63, 1], [u64::MAX, u64::MAX]] {
        let error = Gguf::from_bytes(tensor(&dims, 0, 0)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Overflow { .. }), "{error}");
    }
}

#[test]
fn dimensions_of_an_unknown_type_overflow_too() {
    let message = "tensor `t` with dimensions 4294967296 × 4294967296 overflows a 63-bit size";
    assert_eq!(refusal("dims-overflow-unknown", &tensor(&[1 << 32, 1 << 32], 4711, 0)), message);
}

#[test]
fn row_that_ends_inside_a_block() {
    // 64 weights in all are two blocks, but no row is.
    let message =
        "tensor `t` has rows of 16 weights, but Q8_0 stores blocks of 32; the row must be a multiple";
    assert_eq!(refusal("block", &tensor(&[16, 4], 8, 0)), message);
}

#[test]
fn tensor_off_the_alignment() {
    let message = "tensor `t` starts at 8 of the data section, not a multiple of the alignment 32";
    assert_eq!(refusal("offset-misaligned", &tensor(&[1], 0, 8)), message);
}

#[test]
fn tensor_that_begins_beyond_the_end() {
    let message = format!("tensor `t` occupies bytes 1088 to 1092, but the file has 128: {FETCH}");
    assert_eq!(refusal("offset-beyond", &tensor(&[1], 0, 1024)), message);
}

#[test]
fn tensor_that_ends_beyond_the_end() {
    let message = format!("tensor `t` occupies bytes 96 to 132, but the file has 128: {FETCH}");
    assert_eq!(refusal("offset-tail", &tensor(&[9], 0, 32)), message);
}

#[test]
fn tensor_whose_end_wraps() {
    let message = format!(
        "tensor `t` occupies bytes 18446744073709551648 to 18446744073709551712, but the file has 128: {FETCH}"
    );
    assert_eq!(refusal("offset-wraps", &tensor(&[16], 0, 0u64.wrapping_sub(32))), message);
}

#[test]
fn unknown_type_beyond_the_end() {
    let message = format!("tensor `t` occupies bytes 160 to 160, but the file has 128: {FETCH}");
    assert_eq!(refusal("offset-unknown", &tensor(&[1], 4711, 96)), message);
}

#[test]
fn names_cannot_steer_or_flood_the_terminal() {
    let steering = Raw::empty().tensor("\u{1b}[2J\n", &[4, 0], 0, 0).data(64).bytes();
    assert_eq!(refusal("name-escape", &steering), r"tensor `\u{1b}[2J\n` has a zero dimension: 4 × 0");
    let flooding = Raw::empty().tensor(&"ß".repeat(1 << 20), &[4, 0], 0, 0).data(64).bytes();
    let error = Gguf::from_bytes(flooding).unwrap_err().to_string();
    assert_eq!(error, format!("(memory): tensor `{}…` has a zero dimension: 4 × 0", "ß".repeat(100)));
}

#[test]
fn tensors_that_overlap() {
    let raw = Raw::empty().tensor("b", &[8], 0, 32).tensor("a", &[16], 0, 0).data(64);
    assert_eq!(refusal("overlap", &raw.bytes()), "tensors `a` and `b` overlap; the file is damaged");
}

#[test]
fn data_cut_off() {
    let mut bytes = Raw::small().bytes();
    bytes.pop();
    let message = format!("tensor `b` occupies bytes 256 to 290, but the file has 289: {FETCH}");
    assert_eq!(refusal("cut-data", &bytes), message);
}

#[test]
fn metadata_cut_off() {
    let bytes = &Raw::small().bytes()[..100];
    assert!(refusal("cut-metadata", bytes).starts_with("metadata key `tokens` says 3 elements"));
}

#[test]
fn directory_cut_off() {
    let header = Raw::small().header();
    let message = "the offset of tensor `b` at byte 186 needs 8 bytes, but the file has 7 left";
    assert!(refusal("cut-directory", &header[..header.len() - 1]).starts_with(message));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = Raw::small().bytes();
    for len in 0..whole.len() {
        let error = Gguf::from_bytes(whole[..len].to_vec()).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Truncated { .. } | ErrorKind::Count { .. } | ErrorKind::BeyondEnd { .. }
            ),
            "cut at {len}: {error}"
        );
    }
    assert!(Gguf::from_bytes(whole).is_ok());
}

#[test]
fn the_head_ends_within_its_limit() {
    // A sparse file: large by its length, not on disk.
    let folder = common::Folder::new("limit");
    let path = folder.file("m.gguf", &value(id::STRING, &(300u64 << 20).to_le_bytes()));
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(400 << 20).unwrap();
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "metadata key `key` at byte 47 lies beyond the first 268435456 bytes, where metadata and tensor list must \
             end"
        ),
        "{error}"
    );
}

#[test]
fn the_corpus_is_small_and_all_of_it_is_refused() {
    let mut files = 0;
    for entry in fs::read_dir(common::folder("corpus")).unwrap() {
        let path = entry.unwrap().path();
        assert!(fs::metadata(&path).unwrap().len() < 1024, "{}", path.display());
        assert!(Gguf::open(&path).is_err(), "{}", path.display());
        files += 1;
    }
    assert!(files > 40);
}
