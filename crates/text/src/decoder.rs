//! Ids to text, one at a time.

use crate::{TokenKind, Tokenizer};

/// Turns tokens into text as they come. What has been given out so far, and the end of it after
/// [`Decoder::finish`], is exactly [`String::from_utf8_lossy`] of all bytes: a character is held back until it is whole,
/// and bytes that cannot become one any more are U+FFFD at once.
#[derive(Debug, Clone, Default)]
pub struct Decoder {
    /// The bytes of a character that is not whole yet; at most three.
    pending: Vec<u8>,
    show_control: bool,
}

impl Decoder {
    /// A decoder that leaves control tokens out.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// A decoder that writes control tokens as they are spelled.
    pub fn with_control_tokens() -> Decoder {
        Decoder { show_control: true, ..Decoder::default() }
    }

    /// The text that `id` completes. Ids that are unused or not in the vocabulary add nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let shown = match tokenizer.kind(id) {
            None | Some(TokenKind::Unused) => false,
            Some(TokenKind::Control) => self.show_control,
            Some(_) => true,
        };
        let bytes = tokenizer.token_bytes(id).filter(|_| shown);
        self.push_bytes(bytes.unwrap_or_default())
    }

    /// The text that some bytes complete.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut out = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = done + invalid.len() == self.pending.len();
            if invalid.is_empty() || (at_end && is_unfinished(invalid)) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.pending.drain(..done);
        out
    }

    /// What is still held back: U+FFFD if the text ends inside a character, else nothing.
    pub fn finish(&mut self) -> String {
        let unfinished = !self.pending.is_empty();
        self.pending.clear();
        if unfinished { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }

    /// Whether the last character is not whole yet.
    pub fn is_unfinished(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Whether more bytes could still make this a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
