//! The commands as a user runs them, on a tiny model made on the spot.

mod tiny;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder of its own for each test, removed at the end, with the model in it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let folder = std::env::temp_dir().join(format!("redlite-oracle-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        tiny::write(&folder.join("tiny.gguf"));
        Scratch(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn run(&self, arguments: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_redlite-oracle"))
            .current_dir(&self.0)
            .args(arguments.split_whitespace())
            .output()
            .unwrap()
    }

    fn succeed(&self, arguments: &str) -> (String, String) {
        let output = self.run(arguments);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{arguments}: {err}");
        (out, err)
    }

    /// Runs what must fail with exit status 1 and returns the message.
    fn fail(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments}: {err}");
        err.lines().last().unwrap_or_default().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Rows of an .npy file of `tiny::VOCABULARY` columns.
fn rows(path: &Path) -> Vec<Vec<f32>> {
    let bytes = fs::read(path).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let values: Vec<f32> =
        bytes[header..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    values.chunks_exact(tiny::VOCABULARY).map(<[f32]>::to_vec).collect()
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_those_of_the_position_however_they_are_asked_for() {
    let scratch = Scratch::new("logits");
    let ids: Vec<String> = (0..70).map(|i| (i * 37 % 256).to_string()).collect();
    fs::write(scratch.path("ids"), ids.join(" ")).unwrap();
    fs::write(scratch.path("ids.json"), format!("[{}]", ids.join(","))).unwrap();
    scratch.succeed("logits tiny.gguf --tokens ids -o whole.npy --threads 2");
    scratch.succeed("logits tiny.gguf --tokens ids.json -o pieces.npy --batch 20 --ubatch 7 --threads 1");
    scratch.succeed("logits tiny.gguf --tokens ids -o some.npy --rows 30..45 --ubatch 16 --threads 1");
    let whole = rows(&scratch.path("whole.npy"));
    assert_eq!(whole.len(), 70);
    assert!(whole.iter().flatten().all(|value| value.is_finite()));
    assert!(largest_difference(&whole[..35], &whole[35..]) > 1.0, "positions must differ");
    assert!(largest_difference(&whole, &rows(&scratch.path("pieces.npy"))) < 1e-3);
    assert!(largest_difference(&whole[30..45], &rows(&scratch.path("some.npy"))) < 1e-3);
}

#[test]
fn quantize_gives_every_class_its_type() {
    let scratch = Scratch::new("quantize");
    // 2 x (gate, up, down) of experts; the rule takes one of them.
    let (_, told) = scratch.succeed(
        "quantize tiny.gguf out.gguf --experts q8_0 --dense Q4_0 --embed F16 --output BF16 \
         --tensor blk.1.ffn_down_exps=IQ4_NL --tensor attn_q.weight=IQ3_XXS --threads 2",
    );
    let counts = told.trim_end().rsplit_once("tensors: ").unwrap().1;
    assert_eq!(counts, "1 BF16, 1 F16, 15 F32, 1 IQ3_XXS, 1 IQ4_NL, 13 Q4_0, 5 Q8_0");
    fs::write(scratch.path("ids"), "1 2 3").unwrap();
    scratch.succeed("logits out.gguf --tokens ids -o x.npy");
    assert!(
        scratch.fail("quantize out.gguf again.gguf --experts Q4_0 --dense Q4_0").contains("requantizing")
    );
}

#[test]
fn a_row_that_does_not_fit_the_blocks_is_refused_by_name() {
    let scratch = Scratch::new("blocks");
    let message = scratch.fail("quantize tiny.gguf out.gguf --experts IQ2_XXS --dense Q8_0");
    assert!(message.contains("blk.0.ffn_down_exps.weight") && message.contains("blocks of 256"), "{message}");
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "only the model is left");
}

#[test]
fn control_tokens_are_recognised_only_on_request() {
    let scratch = Scratch::new("tokenize");
    fs::write(scratch.path("t"), format!("a {}", tiny::END)).unwrap();
    let ids =
        |arguments: &str| -> Vec<usize> { serde_json::from_str(&scratch.succeed(arguments).0).unwrap() };
    let plain: Vec<usize> = format!("a {}", tiny::END).bytes().map(usize::from).collect();
    assert_eq!(ids("tokenize tiny.gguf -f t"), plain);
    assert_eq!(ids("tokenize tiny.gguf -f t --special"), [97, 32, 256]);
    fs::write(scratch.path("t"), b"\xff").unwrap();
    assert!(scratch.fail("tokenize tiny.gguf -f t").contains("not UTF-8"));
}

#[test]
fn bench_reports_every_sample() {
    let scratch = Scratch::new("bench");
    let (out, _) = scratch.succeed(
        "bench tiny.gguf --prompt 8,40 --ubatch 16,64 --gen 4 --depth 6 --repeat 3 --threads 1 --json",
    );
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let results = report["results"].as_array().unwrap();
    let shape = |row: &serde_json::Value| {
        (
            row["test"].as_str().unwrap().to_string(),
            row["tokens"].as_u64().unwrap(),
            row["ubatch"].as_u64().unwrap(),
        )
    };
    let shapes: Vec<_> = results.iter().map(shape).collect();
    let expected = [("prompt", 8, 8), ("prompt", 40, 16), ("prompt", 40, 40), ("gen", 4, 1)];
    assert_eq!(shapes, expected.map(|(test, tokens, ubatch)| (test.to_string(), tokens, ubatch)));
    for row in results {
        let samples = row["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 3);
        assert_eq!(row["median"], samples[1]);
        assert!(row["min"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(report["openmp"], cfg!(feature = "openmp"));
}

#[cfg(feature = "openmp")]
#[test]
fn bench_refuses_with_fewer_threads_than_asked_for() {
    let scratch = Scratch::new("limit");
    let output = Command::new(env!("CARGO_BIN_EXE_redlite-oracle"))
        .args(["bench", "tiny.gguf"])
        .current_dir(&scratch.0)
        .env("OMP_THREAD_LIMIT", "1")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("OMP_THREAD_LIMIT"));
}

#[test]
fn failures_name_the_file_and_leave_nothing() {
    let scratch = Scratch::new("failures");
    fs::write(scratch.path("ids"), "1 2 257").unwrap();
    fs::write(scratch.path("junk.gguf"), "not a model").unwrap();
    let model = fs::read(scratch.path("tiny.gguf")).unwrap();
    fs::write(scratch.path("short.gguf"), &model[..model.len() / 2]).unwrap();
    for (arguments, file, what) in [
        ("logits none.gguf --tokens ids -o x.npy", "none.gguf", "cannot read"),
        ("logits junk.gguf --tokens ids -o x.npy", "junk.gguf", "invalid magic"),
        ("logits short.gguf --tokens ids -o x.npy", "short.gguf", "not within the file bounds"),
        ("logits tiny.gguf --tokens none -o x.npy", "none", "cannot read"),
        ("logits tiny.gguf --tokens ids -o x.npy", "ids", "token 257 at index 2"),
        ("quantize junk.gguf out.gguf --experts F16 --dense F16", "junk.gguf", "invalid magic"),
        ("quantize tiny.gguf no/out.gguf --experts F16 --dense F16", "no/out.gguf", "cannot write"),
    ] {
        let message = scratch.fail(arguments);
        assert!(message.contains(file) && message.contains(what), "{arguments}: {message}");
    }
    assert!(!scratch.path("x.npy").exists() && !scratch.path("out.gguf").exists());
}
