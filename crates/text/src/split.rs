//! The pre-tokenizers: text into pieces inside which merges happen. Hand-written, one pass, linear time.
//!
//! Both rules are alternations tried in order at each position. `qwen2`:
//!
//! 1. `(?i:'s|'t|'re|'ve|'m|'ll|'d)` an English contraction
//! 2. `[^\r\n\p{L}\p{N}]?\p{L}+` letters, with at most one other character before them
//! 3. `\p{N}` one digit
//! 4. ` ?[^\s\p{L}\p{N}]+[\r\n]*` symbols, with a space before and line ends after
//! 5. `\s*[\r\n]+` white space up to its last line end
//! 6. `\s+(?!\S)` white space, less its last character if text follows
//! 7. `\s+` the rest
//!
//! `qwen35` has `[\p{L}\p{M}]` for the letters in 2 and excludes `\p{M}` from the symbols in 4.

use crate::unicode::{Class, Classes};

/// Splits text by one of the two rules.
#[derive(Clone, Copy)]
pub(crate) struct Splitter {
    classes: Classes,
    /// Combining marks count as letters (`qwen35`).
    marks_join_letters: bool,
}

impl Splitter {
    /// The splitter named as in `tokenizer.ggml.pre`.
    pub(crate) fn named(pre: &str) -> Option<Splitter> {
        let marks_join_letters = match pre {
            "qwen2" => false,
            "qwen35" => true,
            _ => return None,
        };
        Some(Splitter { classes: Classes::get(), marks_join_letters })
    }

    /// End of the piece that starts at `start`, which must lie inside `text` on a character boundary.
    #[inline]
    pub(crate) fn piece_end(self, text: &str, start: usize) -> usize {
        let Some((first, class, next)) = self.at(text, start) else { return text.len() };
        match class {
            Class::Letter => self.run_end(text, next, Class::Letter),
            Class::Number => next,
            _ => self.not_alphanumeric(text, start, first, class, next),
        }
    }

    /// The character at `at`, its class for this rule, and where the next one starts.
    #[inline]
    fn at(self, text: &str, at: usize) -> Option<(char, Class, usize)> {
        match text.as_bytes().get(at) {
            Some(&byte) if byte < 0x80 => Some((char::from(byte), self.classes.of_ascii(byte), at + 1)),
            Some(_) => self.beyond_ascii(text, at),
            None => None,
        }
    }

    fn beyond_ascii(self, text: &str, at: usize) -> Option<(char, Class, usize)> {
        let c = text[at..].chars().next()?;
        let class = match self.classes.of(c) {
            Class::Mark if self.marks_join_letters => Class::Letter,
            Class::Mark => Class::Other,
            class => class,
        };
        Some((c, class, at + c.len_utf8()))
    }

    /// End of the run of `class` that covers `at`.
    #[inline]
    fn run_end(self, text: &str, mut at: usize, class: Class) -> usize {
        while let Some((_, found, next)) = self.at(text, at) {
            if found != class {
                break;
            }
            at = next;
        }
        at
    }

    /// A piece that starts with white space or a symbol.
    fn not_alphanumeric(self, text: &str, start: usize, first: char, class: Class, next: usize) -> usize {
        if first == '\''
            && let Some(len) = contraction(&text.as_bytes()[next..])
        {
            return next + len;
        }
        let following = self.at(text, next).map(|(_, class, _)| class);
        let line_end = matches!(first, '\r' | '\n');
        match (class, following) {
            (_, Some(Class::Letter)) if !line_end => self.run_end(text, next, Class::Letter),
            (Class::Other, _) => self.symbols_end(text, next),
            (_, Some(Class::Other)) if first == ' ' => self.symbols_end(text, next),
            _ => self.space_end(text, start),
        }
    }

    /// End of a run of symbols and the line ends after it.
    fn symbols_end(self, text: &str, at: usize) -> usize {
        let end = self.run_end(text, at, Class::Other);
        end + text.as_bytes()[end..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count()
    }

    /// End of a piece of white space: through the last line end of the run if it has one; else the whole run
    /// at the end of the text, and before other text all but the last character (at least one).
    fn space_end(self, text: &str, start: usize) -> usize {
        let (mut at, mut last, mut after_line_end) = (start, start, None);
        while let Some((c, Class::Space, next)) = self.at(text, at) {
            if matches!(c, '\r' | '\n') {
                after_line_end = Some(next);
            }
            (last, at) = (at, next);
        }
        match after_line_end {
            Some(end) => end,
            None if at == text.len() || last == start => at,
            None => last,
        }
    }
}

/// Length of the contraction's letters after an apostrophe, if there is one. Case folding is Unicode's, so the
/// long s (U+017F) is an s.
fn contraction(after: &[u8]) -> Option<usize> {
    let lower = |at: usize| after.get(at).map(u8::to_ascii_lowercase);
    match (lower(0)?, lower(1)) {
        (b's' | b't' | b'm' | b'd', _) => Some(1),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(2),
        (0xC5, Some(0xBF)) => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'t>(pre: &str, text: &'t str) -> Vec<&'t str> {
        let splitter = Splitter::named(pre).expect("a known rule");
        let (mut out, mut start) = (Vec::new(), 0);
        while start < text.len() {
            let end = splitter.piece_end(text, start);
            out.push(&text[start..end]);
            start = end;
        }
        out
    }

    #[test]
    fn alternatives_are_tried_in_order() {
        assert_eq!(pieces("qwen2", "I'LL say 'so"), ["I", "'LL", " say", " '", "so"]);
        assert_eq!(pieces("qwen2", "a12345\tb  c"), ["a", "1", "2", "3", "4", "5", "\tb", " ", " c"]);
        assert_eq!(pieces("qwen2", "f(x):\r\n\n    g"), ["f", "(x", "):\r\n\n", "   ", " g"]);
        assert_eq!(pieces("qwen2", " \t\n \r\n  x \n"), [" \t\n \r\n", " ", " x", " \n"]);
        assert_eq!(pieces("qwen2", "tail   "), ["tail", "   "]);
        assert_eq!(pieces("qwen2", "  1"), [" ", " ", "1"]);
        assert_eq!(pieces("qwen2", "\n!"), ["\n", "!"]);
    }

    #[test]
    fn the_rules_differ_in_combining_marks_alone() {
        assert_eq!(pieces("qwen2", "e\u{301}a x\u{301}"), ["e", "\u{301}a", " x", "\u{301}"]);
        assert_eq!(pieces("qwen35", "e\u{301}a x\u{301}"), ["e\u{301}a", " x\u{301}"]);
        assert_eq!(pieces("qwen2", " \u{301}!\n"), [" \u{301}!\n"]);
        assert_eq!(pieces("qwen35", " \u{301}!\n"), [" \u{301}", "!\n"]);
        assert!(Splitter::named("llama-bpe").is_none());
    }
}
