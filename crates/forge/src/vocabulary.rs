//! The tokenizer in the file's metadata, and the vocabulary of synthetic models.

use gguf::{Metadata, Strings, Value};
use text::{TokenKind, Vocabulary};

use crate::error::Error;

/// Writes a vocabulary under the keys of the format.
pub(crate) fn describe_vocabulary(vocabulary: &Vocabulary, metadata: &mut Metadata) {
    let mut set = |key: &str, value: Value| metadata.set(format!("tokenizer.ggml.{key}"), value);
    set("model", "gpt2".into());
    set("pre", vocabulary.pre.as_str().into());
    set("tokens", vocabulary.tokens.iter().collect::<Strings>().into());
    set("token_type", vocabulary.kinds.iter().map(|kind| kind.to_gguf()).collect::<Vec<i32>>().into());
    set("merges", vocabulary.merges.iter().collect::<Strings>().into());
    let ids = [
        ("eos_token_id", vocabulary.eos),
        ("bos_token_id", vocabulary.bos),
        ("padding_token_id", vocabulary.pad),
    ];
    for (key, id) in ids {
        if let Some(id) = id {
            set(key, id.into());
        }
    }
    set("add_bos_token", vocabulary.add_bos.into());
    if let Some(template) = &vocabulary.chat_template {
        metadata.set("tokenizer.chat_template", template.as_str());
    }
}

/// The plainest ChatML template.
const CHATML: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + \
                      '<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}\
                      {{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Control tokens, at the end of the vocabulary as in the models of the family.
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A few merges, so that tokenization has something to merge. `Ġ` stands for a space.
const MERGES: [&str; 24] = [
    "Ġ t",
    "h e",
    "i n",
    "r e",
    "o n",
    "Ġt he",
    "e r",
    "a t",
    "Ġ a",
    "e n",
    "Ġ s",
    "o r",
    "Ġ c",
    "e s",
    "Ġ i",
    "Ġ w",
    "Ġ o",
    "i t",
    "Ġ f",
    "Ġ b",
    "a n",
    "in g",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
];

/// The fewest tokens of a synthetic vocabulary: one per byte, and the control tokens.
pub const MIN_VOCABULARY: u32 = 256 + CONTROL.len() as u32;

/// A byte-level vocabulary of exactly `len` tokens: bytes, a few merges, filler words that no text leads to, and
/// the control tokens of ChatML.
pub(crate) fn synthetic(len: u32) -> Result<Vocabulary, Error> {
    if len < MIN_VOCABULARY {
        let what = format!("{len} is less than {MIN_VOCABULARY}, one token per byte and the control tokens");
        return Err(Error::option("vocab", what));
    }
    let room = (len - MIN_VOCABULARY) as usize;
    let merges: Vec<String> = MERGES.iter().take(room).map(|merge| merge.to_string()).collect();
    let mut tokens = byte_tokens();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let normal = len as usize - CONTROL.len();
    for id in tokens.len()..normal {
        tokens.push(format!("Ġtoken{id}"));
    }
    tokens.extend(CONTROL.iter().map(|token| token.to_string()));
    let mut kinds = vec![TokenKind::Normal; normal];
    kinds.resize(len as usize, TokenKind::Control);

    let mut vocabulary = Vocabulary::new(tokens, kinds, merges, "qwen2");
    vocabulary.eos = Some(len - 1);
    vocabulary.bos = Some(len - 3);
    vocabulary.pad = Some(len - 3);
    vocabulary.chat_template = Some(CHATML.to_owned());
    Ok(vocabulary)
}

/// The 256 single-byte tokens in GPT-2's order and form: printable Latin-1 characters stand for themselves and come
/// first, the other bytes follow as characters from U+0100 on.
fn byte_tokens() -> Vec<String> {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = (0..256).filter(|byte| !printable(byte)).count() as u32;
    let characters = (0..256).filter(printable).chain(256..256 + others);
    characters.filter_map(char::from_u32).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synthetic_vocabulary_is_one_the_tokenizer_accepts() {
        for len in [MIN_VOCABULARY, MIN_VOCABULARY + 1, MIN_VOCABULARY + 24, 1000] {
            let vocabulary = synthetic(len).unwrap();
            assert_eq!(vocabulary.tokens.len(), len as usize);
            let eos = vocabulary.eos.unwrap();
            assert_eq!(vocabulary.tokens[eos as usize], "<|im_end|>");
            let tokenizer = text::Tokenizer::new(vocabulary).unwrap();
            let source = "the rain in\tSpain\n größe 雨 \u{1f327}";
            let ids = tokenizer.encode_text(source);
            assert!(ids.iter().all(|&id| id < len - 3));
            assert_eq!(tokenizer.decode(&ids), source);
        }
        assert!(synthetic(MIN_VOCABULARY - 1).is_err());
    }

    #[test]
    fn merges_are_used() {
        let tokenizer = text::Tokenizer::new(synthetic(1000).unwrap()).unwrap();
        assert_eq!(tokenizer.encode_text(" the").len(), 1);
    }
}
