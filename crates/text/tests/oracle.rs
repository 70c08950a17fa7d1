//! Ids against the `tokenizers` crate, which reads the same `tokenizer.json`.

mod common;

use common::{CORPUS, POCKET, Random, oracle, oracle_ids, pocket_qwen35};
use text::{Tokenizer, Vocabulary};

fn ours(json: &str) -> Tokenizer {
    Tokenizer::new(Vocabulary::from_hf(json, None).expect("a known tokenizer")).expect("a good vocabulary")
}

#[track_caller]
fn assert_same(ours: &Tokenizer, oracle: &tokenizers::Tokenizer, text: &str) {
    let expected = oracle_ids(oracle, text);
    if ours.encode_raw_with_specials(text) != expected {
        panic!("ids differ for {text:?}:\n{:?}\n{expected:?}", ours.encode_raw_with_specials(text));
    }
    let has_special =
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
            .iter()
            .any(|special| text.contains(special));
    if !has_special {
        assert_eq!(ours.encode_text(text), expected, "for {text:?}");
    }
}

/// Text of pieces that provoke each alternative of the split, and any other character.
fn random_text(random: &mut Random) -> String {
    const PIECES: [&str; 64] = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\r",
        "\t",
        "\u{a0}",
        "\u{85}",
        "\u{3000}",
        "\u{2028}",
        "\u{200b}",
        "\u{feff}",
        "'s",
        "'S",
        "'re",
        "'Ve",
        "'LL",
        "'d",
        "'ſ",
        "'",
        "''",
        "a",
        "Word",
        "x_y",
        "é",
        "e\u{301}",
        "\u{301}",
        "\u{323}\u{307}",
        "\u{0e33}",
        "น้ำ",
        "क्षि",
        "क\u{93c}",
        "\u{1100}\u{1161}\u{11a8}",
        "한",
        "日本",
        "が",
        "か\u{3099}",
        "😀",
        "👩\u{200d}👧",
        "\u{fe0f}",
        "0",
        "12",
        "½",
        "٣",
        "Ⅷ",
        "(",
        "()",
        "):",
        "==",
        "!=",
        "->",
        "::",
        "...",
        "/*",
        "<",
        "|",
        ">",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "end|>",
        "<think>",
        "</think>",
        "\0",
    ];
    let mut text = String::new();
    for _ in 0..random.below(24) {
        if random.below(8) == 0 {
            // Any character that was assigned when the oracle's normaliser was made.
            text.extend(char::from_u32(random.below(0x1_F900) as u32));
        } else {
            text.push_str(random.pick(&PIECES));
        }
    }
    text
}

#[test]
fn ids_of_the_corpus_are_the_oracle_s() {
    for json in [POCKET.to_owned(), pocket_qwen35()] {
        let (ours, oracle) = (ours(&json), oracle(&json));
        assert_same(&ours, &oracle, CORPUS);
        for line in CORPUS.split_inclusive('\n') {
            assert_same(&ours, &oracle, line);
            assert_same(&ours, &oracle, line.trim_end());
        }
    }
}

#[test]
fn ids_of_random_text_are_the_oracle_s() {
    for json in [POCKET.to_owned(), pocket_qwen35()] {
        let (ours, oracle) = (ours(&json), oracle(&json));
        let mut random = Random(0x5EED);
        for _ in 0..4000 {
            assert_same(&ours, &oracle, &random_text(&mut random));
        }
    }
}

#[test]
fn long_pieces_merge_as_the_oracle_merges_them() {
    let (ours, oracle) = (ours(POCKET), oracle(POCKET));
    let mut random = Random(7);
    for len in [63, 64, 65, 66, 200, 3000] {
        let letters: String =
            (0..len).map(|_| random.pick(&['e', 't', 'a', 's', 'r', 'n', 'i', 'o', 'l', 'f', 'd'])).collect();
        let symbols: String =
            (0..len).map(|_| random.pick(&['=', '-', '*', '#', '/', '.', ')', '(', ','])).collect();
        for text in [
            letters,
            symbols,
            "=".repeat(len),
            " ".repeat(len),
            "ab".repeat(len),
            "語".repeat(len),
            "7".repeat(len),
        ] {
            assert_same(&ours, &oracle, &text);
        }
    }
}

#[test]
fn the_two_splits_differ_where_marks_follow_letters() {
    let words = [
        "x\u{323}y",
        " ที่นี่",
        "ที่",
        "नमस्ते",
        " قَلَم",
        "\u{301}a",
        "\u{301}=",
        " \u{302}",
        "==",
        "\u{301}\u{301}x",
        "1\u{301}",
    ];
    let json = |json: &str| common::with_words(json, &words);
    let (json2, json35) = (json(POCKET), json(&pocket_qwen35()));
    let (qwen2, qwen35) = (ours(&json2), ours(&json35));
    let (oracle2, oracle35) = (oracle(&json2), oracle(&json35));
    for (at, word) in words.iter().enumerate() {
        for other in &words[at..] {
            for text in [format!("{word}{other}"), format!("{word} {other}"), format!("a{other}{word}\n")] {
                assert_same(&qwen2, &oracle2, &text);
                assert_same(&qwen35, &oracle35, &text);
            }
        }
    }
    for text in ["x\u{323}y", "=\u{301}=", "a \u{301}a"] {
        assert_ne!(qwen2.encode_text(text), qwen35.encode_text(text), "for {text:?}");
    }
    let plain = "plain text, 中文 and code() { }\n";
    assert_eq!(qwen2.encode_text(plain), qwen35.encode_text(plain));
}

#[test]
fn composed_and_decomposed_text_have_the_same_ids() {
    let tokenizer = ours(POCKET);
    assert_eq!(tokenizer.encode_text("cafe\u{301} か\u{3099}"), tokenizer.encode_text("café が"));
    let mut vocabulary = common::vocabulary();
    vocabulary.nfc = false;
    let as_written = Tokenizer::new(vocabulary).expect("a good vocabulary");
    assert_ne!(as_written.encode_text("cafe\u{301}"), as_written.encode_text("café"));
}

/// The real vocabulary is too large to keep here; `fetch_qwen_vocabulary.sh` fetches it.
#[test]
fn ids_of_the_real_qwen_vocabulary_are_the_oracle_s() {
    let Some(path) = std::env::var_os("REDLITE_QWEN_TOKENIZER") else {
        eprintln!(
            "SKIPPED: REDLITE_QWEN_TOKENIZER is not set; crates/text/tests/fetch_qwen_vocabulary.sh fetches the file"
        );
        return;
    };
    let json = std::fs::read_to_string(&path).expect("REDLITE_QWEN_TOKENIZER names a tokenizer.json");
    let (ours, oracle) = (ours(&json), oracle(&json));
    assert_eq!(ours.special("<|im_end|>"), Some(151_645));
    assert_same(&ours, &oracle, CORPUS);
    for line in CORPUS.split_inclusive('\n') {
        assert_same(&ours, &oracle, line);
    }
    let mut random = Random(0x5EED);
    for _ in 0..4000 {
        assert_same(&ours, &oracle, &random_text(&mut random));
    }
}

#[test]
fn long_runs_of_anything_take_linear_time() {
    let tokenizer = ours(&pocket_qwen35());
    for run in [
        "a",
        "=",
        " ",
        "\n",
        "\r\n ",
        "\t ",
        "7",
        "\u{301}",
        "e\u{301}\u{323}",
        "語",
        "😀",
        "'",
        "'s",
        "<",
        "<|",
        "ab=",
        "\0",
    ] {
        let text = run.repeat((1 << 18) / run.len());
        let ids = tokenizer.encode_text(&text);
        assert_eq!(ids, tokenizer.encode_raw_with_specials(&text));
        if !run.contains('\u{301}') {
            assert_eq!(tokenizer.decode(&ids), text, "for a run of {run:?}");
        }
    }
}
