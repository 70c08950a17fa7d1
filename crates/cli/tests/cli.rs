//! The real binary on the small trained model.

mod common;

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use common::{Folder, command, fails, json, ok, pocket, redlite, repository, stderr, stdout};

#[test]
fn run_continues_a_file_and_reports() {
    let folder = Folder::new("run");
    let file = folder.write("a.py", "import numpy as np\n\nclass ");
    let args = ["run", &pocket(), "--raw", "-f", &file, "-n", "8", "--temp", "0"];
    let output = redlite(&args);
    assert!(output.status.success());
    let (text, said) = (stdout(&output), stderr(&output));
    assert!(text.trim().len() > 4, "{text:?}");
    assert!(said.contains("tok/s") && said.contains("wrote 8"), "{said}");

    let with_json = json(&[&args[..], &["--json"]].concat());
    assert_eq!(with_json["text"].as_str().unwrap(), text.strip_suffix('\n').unwrap());
    assert_eq!(with_json["generated_tokens"], 8);
    assert_eq!(with_json["finish"], "length");
    let quiet = redlite(&[&args[..], &["--quiet"]].concat());
    assert_eq!((stdout(&quiet), stderr(&quiet)), (text.clone(), String::new()));
    let stats = redlite(&[&args[..], &["--stats"]].concat());
    for stage in ["delta.mix", "attn.mix", "experts", "total"] {
        assert!(stderr(&stats).contains(stage));
    }
    for other in [&["--threads", "1"][..], &["--chunk", "64"], &["--backend", "reference"]] {
        assert_eq!(stdout(&redlite(&[&args[..], other].concat())), text, "{other:?}");
    }
}

#[test]
fn run_answers_through_the_template_and_reads_standard_input() {
    let prompt = "Write a Python function `is_sorted`: Return True if the list is sorted.";
    let args = ["run", &pocket(), "--temp", "0", "-q"];
    let answer = ok(&[&args[..], &["-p", prompt]].concat());
    assert!(answer.contains("def is_sorted"), "{answer}");
    let mut child = command(&[&args[..], &["-f", "-"]].concat());
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(prompt.as_bytes()).unwrap();
    assert_eq!(stdout(&child.wait_with_output().unwrap()), answer);

    // The template's tokens typed by hand are the same prompt; the same text without `--special` is not.
    let typed = format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n");
    let counted = |more: &[&str]| {
        let args = ["run", &pocket(), "-n", "0", "--raw", "-p", &typed, "--json"];
        json(&[&args[..], more].concat())["prompt_tokens"].as_u64().unwrap()
    };
    let templated =
        json(&["run", &pocket(), "-n", "0", "-p", prompt, "--json"])["prompt_tokens"].as_u64().unwrap();
    assert_eq!(counted(&["--special"]), templated);
    assert!(counted(&[]) > templated);
}

#[test]
fn mistakes_are_explained() {
    let folder = Folder::new("mistakes");
    fails(&["run", &pocket(), "--thread", "2", "-p", "x"], 2, &["--threads"]);
    fails(&["rum", &pocket()], 2, &["run"]);
    fails(&["run", "no-such.gguf", "-p", "x"], 2, &["no-such.gguf"]);
    fails(&["run", &pocket(), "-p", ""], 0, &[]);
    fails(&["run", &pocket(), "--raw", "-p", ""], 2, &["empty"]);
    fails(&["run", &pocket(), "-p", "x", "--temp", "-1"], 2, &["temp"]);
    fails(&["run", &pocket(), "-p", "x", "--top-p", "1.5"], 2, &["top-p", "1.5"]);
    fails(&["run", &pocket(), "-p", "a long enough prompt", "--context", "4"], 2, &["context", "4"]);
    fails(&["run", &pocket(), "-p", "x", "--context", "100000"], 2, &["100000", "65536"]);
    fails(&["run", &pocket(), "-f", &folder.file("missing.txt")], 2, &["missing.txt"]);
    fails(&["logits", &pocket(), "-p", "x", "--name", "delta.mux.1", "-o", "x.npy"], 2, &["delta.mix"]);
    fails(&["perplexity", &pocket(), "-p", "x"], 2, &["fewer than two"]);

    let bytes = std::fs::read(repository("models/pocket.gguf")).unwrap();
    let cut = folder.write("cut.gguf", &bytes[..bytes.len() - 100]);
    fails(&["run", &cut, "-p", "x"], 2, &["cut.gguf"]);
    let copy = folder.write("copy.gguf", &bytes);
    fails(&["logits", &copy, "-p", "x", "-o", &copy], 2, &["copy.gguf", "is the model itself"]);
    fails(&["perplexity", &copy, "-p", "some words", "--save-base", &copy], 2, &["is the model itself"]);
    fails(&["quantize", &copy, &copy, "--experts", "IQ2_XXS"], 2, &["is the model itself"]);
    assert_eq!(std::fs::read(&copy).unwrap(), bytes);
    fails(&["run", &pocket(), "-p", "x", "--stop", ""], 2, &["--stop"]);
    let latin = folder.write("latin.txt", b"caf\xe9");
    fails(&["run", &pocket(), "-f", &latin], 2, &["latin.txt", "byte 3"]);
    let huge = usize::MAX.to_string();
    ok(&["run", &pocket(), "-p", "hello", "-n", "1", "--chunk", &huge, "-q"]);
    ok(&["run", &pocket(), "--raw", "-p", "import", "-n", &huge, "--stop", "\n", "--temp", "0", "-q"]);
    fails(&["info", &pocket(), "--context", &huge], 2, &["65536"]);
    let text = folder.write("text.gguf", "this is not a model");
    fails(&["info", &text], 2, &["text.gguf"]);
}

#[cfg(unix)]
fn interrupt(child: &std::process::Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_reading() {
    let folder = Folder::new("interrupt");
    let line = "def function(argument):\n    return argument + 1\n";
    let text = folder.write("long.py", line.repeat(5000));
    let output = folder.file("logits.npy");
    let mut child = command(&["logits", &pocket(), "-f", &text, "-o", &output, "--backend", "reference"]);
    let mut child = child.stderr(Stdio::piped()).spawn().unwrap();
    // The output is begun when the handler is in place and reading starts, which takes minutes.
    let begun = || std::fs::read_dir(&folder.0).unwrap().count() > 1;
    while !begun() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    interrupt(&child);
    let result = child.wait_with_output().unwrap();
    assert_eq!(result.status.code(), Some(130), "{}", stderr(&result));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "nothing half written is left");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_wait_for_a_prompt() {
    use std::os::unix::process::ExitStatusExt;
    let mut child = command(&["run", &pocket(), "-f", "-"]);
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    // More than a pipe holds: when this returns, the program is reading.
    child.stdin.as_mut().unwrap().write_all(&[b' '; 1 << 20]).unwrap();
    interrupt(&child);
    assert_eq!(child.wait().unwrap().signal(), Some(2), "as every program that waits for input");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_writing() {
    let mut child = command(&["run", &pocket(), "--raw", "-p", "import ", "-n", "4000", "--ignore-eos"]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(stderr(&output).contains("interrupted"), "the summary says so: {}", stderr(&output));
}

#[test]
fn info_counts_every_byte() {
    let text = ok(&["info", &pocket()]);
    for words in ["8: 6 DeltaNet, 2 attention", "IQ3_S", "Q4_K", "12 a layer, 4 a token"] {
        assert!(text.contains(words), "no `{words}` in {text}");
    }
    let value = json(&["info", &pocket(), "--json", "--context", "300"]);
    let classes = value["classes"].as_array().unwrap();
    let bytes: u64 = classes.iter().map(|class| class["bytes"].as_u64().unwrap()).sum();
    let file = value["file_bytes"].as_u64().unwrap();
    assert!(bytes < file && bytes > file * 9 / 10, "{bytes} of {file}");
    // 2 attention layers, 2 pages of 256 positions, keys and values of 2 heads of 256 in f16.
    assert_eq!(value["memory"]["kv_bytes"], 2 * 512 * 2 * 2 * 256 * 2);
    assert_eq!(value["shape"]["experts"], 12);
}

#[test]
fn tokenize_shows_pieces_and_ids() {
    let ids = json(&["tokenize", &pocket(), "-p", "import os<|im_end|>", "--json"]);
    let special = json(&["tokenize", &pocket(), "-p", "import os<|im_end|>", "--json", "--special"]);
    assert_eq!(special.as_array().unwrap().last().unwrap(), 4091);
    assert!(!ids.as_array().unwrap().contains(&4091.into()));
    assert_eq!(ok(&["tokenize", &pocket(), "-p", "import os", "--count"]), "2\n");
    assert!(ok(&["tokenize", &pocket(), "-p", "import os"]).contains("\"import\""));
}

#[test]
fn logits_perplexity_and_parity_agree_with_each_other() {
    let folder = Folder::new("measure");
    let text = std::fs::read_to_string(repository("scripts/fixtures/oracle.py")).unwrap();
    let text = folder.write("text.py", &text[..1500]);
    let base = folder.file("base.npy");
    let rounded = ["perplexity", &pocket(), "-f", &text, "--window", "128", "--kv", "f32", "--json"];
    let scored = [&rounded[..], &["--exact"]].concat();
    let first = json(&[&scored[..], &["--save-base", &base]].concat());
    let second = json(&[&scored[..], &["--base", &base]].concat());
    assert_eq!(first["nats_per_token"], second["nats_per_token"]);
    assert_eq!((&second["kl_max"], &second["top1"]), (&0.0.into(), &1.0.into()), "the same run");
    let reference = json(&[&scored[..], &["--base", &base, "--backend", "reference"]].concat());
    let integers = json(&[&rounded[..], &["--base", &base]].concat());
    assert!(integers["kl_mean"].as_f64().unwrap() < 2e-3, "{integers}");
    assert!(reference["kl_mean"].as_f64().unwrap() < 1e-7 && reference["top1"] == 1.0, "{reference}");

    let npy = folder.file("logits.npy");
    ok(&["logits", &pocket(), "-f", &text, "--rows", "0..100", "--kv", "f32", "--exact", "-o", &npy]);
    let args = ["parity", &pocket(), "reference", &npy, "-f", &text, "--kv", "f32"];
    assert!(ok(&args).contains("passed"));
    fails_with_negative(&[&args[..], &["--max-kl", "0"]].concat());
    fails_with_negative(&[&args[..], &["--max-rms", "0"]].concat());
    let stored = ["parity", &pocket(), &npy, &npy, "-f", &text, "--max-kl", "0", "--max-rms", "0"];
    assert!(ok(&stored).contains("positions   100\n"));
    let neither = ["parity", &pocket(), "reference", "gpu", "-f", &text];
    fails(&neither, 2, &["`gpu`", "neither a backend nor"]);

    let both =
        json(&["parity", &pocket(), "reference", "cpu", "-f", &text, "--limit", "100", "--json", "--exact"]);
    assert_eq!((&both["passed"], &both["routes_differ"]), (&true.into(), &0.into()));
    assert_eq!(
        both["stages"].as_array().unwrap().len(),
        6 * 9 + 2 * 10 + 2,
        "every intermediate of every layer"
    );
    let dump = folder.file("mix.npy");
    ok(&["logits", &pocket(), "-f", &text, "--rows", "3..10", "--name", "delta.mix.1", "-o", &dump]);
    let header = std::fs::read(&dump).unwrap();
    assert!(String::from_utf8_lossy(&header[..128]).contains("(7, 512)"));
    let none = ["logits", &pocket(), "-f", &text, "--name", "delta.mix.3", "-o", &dump];
    fails(&none, 2, &["delta.mix", "layer 3", "3, 7 attend"]);
}

fn fails_with_negative(args: &[&str]) {
    let output = redlite(args);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains("FAILED"));
}

#[test]
fn files_are_made_and_run() {
    let folder = Folder::new("files");
    let (tiny, synth) = (folder.file("tiny.gguf"), folder.file("synth.gguf"));
    let source = repository("fixtures/tiny").display().to_string();
    let table = ok(&["convert", &source, "-o", &tiny, "--context-length", "512", "-q"]);
    assert!(table.contains("experts gate/up") && table.contains("BF16"));
    assert_eq!(json(&["info", &tiny, "--json"])["shape"]["context"], 512);
    ok(&["run", &tiny, "--raw", "-p", "ab", "-n", "3", "-q"]);

    let small = folder.file("small.gguf");
    let args =
        ["quantize", &pocket(), &small, "--experts", "IQ2_XXS", "--layer-types", "down:7=Q4_K", "--json"];
    let summary = json(&args);
    assert!(std::fs::metadata(&small).unwrap().len() < std::fs::metadata(pocket()).unwrap().len());
    let types: Vec<&str> =
        summary["classes"].as_array().unwrap().iter().map(|line| line["type"].as_str().unwrap()).collect();
    assert!(types.contains(&"IQ2_XXS") && types.contains(&"Q4_K") && types.contains(&"Q8_0"), "{types:?}");
    ok(&["run", &small, "--raw", "-p", "import ", "-n", "3", "-q"]);

    let shape = ["--layers", "4", "--hidden", "256", "--vocab", "600", "--heads", "2", "--kv-heads", "1"];
    let more =
        ["--expert-count", "8", "--experts-used", "2", "--expert-width", "256", "--shared-width", "256"];
    let delta = ["--key-heads", "1", "--value-heads", "2", "-q"];
    for recipe in ["iq2xxs", "f2", "iq3xxs", "f32"] {
        ok(&[&["synth", &synth, "--recipe", recipe][..], &shape, &more, &delta].concat());
        let answer = json(&["run", &synth, "--raw", "-p", "hello", "-n", "3", "--ignore-eos", "--json"]);
        assert_eq!(answer["generated_tokens"], 3, "{recipe}");
    }
    fails(&["quantize", &pocket(), &small, "--experts", "IQ1_S"], 2, &["IQ1_S"]);
    fails(&["quantize", &pocket(), &small, "--experts", "IQ9"], 2, &["IQ9", "IQ2_XXS"]);
}
