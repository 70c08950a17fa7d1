//! NFC, at the cost of the few places that need it.

use std::borrow::Cow;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// Lead bytes from here on start characters from U+0300 on. The characters below are starters, are composed, and
/// never compose with what comes before them, so that text can be cut before each of them.
const LEAD: u8 = 0xCC;

/// The text in NFC; borrowed if it is so already. Stretches of characters below U+0300 cost a scan of their bytes.
pub(crate) fn nfc(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let mut out = String::new();
    // All before `copied` is in `out`; all before `at` is done.
    let (mut copied, mut at) = (0, 0);
    while let Some(offset) = bytes[at..].iter().position(|&byte| byte >= LEAD) {
        let first = at + offset;
        let start = text[..first].char_indices().next_back().map_or(first, |(base, _)| base);
        let ends = |byte: &u8| *byte < 0x80 || (0xC0..LEAD).contains(byte);
        at = bytes[first..].iter().position(ends).map_or(text.len(), |len| first + len);
        let stretch = &text[start..at];
        if is_nfc_quick(stretch.chars()) != IsNormalized::Yes {
            out.push_str(&text[copied..start]);
            out.extend(stretch.nfc());
            copied = at;
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_compose_as_the_whole_does() {
        let parts = [
            "a",
            "e\u{301}",
            "\u{301}",
            "\u{327}\u{301}",
            "é",
            "ÿ",
            "\u{2ff}",
            "\u{300}",
            "\u{37f}",
            "\n",
            "語",
            "か\u{3099}",
            "\u{1100}",
            "\u{1161}",
            "\u{11a8}",
            "한",
            "\u{212b}",
            "\u{344}",
            "q\u{323}\u{307}",
            "q\u{307}\u{323}",
            "\u{9c7}\u{9be}",
            "\u{1d15e}",
            "😀",
        ];
        let mut state = 1usize;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..8 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                text.push_str(parts[(state >> 33) % parts.len()]);
            }
            assert_eq!(nfc(&text), text.nfc().collect::<String>(), "{text:?}");
        }
        assert!(matches!(nfc("plain, ünïcode, 中文, 😀"), Cow::Borrowed(_)));
    }
}
