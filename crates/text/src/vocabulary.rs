//! The tokenizer as plain arrays: what a GGUF file stores, and what [`crate::Tokenizer`] is built from.

use crate::Error;

/// What a token is, numbered as in `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum TokenKind {
    /// A piece of text in GPT-2's byte-to-unicode form.
    Normal = 1,
    /// Stands for text the vocabulary cannot spell; byte-level vocabularies have none.
    Unknown = 2,
    /// Steers the model (`<|im_start|>`); never shown, never made from user text.
    Control = 3,
    /// A literal string with an id of its own (`<think>`); shown.
    UserDefined = 4,
    /// Fills a gap in the ids.
    Unused = 5,
    /// One byte, written `<0x0A>`.
    Byte = 6,
}

impl TokenKind {
    /// The kind numbered `value` in a GGUF file, if there is one.
    pub fn from_gguf(value: i64) -> Option<TokenKind> {
        Some(match value {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => return None,
        })
    }

    /// The number a GGUF file stores for this kind.
    pub fn to_gguf(self) -> i32 {
        self as i32
    }
}

/// A byte-level BPE tokenizer as plain arrays, unchecked; [`crate::Tokenizer::new`] checks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// Token strings by id: normal ones in GPT-2's byte-to-unicode form, the others literal.
    pub tokens: Vec<String>,
    /// One kind per token.
    pub kinds: Vec<TokenKind>,
    /// Merges `"left right"`, best first.
    pub merges: Vec<String>,
    /// Name of the pre-tokenizer, as in `tokenizer.ggml.pre`: `qwen2` or `qwen35`.
    pub pre: String,
    /// Normalise text to NFC before splitting. GGUF has no key for it; every model of the family does it.
    pub nfc: bool,
    /// End of an answer.
    pub eos: Option<u32>,
    /// Start of a text.
    pub bos: Option<u32>,
    /// Fills batches; never generated on purpose.
    pub pad: Option<u32>,
    /// A raw prompt starts with `bos`. Templates write theirs themselves.
    pub add_bos: bool,
    /// The chat template (Jinja), if the model has one.
    pub chat_template: Option<String>,
}

impl Vocabulary {
    /// A vocabulary from the four arrays, with NFC on (the family's rule) and nothing else set.
    pub fn new(tokens: Vec<String>, kinds: Vec<TokenKind>, merges: Vec<String>, pre: &str) -> Vocabulary {
        Vocabulary {
            tokens,
            kinds,
            merges,
            pre: pre.to_owned(),
            nfc: true,
            eos: None,
            bos: None,
            pad: None,
            add_bos: false,
            chat_template: None,
        }
    }

    /// Kinds from the numbers of `tokenizer.ggml.token_type`.
    ///
    /// # Errors
    /// A number outside 1..=6, with the id that has it.
    pub fn kinds_from_gguf(values: &[i64]) -> Result<Vec<TokenKind>, Error> {
        let kind =
            |(id, &value): (usize, &i64)| TokenKind::from_gguf(value).ok_or(Error::UnknownKind { id, value });
        values.iter().enumerate().map(kind).collect()
    }

    /// Appends unused tokens `[PAD<id>]` until there are `len` tokens: embeddings are often longer than the
    /// tokenizer, and a GGUF file wants one token per row. Does nothing when there are enough.
    pub fn pad_to(&mut self, len: usize) {
        for id in self.tokens.len()..len {
            self.tokens.push(format!("[PAD{id}]"));
            self.kinds.push(TokenKind::Unused);
        }
    }
}
