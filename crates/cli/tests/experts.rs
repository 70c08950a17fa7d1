//! Plans, caches of experts and what is said about them, on the small trained model.

mod common;

use common::{Folder, fails, json, ok, pocket, redlite, repository, stderr, stdout};

fn text() -> String {
    repository("README.md").display().to_string()
}

#[test]
fn a_plan_chooses_chunks_and_an_argument_overrides_it() {
    let plan = json(&["plan", &pocket(), "--prompt", "1000", "--json"]);
    assert!(plan["mapped"].as_bool().unwrap() && plan["chunk"].as_u64().unwrap() >= 1000, "{plan}");
    let asked = json(&["plan", &pocket(), "--prompt", "1000", "--chunk", "128", "--cache", "2MiB", "--json"]);
    assert_eq!(asked["chunk"], 128);
    assert!(asked["chunk_reason"].as_str().unwrap().starts_with("asked for"));
    assert!(asked["streamed_bytes_per_chunk"].as_u64().unwrap() > 0, "{asked}");
    assert!(asked["total_bytes"].as_u64() < plan["total_bytes"].as_u64(), "smaller chunks take less");
    let words = ok(&["plan", &pocket(), "--cache", "2MiB"]);
    assert!(words.contains("chunks") && words.contains("expected"), "{words}");
}

#[test]
fn a_run_says_its_plan_in_a_line_and_holds_the_chunk() {
    let run = |more: &[&str]| {
        let args = ["run", &pocket(), "--raw", "-f", &text(), "-n", "4", "--temp", "0", "--cache", "2MiB"];
        redlite(&[&args[..], more].concat())
    };
    let (free, small) = (run(&[]), run(&["--chunk", "192"]));
    assert_eq!(stdout(&free), stdout(&small));
    assert!(stderr(&free).contains("cache of 2.00 MiB for"), "{}", stderr(&free));
    assert!(stderr(&small).contains("chunks of 192: asked for"), "{}", stderr(&small));
}

/// A model several times larger than what it may take, read and written in chunks that borrow memory of the cache.
#[test]
fn each_phase_stays_below_its_plan_and_the_plan_below_the_cap() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new("cap");
    let file = folder.file("large.gguf");
    let shape = "--type Q8_0 --layers 8 --hidden 512 --vocab 4096 --expert-count 64 --expert-width 512 --experts-used 4 \
                 --shared-width 512 --heads 4 --kv-heads 2 --head-dim 64 --rope-dims 16 --key-heads 4 --value-heads 4 \
                 --state-dim 64";
    ok(&[&["synth", &file, "-q"][..], &shape.split_whitespace().collect::<Vec<_>>()].concat());
    let (cap, size) = (144 * MIB, std::fs::metadata(&file).unwrap().len());
    assert!(size > 5 * cap / 2, "{size}");
    let args = ["--threads", "2", "--memory", "144MiB", "--json"];
    let prompt = folder.write("prompt", "one and another ".repeat(220));
    let run = |more: &[&str]| {
        json(
            &[
                &["run", &file, "--raw", "-f", &prompt, "-n", "40", "--ignore-eos", "--temp", "0"],
                &args[..],
                more,
            ]
            .concat(),
        )
    };
    let found = run(&[]);
    let tokens = found["prompt_tokens"].as_u64().unwrap();
    let (prompt_tokens, context) = (tokens.to_string(), (tokens + 40).to_string());
    let plan =
        json(&[&["plan", &file, "--prompt", &prompt_tokens, "--context", &context], &args[..]].concat());
    assert!(plan["lent_bytes"].as_u64().unwrap() > 8 * MIB, "{plan}");
    assert!(plan["total_bytes"].as_u64().unwrap() <= cap);
    let phases = found["memory"].as_array().unwrap();
    for (phase, planned) in phases.iter().zip(plan["phases"].as_array().unwrap()) {
        assert_eq!(phase["phase"], planned["phase"]);
        assert_eq!(phase["plan_bytes"], planned["total_bytes"]);
        let (peak, most) = (phase["peak_bytes"].as_u64(), planned["total_bytes"].as_u64().unwrap());
        // Where the system does not tell, there is nothing to compare.
        let Some(peak) = peak else { continue };
        assert!(peak <= most, "{phase}");
        // Code, stacks and tokenizer of a model so small take less than is planned for them.
        let slack = planned["total_bytes"].as_u64().unwrap() - 50 * MIB;
        assert!(phase["phase"] == "load" || peak >= slack, "{phase}");
    }
    assert_eq!(found["loads"][0]["loans"], 1);
    // The same answer with chunks that borrow nothing, and from the mapped file.
    for other in [&["--chunk", "256"][..], &["--cache", "mmap"]] {
        assert_eq!(run(other)["tokens"], found["tokens"], "{other:?}");
    }
}

#[test]
fn a_plan_knows_what_caches_found_with_this_model() {
    let folder = Folder::new("hits");
    let with_own_folder = |args: &[&str]| {
        let output = common::command(args).env("XDG_CACHE_HOME", &folder.0).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    // Rates of this machine, so that there is an expectation.
    let expectation = || -> serde_json::Value {
        let plan = with_own_folder(&["plan", &pocket(), "--cache", "3MiB", "--json"]);
        serde_json::from_str(&plan).unwrap()
    };
    with_own_folder(&["experts", &pocket(), "-f", &text(), "--steps", "20", "--threads", "2"]);
    let stored = || std::fs::read_to_string(folder.0.join("redlite/machine.json")).unwrap_or_default();
    assert!(!stored().contains("found_of"), "too few tokens");
    let curve = ["experts", &pocket(), "-f", &text(), "--steps", "60", "--threads", "2"];
    with_own_folder(&curve);
    assert!(stored().matches("found_of").count() > 5, "{}", stored());
    let before = stored();
    let one =
        ["run", &pocket(), "--raw", "-f", &text(), "-n", "40", "--ignore-eos", "--temp", "0", "--quiet"];
    let small = [&one[..], &["--cache", "3MiB", "--threads", "2"]].concat();
    with_own_folder(&small);
    let after = stored();
    assert_ne!(before, after, "a run adds its own point");
    with_own_folder(&[&small[..], &["--route-bias", "1"]].concat());
    assert_eq!(after, stored(), "not with other choices");
    assert!(expectation()["hit_rate_is_measured"].is_null(), "no speed is known, so nothing is expected");
}

#[test]
fn experts_counts_every_choice_and_simulates_caches() {
    let folder = Folder::new("experts");
    let svg = folder.0.join("heat.svg").display().to_string();
    let args = ["experts", &pocket(), "-f", &text(), "--steps", "40", "--svg", &svg];
    let found = json(&[&args[..], &["--json"]].concat());
    let number = |name: &str| found[name].as_u64().unwrap();
    let tokens = number("tokens_together") + number("tokens_stepped");
    assert_eq!(number("tokens_stepped"), 40);
    for layer in found["counts"].as_array().unwrap() {
        let counts: Vec<u64> = layer.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(counts.len() as u64, number("experts"));
        assert_eq!(counts.iter().sum::<u64>(), tokens * number("experts_used"));
        assert!(counts.iter().all(|&count| count <= tokens));
    }
    let ahead = &found["look_ahead"];
    let recall = ["recall", "recall_with_margin"].map(|name| ahead[name].as_f64().unwrap());
    let chance = number("experts_used") as f64 / number("experts") as f64;
    assert!(recall[0] > 2.0 * chance && recall[1] > recall[0] && recall[1] <= 1.0, "{recall:?}");
    let budgets = found["budgets"].as_array().unwrap();
    let rates = |policy: &str| -> Vec<f64> {
        budgets.iter().map(|budget| budget[policy]["hit_rate"].as_f64().unwrap()).collect()
    };
    let (recent, clairvoyant) = (rates("least_recent"), rates("clairvoyant"));
    assert!(recent.windows(2).all(|pair| pair[0] <= pair[1]) && recent.len() > 5, "{recent:?}");
    assert!(recent.iter().zip(&clairvoyant).all(|(recent, best)| recent <= best));
    assert!(recent[0] < 0.9 && *recent.last().unwrap() > 0.9, "{recent:?}");

    let words = ok(&args);
    assert!(words.contains("clairvoyant") && words.contains("look-ahead"), "{words}");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    assert!(picture.contains("prefers-color-scheme:dark") && picture.contains("polyline"));
    fails(&["experts", &pocket(), "-p", "a"], 2, &["fewer than four tokens"]);
}

#[test]
fn preferring_cached_experts_is_said_and_off_by_default() {
    let args = ["experts", &pocket(), "-f", &text(), "--steps", "60", "--json"];
    // What a wrong guess of the look-ahead reads would count too.
    let args = [&args[..], &["--cache", "3500KiB", "--look-ahead", "off"]].concat();
    let with = |bias: &[&str]| {
        let output = redlite(&[&args[..], bias].concat());
        let value: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        (value, stderr(&output))
    };
    let (plain, said) = with(&[]);
    assert!(plain["route_bias"].is_null() && !said.contains("route-bias"), "{said}");
    let (none, _) = with(&["--route-bias", "0"]);
    assert_eq!(none["nats_per_token"], plain["nats_per_token"]);
    let (some, said) = with(&["--route-bias", "2"]);
    assert!(said.contains("answers change") && some["route_bias"] == 2.0, "{said}");
    assert_ne!(some["nats_per_token"], plain["nats_per_token"]);
    let loads = |value: &serde_json::Value| value["loads"][1]["experts"].as_u64().unwrap();
    assert!(loads(&some) < loads(&plain), "{} of {}", loads(&some), loads(&plain));
    let reference = ["run", &pocket(), "-p", "a", "--backend", "reference", "--route-bias", "-1"];
    fails(&reference, 2, &["from 0 to 100"]);
}

#[test]
fn a_replayed_trace_is_found_as_often_as_asked() {
    let args =
        ["bench", &pocket(), "--prompt", "0", "--gen", "40", "--repeat", "2", "--no-profile", "--json"];
    let cache = ["--cache", "3MiB", "--look-ahead", "off", "--trace-hits", "0.8"];
    let value = json(&[&args[..], &cache].concat());
    let loads = &value["results"][0]["loads"];
    let number = |name: &str| loads[name].as_f64().unwrap();
    let hits = number("hits") / (number("hits") + number("misses"));
    assert!((hits - 0.8).abs() < 0.06, "{loads}");
    assert!(number("bytes") > 0.0);
    // The same choices with everything in place.
    let full = ["--cache", "full", "--trace-hits", "0.8", "--trace-cache", "3MiB"];
    assert_eq!(json(&[&args[..], &full].concat())["results"][0]["loads"]["misses"], 0);
    fails(&[&args[..], &["--cache", "mmap", "--trace-hits", "0.8"]].concat(), 2, &["--trace-cache"]);
    fails(&[&args[..], &["--trace-hits", "1.5"]].concat(), 2, &["from 0 to 1"]);
}
