//! Text as it comes out: whole characters, no part of a stop string, however the stream is cut.

mod common;

use common::{CORPUS, Random, tokenizer};
use text::{Decoder, StopMatcher};

#[test]
fn a_character_over_several_tokens_comes_whole() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode_text("👩\u{200d}🚀!");
    assert!(ids.len() > 8, "the small vocabulary spells emoji in bytes");
    let mut decoder = Decoder::new();
    let parts: Vec<String> = ids.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
    let texts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    assert_eq!(texts, ["👩", "\u{200d}", "🚀", "!"]);
    assert_eq!(decoder.finish(), "");
}

#[test]
fn any_bytes_in_any_pieces_decode_as_the_whole_does() {
    let mut random = Random(3);
    let interesting: &[u8] = &[
        b'a', 0x80, 0xBF, 0xC0, 0xC3, 0xA9, 0xE0, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xF4,
        0x90, 0xF5, 0xFF,
    ];
    for _ in 0..20_000 {
        let bytes: Vec<u8> = (0..random.below(12)).map(|_| random.pick(interesting)).collect();
        let mut decoder = Decoder::new();
        let mut out = String::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(1 + random.below(rest.len()));
            out += &decoder.push_bytes(piece);
            rest = after;
            // What is held back could still become a character: a suffix that is not an error yet.
            let so_far = &bytes[..bytes.len() - rest.len()];
            let settled = String::from_utf8_lossy(so_far);
            let held = std::str::from_utf8(so_far).is_err() && decoder.is_unfinished();
            assert_eq!(out.chars().count() + usize::from(held), settled.chars().count(), "{so_far:x?}");
        }
        out += &decoder.finish();
        assert_eq!(out, String::from_utf8_lossy(&bytes), "{bytes:x?}");
    }
}

#[test]
fn control_tokens_are_left_out_unless_asked_for() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode_raw_with_specials("<|im_start|>a<think>b</think><|im_end|>");
    assert_eq!(tokenizer.decode(&ids), "a<think>b</think>");
    let mut decoder = Decoder::with_control_tokens();
    let all: String = ids.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
    assert_eq!(all, "<|im_start|>a<think>b</think><|im_end|>");
    assert_eq!(tokenizer.decode(&[4096, u32::MAX]), "");
}

#[test]
fn the_corpus_survives_the_way_to_ids_and_back() {
    use unicode_normalization::UnicodeNormalization;
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.decode(&tokenizer.encode_text(CORPUS)), CORPUS.nfc().collect::<String>());
}

/// What a stop matcher must give, by trying every position: the output and the index of the stop string.
fn naive(text: &str, stops: &[&str]) -> (String, Option<usize>) {
    for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
        let ending =
            stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty() && text[..end].ends_with(**stop));
        if let Some((index, stop)) = ending.max_by_key(|(index, stop)| (stop.len(), usize::MAX - index)) {
            return (text[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

#[test]
fn stop_strings_are_found_however_the_stream_is_cut() {
    let mut random = Random(11);
    let alphabet = ["a", "b", "é", "\n"];
    for round in 0..30_000 {
        let mut string = |max: usize| -> String {
            let len = random.below(max);
            (0..len).map(|_| random.pick(&alphabet[..2 + round % 3])).collect()
        };
        let stops = [string(5), string(7), string(4)];
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let text = string(30);
        let (expected, index) = naive(&text, &stops);
        let mut matcher = StopMatcher::new(&stops);
        let mut out = String::new();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let mut cut = 1 + random.below(rest.len());
            while !rest.is_char_boundary(cut) {
                cut += 1;
            }
            out += &matcher.push(&rest[..cut]);
            assert!(expected.starts_with(&out), "{text:?} {stops:?}: gave {out:?} out too early");
            rest = &rest[cut..];
        }
        out += &matcher.finish();
        assert_eq!((out, matcher.matched()), (expected, index), "{text:?} {stops:?}");
    }
}

#[test]
fn a_possible_stop_string_is_held_back_and_nothing_else() {
    let mut matcher = StopMatcher::new(&["\nUser:", "###"]);
    assert_eq!(matcher.push("Hello"), "Hello");
    assert_eq!(matcher.push("\nUs"), "");
    assert_eq!(matcher.push("ual\n"), "\nUsual");
    assert_eq!(matcher.push("User"), "");
    assert_eq!(matcher.push(": more"), "");
    assert_eq!(
        (matcher.matched(), matcher.push("text"), matcher.finish()),
        (Some(0), String::new(), String::new())
    );
    let mut matcher = StopMatcher::new(&["###"]);
    assert_eq!(
        (matcher.push("a##"), matcher.finish(), matcher.matched()),
        ("a".to_owned(), "##".to_owned(), None)
    );
    let mut none = StopMatcher::new::<&str>(&[]);
    assert_eq!(none.push("as it is"), "as it is");
}
