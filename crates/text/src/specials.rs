//! Finding control and user-defined tokens in text that may contain them.

use crate::TokenKind;

/// One token that is written as a literal string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Special {
    pub(crate) text: String,
    pub(crate) id: u32,
    pub(crate) kind: TokenKind,
}

/// All control and user-defined tokens, sorted by their bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Specials {
    sorted: Vec<Special>,
    /// Whether any of them starts with this byte.
    starts: Vec<bool>,
}

impl Specials {
    pub(crate) fn new(mut sorted: Vec<Special>) -> Specials {
        sorted.sort_by(|a, b| a.text.cmp(&b.text));
        let mut starts = vec![false; 256];
        for special in &sorted {
            starts[usize::from(special.text.as_bytes()[0])] = true;
        }
        Specials { sorted, starts }
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Special> {
        self.sorted.iter()
    }

    /// The longest token that starts exactly at `at`.
    pub(crate) fn longest_at(&self, text: &str, at: usize) -> Option<&Special> {
        let text = &text.as_bytes()[at..];
        let mut candidates = &self.sorted[..];
        let mut longest = None;
        for (position, &byte) in text.iter().enumerate() {
            // All candidates share the bytes before `position`; narrow them to those that go on with `byte`.
            let byte_of = |special: &Special| special.text.as_bytes().get(position).copied();
            let first = candidates.partition_point(|special| byte_of(special) < Some(byte));
            let after = candidates.partition_point(|special| byte_of(special) <= Some(byte));
            candidates = &candidates[first..after];
            match candidates.first() {
                None => break,
                Some(special) if special.text.len() == position + 1 => longest = Some(special),
                Some(_) => {}
            }
        }
        longest
    }

    /// The first token in `text[from..]`, the longest if several start there, and where it starts.
    pub(crate) fn find(&self, text: &str, from: usize) -> Option<(usize, &Special)> {
        if self.sorted.is_empty() {
            return None;
        }
        let bytes = text.as_bytes();
        (from..bytes.len())
            .filter(|&at| self.starts[usize::from(bytes[at])])
            .find_map(|at| self.longest_at(text, at).map(|special| (at, special)))
    }

    /// Length of the longest end of `text` that begins a token without completing it.
    pub(crate) fn unfinished_end(&self, text: &str) -> usize {
        let begins = |end: &str| {
            let first = self.sorted.partition_point(|special| special.text.as_str() < end);
            self.sorted.get(first).is_some_and(|special| special.text.len() > end.len() && special.text.starts_with(end))
                // `end` itself may be a token and also begin a longer one.
                || self.sorted.get(first + 1).is_some_and(|special| special.text.starts_with(end))
        };
        let longest = self.sorted.iter().map(|special| special.text.len()).max().unwrap_or(0);
        let mut lengths = (1..longest.min(text.len() + 1)).rev();
        lengths.find(|&len| text.get(text.len() - len..).is_some_and(begins)).unwrap_or(0)
    }
}
