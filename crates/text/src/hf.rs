//! Reading a Hugging Face tokenizer: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.
//!
//! Only what the family uses is accepted; anything else that would change ids is refused by name.

use std::path::Path;

use serde_json::Value;

use crate::{Error, TokenKind, Vocabulary};

/// The split pattern of Qwen2, Qwen3 and Qwen3-Next.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The split pattern of Qwen3.5: combining marks go with the letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Ids above this are refused before room is made for them (the largest vocabularies have 260,000).
const MAX_ID: u64 = 4_000_000;

impl Vocabulary {
    /// Reads `tokenizer.json` and, if given, `tokenizer_config.json` (special tokens and chat template), both
    /// as text. Gaps in the ids become unused tokens.
    ///
    /// # Errors
    /// Malformed JSON, and every setting that would change ids and is not implemented.
    pub fn from_hf(tokenizer_json: &str, tokenizer_config: Option<&str>) -> Result<Vocabulary, Error> {
        let root = parse("tokenizer.json", tokenizer_json)?;
        let model = root.get("model").ok_or_else(|| malformed("model is missing"))?;
        check_model(model)?;
        let (tokens, kinds) = tokens(model, root.get("added_tokens"))?;
        let mut vocabulary = Vocabulary::new(tokens, kinds, merges(model)?, pre_tokenizer(&root)?);
        vocabulary.nfc = normalizes(&root)?;
        if let Some(text) = tokenizer_config {
            vocabulary.read_config(&parse("tokenizer_config.json", text)?)?;
        }
        Ok(vocabulary)
    }

    /// Reads the tokenizer of a model folder: `tokenizer.json`, and `tokenizer_config.json` and
    /// `chat_template.jinja` where they exist (the latter wins).
    ///
    /// # Errors
    /// Those of [`Vocabulary::from_hf`], and files that cannot be read.
    pub fn from_hf_folder(folder: &Path) -> Result<Vocabulary, Error> {
        let read = |name: &str| -> Result<Option<String>, Error> {
            let path = folder.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) => Ok(Some(text)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => {
                    Err(Error::Read { path: path.display().to_string(), message: error.to_string() })
                }
            }
        };
        let tokenizer = read("tokenizer.json")?.ok_or_else(|| Error::Read {
            path: folder.join("tokenizer.json").display().to_string(),
            message: "no such file; a model folder needs it".to_owned(),
        })?;
        let mut vocabulary = Vocabulary::from_hf(&tokenizer, read("tokenizer_config.json")?.as_deref())?;
        if let Some(template) = read("chat_template.jinja")? {
            vocabulary.chat_template = Some(template);
        }
        Ok(vocabulary)
    }

    fn read_config(&mut self, config: &Value) -> Result<(), Error> {
        self.eos = self.named_token(config, "eos_token")?;
        self.bos = self.named_token(config, "bos_token")?;
        self.pad = self.named_token(config, "pad_token")?;
        self.add_bos = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(false);
        self.chat_template = match config.get("chat_template") {
            Some(Value::String(template)) => Some(template.clone()),
            Some(Value::Array(list)) => default_template(list),
            _ => None,
        };
        Ok(())
    }

    /// The id of a special token that the configuration names by its string, or by an object around it.
    fn named_token(&self, config: &Value, key: &str) -> Result<Option<u32>, Error> {
        let text = match config.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => text,
            Some(value) => match value.get("content") {
                Some(Value::String(text)) => text,
                _ => {
                    let message = format!("{key} is neither a string nor an object with `content`");
                    return Err(Error::Malformed { file: "tokenizer_config.json", message });
                }
            },
        };
        let id = self.tokens.iter().position(|token| token == text);
        let message = || format!("{key} `{text}` is not in the vocabulary");
        match id.and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(Error::Malformed { file: "tokenizer_config.json", message: message() }),
        }
    }
}

fn parse(file: &'static str, text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|error| Error::Malformed { file, message: error.to_string() })
}

fn malformed(message: impl Into<String>) -> Error {
    Error::Malformed { file: "tokenizer.json", message: message.into() }
}

fn unsupported(field: &'static str, found: &Value, expected: &'static str) -> Error {
    let mut found = found.to_string();
    if let Some((end, _)) = found.char_indices().nth(160) {
        found.truncate(end);
        found.push('…');
    }
    Error::Unsupported { field, found, expected }
}

/// Of several named templates, the one called `default`.
fn default_template(list: &[Value]) -> Option<String> {
    let named = |entry: &&Value| entry.get("name").and_then(Value::as_str) == Some("default");
    let entry = list.iter().find(named)?;
    Some(entry.get("template")?.as_str()?.to_owned())
}

/// Refuses every setting of the BPE model that is not plain byte-level BPE.
fn check_model(model: &Value) -> Result<(), Error> {
    // (path, key, the values that change nothing; an absent key is one of them)
    let harmless: [(&'static str, &str, &[Value]); 7] = [
        ("model.type", "type", &[Value::Null, Value::String("BPE".to_owned())]),
        ("model.dropout", "dropout", &[Value::Null]),
        ("model.unk_token", "unk_token", &[Value::Null]),
        (
            "model.continuing_subword_prefix",
            "continuing_subword_prefix",
            &[Value::Null, Value::String(String::new())],
        ),
        ("model.end_of_word_suffix", "end_of_word_suffix", &[Value::Null, Value::String(String::new())]),
        ("model.byte_fallback", "byte_fallback", &[Value::Null, Value::Bool(false)]),
        ("model.ignore_merges", "ignore_merges", &[Value::Null, Value::Bool(false)]),
    ];
    for (field, key, values) in harmless {
        let value = &model[key];
        if !values.contains(value) {
            return Err(unsupported(field, value, "only plain byte-level BPE is implemented"));
        }
    }
    Ok(())
}

/// Token strings and kinds by id, from the model's vocabulary and the added tokens.
fn tokens(model: &Value, added: Option<&Value>) -> Result<(Vec<String>, Vec<TokenKind>), Error> {
    let vocab = model["vocab"].as_object().ok_or_else(|| malformed("model.vocab is not an object"))?;
    let mut entries: Vec<(u64, &str, TokenKind)> = Vec::with_capacity(vocab.len());
    for (token, id) in vocab {
        let id = id.as_u64().ok_or_else(|| malformed(format!("model.vocab: `{token}` has no integer id")))?;
        entries.push((id, token, TokenKind::Normal));
    }
    let added = match added {
        None | Some(Value::Null) => &[][..],
        Some(value) => value.as_array().ok_or_else(|| malformed("added_tokens is not an array"))?,
    };
    for token in added {
        entries.push(added_token(token)?);
    }
    place(&entries)
}

fn added_token(token: &Value) -> Result<(u64, &str, TokenKind), Error> {
    for key in ["single_word", "lstrip", "rstrip", "normalized"] {
        if token[key] == Value::Bool(true) {
            return Err(unsupported(
                "added_tokens[]",
                token,
                "single_word, lstrip, rstrip and normalized are not",
            ));
        }
    }
    let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
        return Err(malformed(format!("added_tokens: {token} lacks `id` or `content`")));
    };
    let special = token["special"] == Value::Bool(true);
    Ok((id, content, if special { TokenKind::Control } else { TokenKind::UserDefined }))
}

/// Puts the entries at their ids; an added token may repeat the entry of the vocabulary it stands for.
fn place(entries: &[(u64, &str, TokenKind)]) -> Result<(Vec<String>, Vec<TokenKind>), Error> {
    let highest = entries.iter().map(|&(id, ..)| id).max().unwrap_or(0);
    if highest > MAX_ID {
        return Err(Error::TooLarge(format!("token id {highest}; at most {MAX_ID} is accepted")));
    }
    let mut slots: Vec<Option<(&str, TokenKind)>> = vec![None; highest as usize + 1];
    for &(id, token, kind) in entries {
        match slots[id as usize] {
            Some((other, _)) if other != token => {
                return Err(malformed(format!("id {id} is both `{other}` and `{token}`")));
            }
            _ => slots[id as usize] = Some((token, kind)),
        }
    }
    let fill = |(id, slot): (usize, Option<(&str, TokenKind)>)| match slot {
        Some((token, kind)) => (token.to_owned(), kind),
        None => (format!("[PAD{id}]"), TokenKind::Unused),
    };
    Ok(slots.into_iter().enumerate().map(fill).unzip())
}

/// Merges as `"left right"`, from that form or from pairs.
fn merges(model: &Value) -> Result<Vec<String>, Error> {
    let list = model["merges"].as_array().ok_or_else(|| malformed("model.merges is not an array"))?;
    let merge = |(index, entry): (usize, &Value)| match entry {
        Value::String(merge) => Ok(merge.clone()),
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(left), Value::String(right)] => Ok(format!("{left} {right}")),
            _ => Err(malformed(format!("model.merges[{index}] is not a pair of strings"))),
        },
        _ => Err(malformed(format!("model.merges[{index}] is neither a string nor a pair"))),
    };
    list.iter().enumerate().map(merge).collect()
}

/// Which splitter the pre-tokenizer is: a `Split` by one of the two known patterns, then `ByteLevel`.
fn pre_tokenizer(root: &Value) -> Result<&'static str, Error> {
    const EXPECTED: &str = "only the splits of Qwen2 (qwen2) and Qwen3.5 (qwen35) are implemented";
    let found = &root["pre_tokenizer"];
    let refuse = || unsupported("pre_tokenizer", found, EXPECTED);
    let steps = found["pretokenizers"].as_array().ok_or_else(refuse)?;
    let [split, bytes] = steps.as_slice() else { return Err(refuse()) };
    let plain_split = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] != true;
    let plain_bytes =
        bytes["type"] == "ByteLevel" && bytes["add_prefix_space"] != true && bytes["use_regex"] == false;
    if found["type"] != "Sequence" || !plain_split || !plain_bytes {
        return Err(refuse());
    }
    match split["pattern"]["Regex"].as_str() {
        Some(QWEN2) => Ok("qwen2"),
        Some(QWEN35) => Ok("qwen35"),
        _ => Err(refuse()),
    }
}

/// Whether text is normalised to NFC; any other normaliser is refused.
fn normalizes(root: &Value) -> Result<bool, Error> {
    let found = &root["normalizer"];
    let inner = match found["normalizers"].as_array().map(Vec::as_slice) {
        Some([]) => return Ok(false),
        Some([only]) if found["type"] == "Sequence" => only,
        _ => found,
    };
    match inner["type"].as_str() {
        Some("NFC") => Ok(true),
        None if found.is_null() => Ok(false),
        _ => Err(unsupported("normalizer", found, "only NFC and none are implemented")),
    }
}
