//! The tokenizer's arrays, as a file stores them.

use gguf::Metadata;
use text::{TokenKind, Vocabulary};

use crate::error::{Error, Result, label};

/// Reads the vocabulary from `tokenizer.ggml.*`. It is not checked beyond being there:
/// [`text::Tokenizer::new`] does that.
///
/// # Errors
/// [`Error::MissingKey`] and [`Error::BadKey`], naming the key.
pub fn vocabulary(metadata: &Metadata) -> Result<Vocabulary> {
    let missing = |key: &str, meaning| Error::MissingKey { key: key.to_string(), meaning };
    let kind = metadata.str("tokenizer.ggml.model")?.unwrap_or("(none)");
    if kind != "gpt2" {
        let (key, found) = ("tokenizer.ggml.model".to_string(), format!("`{}`", label(kind)));
        return Err(Error::BadKey { key, found, expected: "`gpt2` (byte-level BPE)".to_string() });
    }
    let strings = |key: &str, meaning| match metadata.strings(key) {
        Ok(Some(list)) => Ok(list.iter().map(str::to_string).collect::<Vec<_>>()),
        Ok(None) => Err(missing(key, meaning)),
        Err(error) => Err(error.into()),
    };
    let tokens = strings("tokenizer.ggml.tokens", "its tokens")?;
    let merges = strings("tokenizer.ggml.merges", "how tokens are merged")?;
    let kinds = match metadata.ints("tokenizer.ggml.token_type")? {
        Some(values) => Vocabulary::kinds_from_gguf(&values)?,
        None => vec![TokenKind::Normal; tokens.len()],
    };
    let pre = metadata.str("tokenizer.ggml.pre")?;
    let pre = pre.ok_or_else(|| missing("tokenizer.ggml.pre", "how text is split before merging"))?;
    let mut vocabulary = Vocabulary::new(tokens, kinds, merges, pre);
    vocabulary.eos = metadata.u32("tokenizer.ggml.eos_token_id")?;
    vocabulary.bos = metadata.u32("tokenizer.ggml.bos_token_id")?;
    vocabulary.pad = metadata.u32("tokenizer.ggml.padding_token_id")?;
    vocabulary.add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false);
    vocabulary.chat_template = metadata.str("tokenizer.chat_template")?.map(str::to_string);
    Ok(vocabulary)
}
