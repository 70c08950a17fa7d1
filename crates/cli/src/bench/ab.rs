//! `--ab`: two settings, or two programs, in turn.
//!
//! Every measurement is a process of its own, so that neither leaves anything behind for the other. The order within a
//! pair alternates, so that a machine that slows down favours neither.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::Cancel;
use serde_json::{Value, json};

use super::args::BenchArgs;
use super::stats::Samples;
use crate::failure::{Failure, Outcome};
use crate::{interrupt, report};

/// How often a running process and Ctrl-C are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Runs the command.
pub fn run(args: &BenchArgs, flags: &[String]) -> Result<Outcome, Failure> {
    if !(0.0..=3600.0).contains(&args.ab.pause) {
        return Err(Failure::Usage(format!("--pause {} is not between 0 and 3600 seconds", args.ab.pause)));
    }
    let [a, b] = flags else { return Err(Failure::Usage("--ab needs two settings".to_string())) };
    let common = common(std::env::args_os().skip(1));
    let sides = [Side::new(a, &common)?, Side::new(b, &common)?];
    let cancel = interrupt::on_ctrl_c()?;
    let mut pairs: Vec<[Vec<Measured>; 2]> = Vec::new();
    for number in 0..args.repeat {
        let mut pair = [Vec::new(), Vec::new()];
        for turn in [number % 2, 1 - number % 2] {
            pause(Duration::from_secs_f64(args.ab.pause), &cancel)?;
            pair[turn] = sides[turn].measure(&cancel)?;
        }
        let pair = matched(pair)?;
        if !args.json {
            report::say(progress_line(number + 1, args.repeat, &pair));
        }
        pairs.push(pair);
    }
    print(args, [a, b], &Comparison::all(&pairs))?;
    Ok(Outcome::Success)
}

/// The arguments both sides share: those of this process without what `--ab` is about.
fn common(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut common = Vec::new();
    let mut skip = 0;
    for arg in args {
        if skip > 0 {
            skip -= 1;
            continue;
        }
        let text = arg.to_string_lossy();
        let with_value = |name: &str| text.strip_prefix(name).is_some_and(|rest| rest.starts_with('='));
        match &*text {
            "--ab" => skip = 2,
            "--repeat" | "--pause" => skip = 1,
            "--json" | "--no-profile" => (),
            _ if with_value("--repeat") || with_value("--pause") => (),
            _ => common.push(arg),
        }
    }
    common
}

/// Words as a shell would see them: quotes hold them together, a backslash takes the meaning of what follows.
fn words(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('\\', None | Some('"')) => {
                word.get_or_insert_default().push(chars.next().ok_or("ends with a backslash")?)
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("has a quote that does not end".to_string());
    }
    words.extend(word);
    Ok(words)
}

/// One of the two.
#[derive(Debug)]
struct Side {
    program: PathBuf,
    args: Vec<OsString>,
}

impl Side {
    fn new(flags: &str, common: &[OsString]) -> Result<Side, Failure> {
        let mut words = words(flags).map_err(|what| Failure::Usage(format!("--ab: `{flags}` {what}")))?;
        let own = std::env::current_exe().map_err(|error| {
            Failure::Usage(format!("cannot find this program, to run it again: {error}; name one in --ab"))
        })?;
        let named = words.first().is_some_and(|word| !word.starts_with('-'));
        let program = if named { PathBuf::from(words.remove(0)) } else { own };
        if named && !program.is_file() {
            let name = program.display();
            return Err(Failure::Usage(format!(
                "--ab: `{name}` is neither an option nor the path of a program"
            )));
        }
        let mut args = common.to_vec();
        // Other programs may not know what they could leave out.
        if !named {
            args.push("--no-profile".into());
        }
        args.extend(["--repeat", "1", "--json"].map(OsString::from));
        args.extend(words.into_iter().map(OsString::from));
        Ok(Side { program, args })
    }

    /// Runs it and reads what it measured.
    fn measure(&self, cancel: &Cancel) -> Result<Vec<Measured>, Failure> {
        let said = self.output(cancel)?;
        let what = || format!("{}: printed no results of a bench", self.line());
        let value: Value = serde_json::from_slice(&said).map_err(|_| Failure::Usage(what()))?;
        let rows = value["results"].as_array().map(|rows| rows.iter().filter_map(Measured::from).collect());
        rows.filter(|rows: &Vec<_>| !rows.is_empty()).ok_or_else(|| Failure::Usage(what()))
    }

    /// Its standard output, once it has ended well.
    fn output(&self, cancel: &Cancel) -> Result<Vec<u8>, Failure> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let file = |source| Failure::File { path: self.program.clone(), source };
        let mut child = Guard(command.spawn().map_err(file)?);
        let (results, words) = (collect(child.0.stdout.take()), collect(child.0.stderr.take()));
        let status = loop {
            if cancel.is_cancelled() {
                return Err(Failure::Interrupted);
            }
            match child.0.try_wait().map_err(file)? {
                Some(status) => break status,
                None => std::thread::sleep(LOOK),
            }
        };
        let [results, words] = [results, words].map(|reader| reader.join().unwrap_or_default());
        match status.code() {
            Some(0) => Ok(results),
            Some(130) => Err(Failure::Interrupted),
            _ => {
                let words = String::from_utf8_lossy(&words);
                Err(Failure::Usage(format!("{}\n{}: {status}", words.trim_end(), self.line())))
            }
        }
    }

    fn line(&self) -> String {
        let args = self.args.iter().map(|arg| arg.to_string_lossy());
        let program = self.program.display().to_string();
        std::iter::once(program.into()).chain(args).collect::<Vec<_>>().join(" ")
    }
}

/// Reads all that comes, beside the waiting. What cannot be read is as good as not said.
fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut said = Vec::new();
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut said));
        said
    })
}

/// A process that ends with the value, whichever way.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // One that has ended already is no failure.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pause(time: Duration, cancel: &Cancel) -> Result<(), Failure> {
    let began = Instant::now();
    while began.elapsed() < time {
        if cancel.is_cancelled() {
            return Err(Failure::Interrupted);
        }
        std::thread::sleep(LOOK.min(time.saturating_sub(began.elapsed())));
    }
    Ok(())
}

/// A row of a bench.
#[derive(Clone, Debug, PartialEq)]
struct Measured {
    test: String,
    tokens: u64,
    depth: u64,
    /// Tokens a second.
    rate: f64,
}

impl Measured {
    fn from(value: &Value) -> Option<Measured> {
        Some(Measured {
            test: value["test"].as_str()?.to_string(),
            tokens: value["tokens"].as_u64()?,
            depth: value["depth"].as_u64()?,
            rate: value["median"].as_f64().filter(|rate| rate.is_finite() && *rate > 0.0)?,
        })
    }

    fn is_of(&self, other: &Measured) -> bool {
        (&self.test, self.tokens, self.depth) == (&other.test, other.tokens, other.depth)
    }
}

/// The tests both sides have, in the order of the first. A program that measures one in several ways is taken at its
/// best.
fn matched([a, b]: [Vec<Measured>; 2]) -> Result<[Vec<Measured>; 2], Failure> {
    let best = |rows: &[Measured], of: &Measured| {
        let same = rows.iter().filter(|row| row.is_of(of));
        same.max_by(|x, y| x.rate.total_cmp(&y.rate)).cloned()
    };
    let mut both = [Vec::new(), Vec::new()];
    for row in &a {
        if both[0].iter().any(|seen: &Measured| seen.is_of(row)) {
            continue;
        }
        if let (Some(x), Some(y)) = (best(&a, row), best(&b, row)) {
            both[0].push(x);
            both[1].push(y);
        }
    }
    if both[0].is_empty() {
        return Err(Failure::Usage("the two sides of --ab have no test in common".to_string()));
    }
    Ok(both)
}

fn progress_line(number: usize, pairs: usize, [a, b]: &[Vec<Measured>; 2]) -> String {
    let cells = a.iter().zip(b).map(|(a, b)| {
        format!("{} {}: {:.2} / {:.2} = {:.3}", a.test, a.tokens, b.rate, a.rate, b.rate / a.rate)
    });
    format!("pair {number} of {pairs}, B / A: {}", cells.collect::<Vec<_>>().join("; "))
}

/// All pairs of a test.
struct Comparison {
    test: Measured,
    rates: [Samples; 2],
    /// Rate of B by that of A, pair by pair.
    ratios: Vec<f64>,
    spread: Samples,
}

impl Comparison {
    fn all(pairs: &[[Vec<Measured>; 2]]) -> Vec<Comparison> {
        let Some([first, _]) = pairs.first() else { return Vec::new() };
        let of = |test: &Measured| {
            let rates = |side: usize| -> Vec<f64> {
                let rows = pairs.iter().filter_map(|pair| pair[side].iter().find(|row| row.is_of(test)));
                rows.map(|row| row.rate).collect()
            };
            let (a, b) = (rates(0), rates(1));
            let ratios: Vec<f64> = a.iter().zip(&b).map(|(a, b)| b / a).collect();
            Some(Comparison {
                test: test.clone(),
                rates: [Samples::new(a)?, Samples::new(b)?],
                spread: Samples::new(ratios.clone())?,
                ratios,
            })
        };
        first.iter().filter_map(of).collect()
    }
}

fn print(args: &BenchArgs, flags: [&str; 2], comparisons: &[Comparison]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let side = |samples: &Samples| json!({ "median": samples.median(), "samples": samples.all() });
        let one = |c: &Comparison| {
            json!({
                "test": c.test.test, "tokens": c.test.tokens, "depth": c.test.depth,
                "a": side(&c.rates[0]), "b": side(&c.rates[1]), "ratios": c.ratios,
                "ratio": c.spread.median(), "min": c.spread.min(), "max": c.spread.max(),
            })
        };
        let results: Vec<Value> = comparisons.iter().map(one).collect();
        let value = json!({ "a": flags[0], "b": flags[1], "unit": "tokens/s", "results": results });
        return writeln!(out, "{value:#}");
    }
    let row = |c: &Comparison| {
        let mut cells = vec![c.test.test.clone()];
        cells.extend([c.test.tokens, c.test.depth].map(|n| n.to_string()));
        cells.extend(c.rates.iter().map(|samples| format!("{:.2}", samples.median())));
        cells.extend([c.spread.median(), c.spread.min(), c.spread.max()].map(|ratio| format!("{ratio:.3}")));
        cells.push(c.ratios.iter().map(|ratio| format!("{ratio:.3}")).collect::<Vec<_>>().join(" "));
        cells
    };
    let rows: Vec<Vec<String>> = comparisons.iter().map(row).collect();
    writeln!(out, "A: {}\nB: {}\n", flags[0], flags[1])?;
    let header =
        ["test", "tokens", "depth", "A tokens/s", "B tokens/s", "B / A", "min", "max", "pair by pair"];
    write!(out, "{}", report::table(&header, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, tokens: u64, rate: f64) -> Measured {
        Measured { test: test.to_string(), tokens, depth: 0, rate }
    }

    #[test]
    fn words_are_those_of_a_shell() {
        let ok = |text: &str| words(text).unwrap();
        assert_eq!(ok(""), Vec::<String>::new());
        assert_eq!(ok("  --threads 1\t--x=2 "), ["--threads", "1", "--x=2"]);
        assert_eq!(ok(r#"'a b' c"d e"f \'g "\"" ''"#), ["a b", "cd ef", "'g", "\"", ""]);
        assert_eq!(ok(r"'\'"), [r"\"]);
        assert!(words("'a").is_err() && words("a\\").is_err());
    }

    #[test]
    fn both_sides_get_what_is_not_of_the_comparison() {
        let args = [
            "bench",
            "M",
            "--ab",
            "--threads 1",
            "./other",
            "--repeat",
            "9",
            "--json",
            "--pause=2",
            "--gen",
            "3",
        ];
        let common: Vec<OsString> = common(args.into_iter().map(OsString::from));
        assert_eq!(common, ["bench", "M", "--gen", "3"]);
        let side = Side::new("--threads '1'", &common).unwrap();
        let expected =
            ["bench", "M", "--gen", "3", "--no-profile", "--repeat", "1", "--json", "--threads", "1"];
        assert_eq!(side.args, expected);
        let exe = std::env::current_exe().unwrap();
        let other = Side::new(&format!("{} -x", exe.display()), &common).unwrap();
        assert_eq!((other.program, other.args.last().unwrap().to_str()), (exe, Some("-x")));
        assert!(Side::new("nowhere/redlite", &common).unwrap_err().to_string().contains("nowhere/redlite"));
    }

    #[test]
    fn sides_are_matched_by_test_and_taken_at_their_best() {
        let a = vec![row("prompt", 512, 10.0), row("prompt", 64, 1.0), row("gen", 4, 2.0)];
        let b = vec![row("gen", 4, 3.0), row("prompt", 512, 20.0), row("prompt", 512, 40.0)];
        let [a, b] = matched([a, b]).unwrap();
        assert_eq!(a, [row("prompt", 512, 10.0), row("gen", 4, 2.0)]);
        assert_eq!(b, [row("prompt", 512, 40.0), row("gen", 4, 3.0)]);
        assert!(matched([vec![row("gen", 1, 1.0)], vec![row("gen", 2, 1.0)]]).is_err());
    }

    #[test]
    fn the_ratio_is_the_median_of_the_pairs() {
        let pair = |a, b| [vec![row("gen", 4, a)], vec![row("gen", 4, b)]];
        let all = Comparison::all(&[pair(1.0, 2.0), pair(2.0, 8.0), pair(4.0, 12.0)]);
        assert_eq!(all[0].ratios, [2.0, 4.0, 3.0]);
        let spread = &all[0].spread;
        assert_eq!((spread.median(), spread.min(), spread.max()), (3.0, 2.0, 4.0));
        assert_eq!((all[0].rates[0].median(), all[0].rates[1].median()), (2.0, 8.0));
    }
}
