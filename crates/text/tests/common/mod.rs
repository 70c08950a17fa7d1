//! What several test files need: the small trained tokenizer, ours and the oracle's.

#![allow(dead_code, reason = "each test file uses its own part")]

use text::{Tokenizer, Vocabulary};

/// `tokenizer.json` of the pocket model: 4096 tokens, qwen2 splitting, NFC.
pub const POCKET: &str = include_str!("../data/pocket_tokenizer.json");
/// Its `tokenizer_config.json`.
pub const POCKET_CONFIG: &str = include_str!("../data/pocket_tokenizer_config.json");
/// Code in several languages, many scripts, white space of all kinds, long runs.
pub const CORPUS: &str = include_str!("../data/corpus.txt");

pub fn vocabulary() -> Vocabulary {
    Vocabulary::from_hf(POCKET, Some(POCKET_CONFIG)).expect("a good tokenizer")
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::new(vocabulary()).expect("a good vocabulary")
}

/// The same `tokenizer.json` with the split of `qwen35`.
pub fn pocket_qwen35() -> String {
    POCKET
        .replace(r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", r"[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+")
        .replace(r" ?[^\\s\\p{L}\\p{N}]+", r" ?[^\\s\\p{L}\\p{M}\\p{N}]+")
}

/// A `tokenizer.json` with one more token for each beginning of each word, so that ids show where words are split.
pub fn with_words(json: &str, words: &[&str]) -> String {
    let mut root: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let mut next = 4096;
    for word in words {
        let symbols: Vec<String> = word.bytes().map(byte_symbol).collect();
        let mut start = symbols[0].clone();
        for symbol in &symbols[1..] {
            let merge = serde_json::json!([start, symbol]);
            start.push_str(symbol);
            let vocab = root["model"]["vocab"].as_object_mut().expect("an object");
            if !vocab.contains_key(&start) {
                vocab.insert(start.clone(), next.into());
                next += 1;
                root["model"]["merges"].as_array_mut().expect("an array").push(merge);
            }
        }
    }
    root.to_string()
}

/// GPT-2's printable stand-in for a byte.
pub fn byte_symbol(byte: u8) -> String {
    let code = match u32::from(byte) {
        byte @ 0..=0x20 => 0x100 + byte,
        byte @ 0x7F..=0xA0 => 0x100 + byte - 0x7F + 0x21,
        0xAD => 0x143,
        byte => byte,
    };
    char::from_u32(code).expect("a character").to_string()
}

pub fn oracle(json: &str) -> tokenizers::Tokenizer {
    json.parse().expect("the oracle reads it")
}

/// Ids by the oracle, control tokens in the text included.
pub fn oracle_ids(oracle: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    oracle.encode(text, false).expect("the oracle encodes").get_ids().to_vec()
}

/// A small generator for tests (xorshift), the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}
