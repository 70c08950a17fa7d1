//! Vocabularies that cannot be right, and what a good one says of itself.

mod common;

use common::{POCKET, POCKET_CONFIG, Random, tokenizer, vocabulary};
use serde_json::{Value, json};
use text::{Error, TokenKind, Tokenizer, Vocabulary};

#[track_caller]
fn refused(change: impl FnOnce(&mut Vocabulary)) -> Error {
    let mut vocabulary = vocabulary();
    change(&mut vocabulary);
    Tokenizer::new(vocabulary).expect_err("a bad vocabulary")
}

#[test]
fn the_pocket_tokenizer_is_read_completely() {
    let vocabulary = vocabulary();
    assert_eq!((vocabulary.tokens.len(), vocabulary.merges.len()), (4096, 3833));
    assert_eq!((vocabulary.pre.as_str(), vocabulary.nfc, vocabulary.add_bos), ("qwen2", true, false));
    assert_eq!((vocabulary.eos, vocabulary.bos, vocabulary.pad), (Some(4091), None, Some(4089)));
    assert_eq!(vocabulary.tokens[4090], "<|im_start|>");
    assert_eq!(vocabulary.kinds[4090], TokenKind::Control);
    assert_eq!(vocabulary.kinds[4092], TokenKind::UserDefined);
    assert!(vocabulary.chat_template.as_deref().is_some_and(|template| template.contains("<|im_start|>")));
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.stop_tokens(), [4089, 4091]);
    assert_eq!(tokenizer.special("</think>"), Some(4093));
    assert_eq!(
        (tokenizer.special("</thin"), tokenizer.special(""), tokenizer.special("a")),
        (None, None, None)
    );
    assert_eq!(tokenizer.bos_of_raw_prompt(), None);
}

#[test]
fn merges_may_be_strings_and_ids_may_have_gaps() {
    let mut root: Value = serde_json::from_str(POCKET).expect("JSON");
    let merges = root["model"]["merges"].as_array().expect("an array");
    let strings = merges
        .iter()
        .map(|pair| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())));
    root["model"]["merges"] = strings.collect();
    root["added_tokens"][6]["id"] = json!(4100);
    let read = Vocabulary::from_hf(&root.to_string(), None).expect("a good tokenizer");
    assert_eq!(read.merges, vocabulary().merges);
    assert_eq!(
        (read.tokens.len(), read.kinds[4097], read.tokens[4097].as_str()),
        (4101, TokenKind::Unused, "[PAD4097]")
    );
    let mut padded = read.clone();
    padded.pad_to(4224);
    assert_eq!((padded.tokens.len(), padded.kinds.len()), (4224, 4224));
    let tokenizer = Tokenizer::new(padded).expect("padding is harmless");
    assert_eq!(tokenizer.decode(&[4200]), "");
}

#[test]
fn each_defect_of_the_arrays_is_named() {
    assert_eq!(
        refused(|v| v.pre = "llama-bpe".to_owned()),
        Error::UnknownPreTokenizer("llama-bpe".to_owned())
    );
    assert_eq!(refused(|v| v.pre.clear()), Error::UnknownPreTokenizer(String::new()));
    assert_eq!(refused(|v| v.kinds.truncate(4095)), Error::KindCount { tokens: 4096, kinds: 4095 });
    assert_eq!(refused(|v| v.eos = Some(4096)), Error::IdOutOfRange { name: "eos", id: 4096, tokens: 4096 });
    let twice = refused(|v| v.tokens[900] = v.tokens[800].clone());
    assert!(matches!(twice, Error::DuplicateToken { first: 800, second: 900, .. }), "{twice}");
    assert_eq!(refused(|v| v.tokens[4091].clear()), Error::EmptyControlToken(4091));
    let lost = |v: &mut Vocabulary| {
        let at = v.tokens.iter().position(|token| token == "a").expect("a");
        v.tokens[at] = "lost".to_owned();
    };
    assert_eq!(refused(lost), Error::MissingByte(b'a'));
    let steering = |v: &mut Vocabulary| {
        let at = v.tokens.iter().position(|token| token == "a").expect("a");
        v.kinds[at] = TokenKind::Control;
    };
    assert_eq!(refused(steering), Error::MissingByte(b'a'), "text cannot be spelled with control tokens");
    for bad in ["", " ", "ab", "a ", " b", "a b c", "a  b"] {
        assert_eq!(
            refused(|v| v.merges[5] = bad.to_owned()),
            Error::BadMerge { index: 5, merge: bad.to_owned() }
        );
    }
    let unknown = |merge: &str, token: &str| Error::MergeOfUnknownToken {
        index: 7,
        merge: merge.to_owned(),
        token: token.to_owned(),
    };
    assert_eq!(refused(|v| v.merges[7] = "qqq e".to_owned()), unknown("qqq e", "qqq"));
    assert_eq!(refused(|v| v.merges[7] = "q ~".to_owned()), unknown("q ~", "q~"));
    let again = refused(|v| v.merges[9] = v.merges[3].clone());
    assert!(matches!(again, Error::DuplicateMerge { index: 9, .. }), "{again}");
    assert_eq!(Vocabulary::kinds_from_gguf(&[1, 3, 7]), Err(Error::UnknownKind { id: 2, value: 7 }));
    assert_eq!(Vocabulary::kinds_from_gguf(&[6, -1]), Err(Error::UnknownKind { id: 1, value: -1 }));
    for kind in 1..=6 {
        assert_eq!(TokenKind::from_gguf(kind).map(|kind| i64::from(kind.to_gguf())), Some(kind));
    }
}

#[test]
fn merges_make_no_control_tokens_of_text() {
    let mut vocabulary = vocabulary();
    let the = vocabulary.tokens.iter().position(|token| token == "Ġthe").expect("a common word");
    let plain = Tokenizer::new(vocabulary.clone()).expect("a good vocabulary");
    assert_eq!(plain.encode_text(" the"), [the as u32]);
    for kind in [TokenKind::Control, TokenKind::UserDefined, TokenKind::Unused] {
        vocabulary.kinds[the] = kind;
        let tokenizer = Tokenizer::new(vocabulary.clone()).expect("an odd vocabulary, but a safe one");
        let ids = tokenizer.encode_text(" the");
        assert!(ids.iter().all(|&id| tokenizer.kind(id) == Some(TokenKind::Normal)), "{kind:?}: {ids:?}");
        assert_eq!(tokenizer.decode(&ids), " the", "{kind:?}");
    }
}

#[test]
fn settings_that_would_change_ids_are_refused() {
    let changed = |pointer: &str, value: Value| {
        let mut root: Value = serde_json::from_str(POCKET).expect("JSON");
        match root.pointer_mut(pointer) {
            Some(field) => *field = value,
            None => {
                let (parent, key) = pointer.rsplit_once('/').expect("a path");
                root.pointer_mut(parent).expect("the parent")[key] = value;
            }
        }
        Vocabulary::from_hf(&root.to_string(), None).expect_err("an unsupported setting").to_string()
    };
    let split = "/pre_tokenizer/pretokenizers/0";
    for (pointer, value, named) in [
        ("/model/type", json!("Unigram"), "model.type"),
        ("/model/ignore_merges", json!(true), "model.ignore_merges"),
        ("/model/byte_fallback", json!(true), "model.byte_fallback"),
        ("/model/end_of_word_suffix", json!("</w>"), "model.end_of_word_suffix"),
        ("/model/vocab", json!([]), "model.vocab"),
        ("/model/vocab/a", json!(-1), "`a`"),
        ("/model/vocab/a", json!(1e12 as u64), "1000000000000"),
        ("/model/vocab/a", json!(5), "id 5"),
        ("/model/merges", json!({}), "model.merges"),
        ("/model/merges/2", json!(["a"]), "model.merges[2]"),
        ("/normalizer", json!({"type": "NFKC"}), "normalizer"),
        ("/pre_tokenizer", json!(null), "pre_tokenizer"),
        ("/pre_tokenizer/pretokenizers/1/use_regex", json!(true), "pre_tokenizer"),
        (&format!("{split}/pattern/Regex"), json!(r"\p{N}{1,3}|\w+"), "pre_tokenizer"),
        (&format!("{split}/behavior"), json!("Removed"), "pre_tokenizer"),
        ("/added_tokens/0/lstrip", json!(true), "added_tokens"),
        ("/added_tokens/0/content", json!(null), "added_tokens"),
        ("/model", json!(null), "model"),
    ] {
        let message = changed(pointer, value);
        assert!(message.contains(named), "{pointer}: {message}");
    }
    let config =
        |text: &str| Vocabulary::from_hf(POCKET, Some(text)).expect_err("a bad configuration").to_string();
    assert!(config("{").contains("tokenizer_config.json"));
    assert!(config(r#"{"eos_token": "<|nothing|>"}"#).contains("<|nothing|>"));
    assert!(config(r#"{"eos_token": 5}"#).contains("eos_token"));
    assert!(Vocabulary::from_hf("[", None).is_err() && Vocabulary::from_hf("[]", None).is_err());
}

#[test]
fn a_configuration_may_wrap_its_tokens_and_name_its_templates() {
    let config = json!({
        "eos_token": {"content": "<|endoftext|>", "special": true}, "add_bos_token": true, "bos_token": "<|im_start|>",
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    });
    let read = Vocabulary::from_hf(POCKET, Some(&config.to_string())).expect("a good tokenizer");
    assert_eq!((read.eos, read.bos, read.chat_template.as_deref()), (Some(4089), Some(4090), Some("d")));
    assert_eq!(Tokenizer::new(read).expect("good").bos_of_raw_prompt(), Some(4090));
    let folder = Vocabulary::from_hf_folder(std::path::Path::new("/nonexistent"));
    assert!(matches!(folder, Err(Error::Read { path, .. }) if path.ends_with("tokenizer.json")));
}

/// Changes at random what a file could hold: an error or a tokenizer that works, never a panic.
#[test]
fn damaged_arrays_never_panic() {
    let mut random = Random(0xBAD);
    let good = vocabulary();
    for _ in 0..60 {
        let mut damaged = good.clone();
        for _ in 0..=random.below(3) {
            let (a, b) = (random.below(damaged.tokens.len()), random.below(damaged.merges.len()));
            match random.below(8) {
                0 => {
                    damaged.tokens[a] =
                        random.pick(&["", " ", "é\0", "<0x0A>", "<0xZZ>", "\u{10FFFF}"]).to_owned()
                }
                1 if a < damaged.kinds.len() => {
                    damaged.kinds[a] = TokenKind::from_gguf(1 + random.below(6) as i64).expect("1 to 6")
                }
                2 => {
                    damaged.merges[b] = format!(
                        "{} {}",
                        damaged.tokens[a],
                        damaged.tokens[random.below(1000) % damaged.tokens.len()]
                    )
                }
                3 => damaged.merges.swap(b, 0),
                4 => damaged.tokens.truncate(a + 1),
                5 => damaged.kinds.truncate(damaged.tokens.len()),
                6 => damaged.bos = Some(a as u32 * 2),
                _ => damaged.merges.truncate(b + 1),
            }
        }
        if let Ok(tokenizer) = Tokenizer::new(damaged) {
            let ids = tokenizer.encode_raw_with_specials(common::CORPUS);
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.len()));
            tokenizer.decode(&ids);
        }
    }
}

#[test]
fn kinds_decide_what_a_token_stands_for() {
    let mut vocabulary = vocabulary();
    for (token, kind) in [("<0x0A>", TokenKind::Byte), ("<0xé>", TokenKind::Byte), ("Ġ日", TokenKind::Normal)]
    {
        vocabulary.tokens.push(token.to_owned());
        vocabulary.kinds.push(kind);
    }
    let tokenizer = Tokenizer::new(vocabulary).expect("a good vocabulary");
    assert_eq!(tokenizer.token_bytes(4096), Some(&b"\n"[..]));
    assert_eq!(tokenizer.token_bytes(4097), Some("<0xé>".as_bytes()));
    assert_eq!(tokenizer.token_bytes(4098), Some("Ġ日".as_bytes()));
    assert_eq!(tokenizer.token_bytes(4090), Some(&b"<|im_start|>"[..]));
    assert_eq!(
        (tokenizer.token_bytes(4099), tokenizer.kind(4099), tokenizer.token_bytes(u32::MAX)),
        (None, None, None)
    );
    let config: Value = serde_json::from_str(POCKET_CONFIG).expect("JSON");
    assert_eq!(config["eos_token"], "<|im_end|>");
}
