//! Any vocabulary and any text: an error, or ids that decode to the text again.
//!
//! The first byte says what the rest is (all UTF-8, parts separated by the byte 0xFF):
//!
//! - `j`: `tokenizer.json`, `tokenizer_config.json`, text;
//! - `a`: tokens one a line (a digit for the kind first), merges one a line, text. 256 tokens for the bytes come first;
//! - `t`: text for the pocket model's tokenizer; `i`: ids for it, two bytes each.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use text::{Decoder, StopMatcher, TokenKind, Tokenizer, Vocabulary};

const POCKET_JSON: &str = include_str!("../../crates/text/tests/data/pocket_tokenizer.json");

static POCKET: LazyLock<Tokenizer> = LazyLock::new(|| {
    let vocabulary = Vocabulary::from_hf(POCKET_JSON, None).expect("a good tokenizer");
    Tokenizer::new(vocabulary).expect("a good vocabulary")
});

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    if *mode == b'i' {
        let ids: Vec<u32> = rest.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into()).collect();
        return decode_in_pieces(&POCKET, &ids);
    }
    let parts: Option<Vec<&str>> = rest.split(|&b| b == 0xFF).map(|b| std::str::from_utf8(b).ok()).collect();
    let Some(parts) = parts else { return };
    let part = |at: usize| parts.get(at).copied().unwrap_or_default();
    let (vocabulary, text) = match mode {
        b'j' => (Vocabulary::from_hf(part(0), parts.get(1).copied()).ok(), part(2)),
        b'a' => (Some(arrays(part(0), part(1))), part(2)),
        b't' => {
            let once = POCKET.decode(&POCKET.encode_text(part(0)));
            assert_eq!(POCKET.decode(&POCKET.encode_text(&once)), once, "normalised text stays");
            return decode_in_pieces(&POCKET, &POCKET.encode_raw_with_specials(part(0)));
        }
        _ => return,
    };
    let Some(mut vocabulary) = vocabulary else { return };
    vocabulary.nfc = false;
    let Ok(tokenizer) = Tokenizer::new(vocabulary) else { return };
    let ids = tokenizer.encode_text(text);
    assert!(
        ids.iter().all(|&id| tokenizer.kind(id) == Some(TokenKind::Normal)),
        "text makes no other tokens"
    );
    assert_eq!(tokenizer.decode(&ids), text);
    decode_in_pieces(&tokenizer, &tokenizer.encode_raw_with_specials(text));
});

/// A vocabulary of the 256 bytes and what the input adds.
fn arrays(tokens: &str, merges: &str) -> Vocabulary {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut beyond = (0x100..).filter_map(char::from_u32);
    let symbol = |byte| if printable(byte) { Some(char::from(byte)) } else { beyond.next() };
    let mut all: Vec<String> = (0..=255).filter_map(symbol).map(String::from).collect();
    let mut kinds = vec![TokenKind::Normal; all.len()];
    for line in tokens.lines() {
        let kind = line.bytes().next().and_then(|b| TokenKind::from_gguf(i64::from(b) - i64::from(b'0')));
        if let Some(kind) = kind {
            all.push(line[1..].to_owned());
            kinds.push(kind);
        }
    }
    Vocabulary::new(all, kinds, merges.lines().map(str::to_owned).collect(), "qwen2")
}

/// Token by token the text is the same as at once, and a stop string that never comes changes nothing.
fn decode_in_pieces(tokenizer: &Tokenizer, ids: &[u32]) {
    let whole = tokenizer.decode(ids);
    let (mut decoder, mut stops) = (Decoder::new(), StopMatcher::new(&["the\u{10FFFF}", "é\u{10FFFF}"]));
    let mut pieces = String::new();
    for &id in ids {
        pieces.push_str(&stops.push(&decoder.push(tokenizer, id)));
    }
    pieces.push_str(&stops.push(&decoder.finish()));
    pieces.push_str(&stops.finish());
    if stops.matched().is_none() {
        assert_eq!(pieces, whole);
    }
}
