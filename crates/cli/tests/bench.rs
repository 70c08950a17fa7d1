//! `redlite bench` on the small trained model. Nothing here looks at how fast anything was.

mod common;

use common::{Folder, command, fails, json, ok, pocket, stderr};

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
    fails(&["bench", &pocket(), "--backend", "cuda", "--trace-hits", "0.8"], 2, &["--trace-hits", "--skew"]);
    let folder = Folder::new("bench-broken");
    let broken = folder.write("broken.gguf", b"GGUF");
    fails(&["bench", &broken], 2, &["broken.gguf"]);
    let output = command(&["bench"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn two_settings_are_compared_pair_by_pair() {
    let pocket = pocket();
    let common = ["bench", &pocket, "--prompt", "5", "--gen", "2", "--pause", "0", "--repeat", "3"];
    let exe = env!("CARGO_BIN_EXE_redlite");
    let other = format!("'{exe}' --prompt 5,7 --no-profile");
    let value = json(&[&common[..], &["--json", "--ab", "--threads 1", &other]].concat());
    let results = value["results"].as_array().unwrap();
    let tests: Vec<_> =
        results.iter().map(|r| (r["test"].as_str().unwrap(), r["tokens"].as_u64().unwrap())).collect();
    assert_eq!(tests, [("prompt", 5), ("gen", 2)], "what both measured");
    for result in results {
        let number = |name: &str| result[name].as_f64().unwrap();
        let ratios: Vec<f64> =
            result["ratios"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!((ratios.len(), result["a"]["samples"].as_array().unwrap().len()), (3, 3));
        assert!(number("min") <= number("ratio") && number("ratio") <= number("max"));
        assert!(ratios.contains(&number("ratio")), "the median of three is one of them");
    }
    let output = command(&[&common[..], &["--ab", "--threads 1", ""]].concat()).output().unwrap();
    let (table, said) = (String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output));
    assert!(table.contains("A: --threads 1") && table.contains("pair by pair"), "{table}");
    assert!(said.contains("pair 3 of 3"), "{said}");
}

#[test]
fn a_side_that_fails_is_told() {
    let pocket = pocket();
    let ab = |a: &str, b: &str, words: &[&str]| {
        let common =
            ["bench", &pocket, "--prompt", "5", "--gen", "0", "--pause", "0", "--repeat", "2", "--ab"];
        fails(&[&common[..], &[a, b]].concat(), 2, words);
    };
    ab("--threads 1", "--threads 0", &["--threads 0", "must be at least 1"]);
    ab("--threads 1", "--context 2", &["--context 2", "exit status: 2"]);
    ab("nowhere/redlite", "", &["nowhere/redlite", "neither an option nor the path"]);
    ab("--threads '1", "", &["quote"]);
    #[cfg(unix)]
    ab("/bin/echo", "", &["/bin/echo", "no results of a bench"]);
    ab("--prompt 5", "--prompt 6", &["no test in common"]);
    fails(&["bench", &pocket, "--ab", "--threads 1"], 2, &["--ab"]);
    fails(&["bench", &pocket, "--ab", "", "", "--pause", "-1"], 2, &["--pause"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_both_programs() {
    use std::process::{Command, Stdio};
    let folder = Folder::new("bench-interrupt");
    // A side that says who it is and never ends.
    let script =
        folder.write("endless", "#!/bin/sh\necho $$ >\"$0.pid\"\nmkfifo \"$0.fifo\"\nexec cat \"$0.fifo\"\n");
    let mode = Command::new("chmod").args(["+x", &script]).status().unwrap();
    assert!(mode.success());
    let side = format!("'{script}'");
    let args = ["bench", &pocket(), "--prompt", "5", "--gen", "0", "--pause", "0", "--ab", "", &side];
    let mut child = command(&args).stderr(Stdio::null()).spawn().unwrap();
    let pid = || std::fs::read_to_string(format!("{script}.pid")).ok().filter(|pid| pid.ends_with('\n'));
    let pid = loop {
        match pid() {
            Some(pid) => break pid.trim().to_string(),
            None => assert!(child.try_wait().unwrap().is_none(), "ended by itself"),
        }
        std::thread::yield_now();
    };
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let alive = Command::new("kill").args(["-0", &pid]).stderr(Stdio::null()).status().unwrap();
    assert!(!alive.success(), "the child has ended too");
}

#[test]
fn kernels_are_measured_alone() {
    let args = ["bench", "--kernels", "dense", "--rows", "9", "--repeat", "1", "--threads", "1", "--json"];
    let value = json(&[&args[..], &["--type", "Q8_0", "--ablate", "decode"]].concat());
    assert_eq!((&value["type"], &value["tokens"]), (&"Q8_0".into(), &9.into()));
    let stages = value["stages"].as_array().unwrap();
    let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["delta.project", "delta.out"]);
    for stage in stages {
        let rate = |part: &str| stage[part]["gmacs"].as_f64().unwrap();
        assert!(rate("full") > 0.0 && rate("ablated") > 0.0 && stage["share_left_out"].is_f64(), "{stage}");
    }
    fails(&["bench", "--kernels", "gemv", "--ablate", "decode"], 2, &["nothing can be left out", "--rows"]);
    fails(&["bench", "--kernels", "dense", "--backend", "reference"], 2, &["cpu and cuda only"]);
    fails(&["bench", &pocket(), "--kernels", "dense"], 2, &["--kernels"]);
    fails(&["bench", &pocket(), "--ablate", "loads"], 2, &["--kernels"]);
    fails(&["bench", "--kernels", "dense", "--type", "Q9"], 2, &["Q9"]);
}

#[test]
fn a_picture_is_drawn_from_json_or_at_once() {
    let folder = Folder::new("bench-roofline");
    let (svg, again) = (folder.file("roof.svg"), folder.file("again.svg"));
    let args =
        ["bench", &pocket(), "--prompt", "9", "--gen", "2", "--repeat", "1", "--roofline", &svg, "--json"];
    let bench = folder.write("bench.json", ok(&args));
    ok(&["bench", "--roofline", &again, "--from", &bench]);
    let (first, second) = (std::fs::read_to_string(&svg).unwrap(), std::fs::read_to_string(&again).unwrap());
    assert!(first.starts_with("<svg") && first.contains("experts"));
    assert_eq!(first, second);
    let empty = folder.write("empty.json", "{}");
    fails(&["bench", "--roofline", &again, "--from", &empty], 2, &["nothing to draw"]);
    let broken = folder.write("broken.json", "{");
    fails(&["bench", "--roofline", &again, "--from", &broken], 2, &["broken.json"]);
    fails(&["bench", "--roofline", &again, "--from", "nowhere.json"], 2, &["nowhere.json"]);
    fails(&["bench", "--from", &bench], 2, &["--roofline"]);
}
