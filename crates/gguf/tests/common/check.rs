//! What must hold of any bytes whatever; for the fuzzer and for the test suite.

use std::path::Path;

use gguf::{Gguf, Header, TensorType};

/// Parses `bytes` and checks what an accepted file promises. Panics if a promise is broken.
/// Returns whether the bytes were accepted.
pub fn parse_and_check(bytes: &[u8]) -> bool {
    let header = match Header::parse(bytes, Path::new("fuzzed")) {
        Ok(header) => header,
        Err(error) => {
            assert!(error.to_string().starts_with("fuzzed: "));
            assert!(Gguf::from_bytes(bytes.to_vec()).is_err());
            return false;
        }
    };
    assert!(matches!(header.version, 2 | 3) && header.alignment.is_power_of_two());
    for (key, value) in header.metadata.iter() {
        assert!(!key.is_empty() && header.metadata.get(key).is_some());
        assert!(!value.to_string().is_empty());
        // A getter may refuse, but must not panic.
        let _ = (header.metadata.u32(key), header.metadata.i64(key), header.metadata.ints(key));
        if let Ok(Some(strings)) = header.metadata.strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
            assert_eq!(strings.iter().last(), strings.len().checked_sub(1).and_then(|i| strings.get(i)));
        }
    }
    let tensors = header.tensors.len();
    let Ok(model) = Gguf::from_bytes(bytes.to_vec()) else {
        // Bytes that are valid but only a shard.
        return true;
    };
    assert_eq!(model.tensors().len(), tensors);
    let mut end = 0;
    let mut order: Vec<_> = model.tensors().iter().collect();
    order.sort_by_key(|tensor| (tensor.offset, tensor.len));
    for tensor in order {
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
        assert!(tensor.offset >= end && tensor.offset.is_multiple_of(header.alignment.into()));
        assert!((1..=4).contains(&tensor.dims.len()) && !tensor.dims.contains(&0));
        if let TensorType::Known(ty) = tensor.ty {
            assert_eq!(ty.bytes(tensor.elements() as usize), Some(tensor.len as usize));
        }
        assert_eq!(model.bytes(tensor).len() as u64, tensor.len);
        end = tensor.offset + tensor.len;
    }
    true
}
