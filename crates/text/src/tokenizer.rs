//! Text to ids and back.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};

use crate::bpe::{Bpe, Merge};
use crate::cache::Cache;
use crate::guard::Segment;
use crate::normalize::nfc;
use crate::specials::{Special, Specials};
use crate::split::Splitter;
use crate::{Decoder, Error, Rendered, TokenKind, Vocabulary};

/// Caches kept for later calls; more threads than this encode with a fresh one.
const CACHES: usize = 4;

/// A byte-level BPE tokenizer, checked and ready. Shared between threads by reference.
pub struct Tokenizer {
    splitter: Splitter,
    nfc: bool,
    bpe: Bpe,
    specials: Specials,
    kinds: Vec<TokenKind>,
    /// Bytes of token `i`: `bytes[offsets[i]..offsets[i + 1]]`.
    bytes: Vec<u8>,
    offsets: Vec<u32>,
    eos: Option<u32>,
    bos: Option<u32>,
    pad: Option<u32>,
    add_bos: bool,
    caches: Mutex<Vec<Cache>>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("tokens", &self.len())
            .field("nfc", &self.nfc)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Checks a vocabulary and builds the tokenizer of it.
    ///
    /// # Errors
    /// Whatever would make ids wrong or ambiguous: an unknown pre-tokenizer, duplicate tokens or merges, merges of
    /// unknown tokens, a byte without a token, ids out of range.
    pub fn new(vocabulary: Vocabulary) -> Result<Tokenizer, Error> {
        let Vocabulary { tokens, kinds, merges, pre, nfc, eos, bos, pad, add_bos, chat_template: _ } =
            vocabulary;
        let splitter = Splitter::named(&pre).ok_or(Error::UnknownPreTokenizer(pre))?;
        if tokens.len() != kinds.len() {
            return Err(Error::KindCount { tokens: tokens.len(), kinds: kinds.len() });
        }
        for (name, id) in [("eos", eos), ("bos", bos), ("pad", pad)] {
            if let Some(id) = id.filter(|&id| id as usize >= tokens.len()) {
                return Err(Error::IdOutOfRange { name, id, tokens: tokens.len() });
            }
        }
        let ids = ids(&tokens)?;
        let (bytes, offsets) = token_bytes(&tokens, &kinds)?;
        Ok(Tokenizer {
            splitter,
            nfc,
            bpe: bpe(&ids, &kinds, &merges)?,
            specials: specials(&tokens, &kinds)?,
            kinds,
            bytes,
            offsets,
            eos,
            bos,
            pad,
            add_bos,
            caches: Mutex::new(Vec::new()),
        })
    }

    /// Number of tokens; ids are below it.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether there is no token at all; never, as each byte has one.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// End of an answer.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Start of a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Fills batches.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// The token that a raw prompt has to start with, if the model wants one. Encoding does not add it.
    pub fn bos_of_raw_prompt(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// Every token that ends an answer: `eos`, and the family's `<|im_end|>` and `<|endoftext|>` where they are
    /// control tokens.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let named = ["<|im_end|>", "<|endoftext|>"].into_iter().filter_map(|text| self.special(text));
        let control = |id: &u32| self.kind(*id) == Some(TokenKind::Control);
        let mut stops: Vec<u32> = self.eos.into_iter().chain(named.filter(control)).collect();
        stops.sort_unstable();
        stops.dedup();
        stops
    }

    /// The id of a control or user-defined token written `text`.
    pub fn special(&self, text: &str) -> Option<u32> {
        let special = (!text.is_empty()).then(|| self.specials.longest_at(text, 0))??;
        (special.text.len() == text.len()).then_some(special.id)
    }

    /// What a token is; `None` for an id that is not in the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The bytes a token stands for, not always whole characters; for control tokens, how they are written.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let start = *self.offsets.get(id as usize)?;
        let end = *self.offsets.get(id as usize + 1)?;
        Some(&self.bytes[start as usize..end as usize])
    }

    /// Ids of text from outside: everything in it is ordinary text, `<|im_end|>` and `<think>` included.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3);
        self.with_cache(|cache| self.encode_plain(text, cache, &mut out));
        out
    }

    /// Ids of a prompt whose author writes control tokens on purpose: each control and user-defined token in it
    /// becomes its id. Never for text from elsewhere.
    pub fn encode_raw_with_specials(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3);
        let mut start = 0;
        self.with_cache(|cache| {
            while let Some((at, special)) = self.specials.find(text, start) {
                self.encode_plain(&text[start..at], cache, &mut out);
                out.push(special.id);
                start = at + special.text.len();
            }
            self.encode_plain(&text[start..], cache, &mut out);
        });
        out
    }

    /// Ids of a rendered prompt: control tokens are those that the template wrote itself.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Vec<u32> {
        let mut out = Vec::new();
        self.with_cache(|cache| {
            for segment in rendered.segments() {
                match segment {
                    Segment::Text(text) => self.encode_plain(text, cache, &mut out),
                    Segment::Token { id, .. } => out.push(*id),
                }
            }
        });
        out
    }

    /// The text of some ids, control tokens left out, invalid UTF-8 replaced by U+FFFD. Ids outside the vocabulary
    /// stand for nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut decoder = Decoder::new();
        let mut out = String::new();
        for &id in ids {
            out.push_str(&decoder.push(self, id));
        }
        out.push_str(&decoder.finish());
        out
    }

    pub(crate) fn specials(&self) -> &Specials {
        &self.specials
    }

    fn with_cache(&self, encode: impl FnOnce(&mut Cache)) {
        // A panic elsewhere cannot leave a cache half-written here: caches are outside the lock while in use.
        let caches = || self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cache = caches().pop().unwrap_or_else(Cache::new);
        encode(&mut cache);
        let mut caches = caches();
        if caches.len() < CACHES {
            caches.push(cache);
        }
    }

    fn encode_plain(&self, text: &str, cache: &mut Cache, out: &mut Vec<u32>) {
        let normalized = if self.nfc { nfc(text) } else { Cow::Borrowed(text) };
        let text = &*normalized;
        let mut start = 0;
        while start < text.len() {
            let end = self.splitter.piece_end(text, start);
            cache.encode(text.as_bytes(), (start, end), out, |piece, out| self.bpe.encode(piece, out));
            start = end;
        }
    }
}

fn ids(tokens: &[String]) -> Result<HashMap<&str, u32>, Error> {
    let too_many = |_| Error::TooLarge(format!("{} tokens", tokens.len()));
    u32::try_from(tokens.len()).map_err(too_many)?;
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, token) in (0u32..).zip(tokens) {
        match ids.entry(token.as_str()) {
            Entry::Vacant(entry) => entry.insert(id),
            Entry::Occupied(entry) => {
                return Err(Error::DuplicateToken { token: token.clone(), first: *entry.get(), second: id });
            }
        };
    }
    Ok(ids)
}

fn specials(tokens: &[String], kinds: &[TokenKind]) -> Result<Specials, Error> {
    let mut specials = Vec::new();
    for (id, (token, &kind)) in (0u32..).zip(tokens.iter().zip(kinds)) {
        if !matches!(kind, TokenKind::Control | TokenKind::UserDefined) {
            continue;
        }
        if token.is_empty() {
            return Err(Error::EmptyControlToken(id));
        }
        specials.push(Special { text: token.clone(), id, kind });
    }
    Ok(Specials::new(specials))
}

/// Text is spelled with normal tokens only. A merge that makes another kind of token is left out: a file may declare a
/// word a control token, and then text must be unable to spell it.
fn bpe(ids: &HashMap<&str, u32>, kinds: &[TokenKind], merges: &[String]) -> Result<Bpe, Error> {
    let is_normal = |id: u32| kinds[id as usize] == TokenKind::Normal;
    let mut bytes = [0; 256];
    for (byte, id) in (0u8..=255).zip(&mut bytes) {
        let token = char_of_byte(byte);
        let normal = ids.get(token.encode_utf8(&mut [0; 4]) as &str).filter(|&&id| is_normal(id));
        *id = *normal.ok_or(Error::MissingByte(byte))?;
    }
    let mut bpe = Bpe::new(bytes, merges.len());
    let mut joined = String::new();
    for (index, merge) in merges.iter().enumerate() {
        let bad = || Error::BadMerge { index, merge: merge.clone() };
        let (left, right) = merge.split_once(' ').ok_or_else(bad)?;
        if left.is_empty() || right.is_empty() || right.contains(' ') {
            return Err(bad());
        }
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let id = |token: &str| {
            let unknown =
                || Error::MergeOfUnknownToken { index, merge: merge.clone(), token: token.to_owned() };
            ids.get(token).copied().ok_or_else(unknown)
        };
        let rank = u32::try_from(index).map_err(|_| Error::TooLarge(format!("{} merges", merges.len())))?;
        let (left, right, made) = (id(left)?, id(right)?, Merge { rank, token: id(&joined)? });
        if is_normal(made.token) && !bpe.insert(left, right, made) {
            return Err(Error::DuplicateMerge { index, merge: merge.clone() });
        }
    }
    Ok(bpe)
}

/// The bytes of all tokens in one buffer, and where each starts.
fn token_bytes(tokens: &[String], kinds: &[TokenKind]) -> Result<(Vec<u8>, Vec<u32>), Error> {
    let total: usize = tokens.iter().map(String::len).sum();
    u32::try_from(total).map_err(|_| Error::TooLarge(format!("{total} bytes of token text")))?;
    let mut bytes = Vec::with_capacity(total);
    let mut offsets = Vec::with_capacity(tokens.len() + 1);
    let byte_of_char = byte_of_char();
    for (token, kind) in tokens.iter().zip(kinds) {
        offsets.push(bytes.len() as u32);
        let start = bytes.len();
        let spelled = match kind {
            TokenKind::Normal => token.chars().all(|c| {
                let byte = byte_of_char.get(c as usize).copied().flatten();
                bytes.extend(byte);
                byte.is_some()
            }),
            TokenKind::Byte => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                bytes.extend(byte);
                byte.is_some()
            }
            _ => false,
        };
        if !spelled {
            // Not in byte form: the token is its own text, as other readers take it.
            bytes.truncate(start);
            bytes.extend_from_slice(token.as_bytes());
        }
    }
    offsets.push(bytes.len() as u32);
    Ok((bytes, offsets))
}

/// GPT-2's printable character for a byte: itself where it is printable in Latin-1, else the next one from
/// U+0100 on.
fn char_of_byte(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    char::from_u32(0x100 + before).expect("68 characters follow U+0100")
}

/// The inverse of [`char_of_byte`], indexed by code point.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x150];
    for byte in 0..=255 {
        table[char_of_byte(byte) as usize] = Some(byte);
    }
    table
}
