//! `redlite bench` on the small trained model. Nothing here looks at how fast anything was.

mod common;

use common::{Folder, command, fails, json, ok, pocket};

#[test]
fn a_bench_says_what_it_measured() {
    let args =
        ["bench", &pocket(), "--prompt", "70,3", "--gen", "4", "--repeat", "2", "--threads", "2", "--json"];
    let value = json(&args);
    assert_eq!((&value["backend"], &value["threads"]), (&"cpu".into(), &2.into()));
    let peaks = value["peaks"].as_array().unwrap();
    let workers: Vec<u64> = peaks.iter().map(|peak| peak["workers"].as_u64().unwrap()).collect();
    assert_eq!(workers, [1, 2]);
    for peak in peaks {
        let rates = [&peak["quantised"]["operations_per_second"], &peak["plain"]["operations_per_second"]];
        assert!(
            rates.into_iter().chain([&peak["bytes_per_second"]]).all(|rate| rate.as_f64().unwrap() > 1e6)
        );
    }
    let results = value["results"].as_array().unwrap();
    let shapes: Vec<_> =
        results.iter().map(|r| (r["test"].as_str().unwrap(), r["tokens"].as_u64().unwrap())).collect();
    assert_eq!(shapes, [("prompt", 70), ("prompt", 3), ("gen", 4)]);
    for result in results {
        let number = |name: &str| result[name].as_f64().unwrap();
        assert_eq!(result["samples"].as_array().unwrap().len(), 2);
        assert!(number("min") <= number("median") && number("median") <= number("max"));
        let stages = result["stages"].as_array().unwrap();
        let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
        let expected =
            ["embed", "delta.project", "delta.mix", "delta.out", "attn.project", "attn.mix", "attn.out"];
        assert_eq!(names, [&expected[..], &["route", "shared", "experts", "head"]].concat());
        let sum: f64 = stages.iter().map(|stage| stage["milliseconds"].as_f64().unwrap()).sum();
        assert!(sum <= 1e3 * number("seconds") * 1.001, "stages take no longer than the whole");
        assert!(stages.iter().all(|stage| stage["bytes"].as_u64().unwrap() > 0));
    }
    // What a token costs does not depend on how many there are, but for attention and the head.
    let work = |result: usize, stage: usize| results[result]["stages"][stage]["operations"].as_u64().unwrap();
    assert_eq!(work(0, 9) * 3, work(1, 9) * 70);
    assert_eq!(work(2, 1) * 70, work(0, 1) * 4);
    assert_eq!(work(2, 10), work(0, 10) * 4, "logits of the last row of a prompt, of every generated token");
}

#[test]
fn tables_and_depth() {
    let args = ["bench", &pocket(), "--prompt", "0", "--gen", "2", "--depth", "300", "--repeat", "1"];
    let text = ok(&args);
    for words in
        ["every row of a prompt", "peak of 1: ", "tokens/s", "gen        2    300", "delta.mix", "of peak"]
    {
        assert!(text.contains(words), "no `{words}` in:\n{text}");
    }
    let plain = ok(&[&args[..], &["--no-profile"]].concat());
    assert!(plain.contains("tokens/s") && !plain.contains("delta.mix") && !plain.contains("peak"), "{plain}");
    // The last of repeated options counts.
    let text = json(&[
        "bench",
        &pocket(),
        "--prompt",
        "9",
        "--prompt",
        "2",
        "--gen",
        "0",
        "--repeat",
        "1",
        "--json",
    ]);
    assert_eq!((text["results"].as_array().unwrap().len(), &text["results"][0]["tokens"]), (1, &2.into()));
    let reference =
        ["--no-profile", "--backend", "reference", "--prompt", "5", "--gen", "0", "--repeat", "1"];
    assert!(ok(&[&["bench", &pocket()][..], &reference].concat()).contains("prompt       5"));
}

#[test]
fn contradictions_are_refused() {
    fails(&["bench", &pocket(), "--prompt", "0", "--gen", "0"], 2, &["nothing to measure"]);
    fails(&["bench", &pocket(), "--repeat", "0"], 2, &["--repeat"]);
    fails(&["bench", &pocket(), "--prompt", "many"], 2, &["--prompt"]);
    fails(&["bench", &pocket(), "--prompt", "600", "--context", "512"], 2, &["600", "512"]);
    fails(&["bench", &pocket(), "--prompt", "999999999"], 2, &["999999999"]);
    fails(&["bench", "nowhere.gguf"], 2, &["nowhere.gguf"]);
    let folder = Folder::new("bench-broken");
    let broken = folder.write("broken.gguf", b"GGUF");
    fails(&["bench", &broken], 2, &["broken.gguf"]);
    let output = command(&["bench"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
