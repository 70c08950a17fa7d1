//! llama.cpp as the reference that Red Lite is compared with: logits, speed,
//! tokenizer and quantiser of the real thing, built for the CPU it runs on.

mod bench;
mod cpu;
mod error;
mod gguf;
mod info;
mod llama;
mod logits;
mod output;
mod quantize;
mod tokenize;
mod tokens;
mod types;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// llama.cpp as the reference that Red Lite is compared with.
///
/// Exit status: 0 done, 1 failed, 2 wrong usage, 3 `bench` refused because the
/// library does not use this CPU's instruction sets.
#[derive(Debug, Parser)]
#[command(name = "redlite-oracle", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Show llama.cpp's own log
    #[arg(long, global = true)]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Logits(logits::Args),
    Bench(bench::Args),
    Quantize(quantize::Args),
    Tokenize(tokenize::Args),
    /// Print llama.cpp's system information and how it was built
    Info,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

impl Switch {
    fn is_on(self) -> bool {
        self == Switch::On
    }
}

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

/// Parses a count of at least one.
fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("a whole number from 1 up is expected".to_string()),
        Ok(value) => Ok(value),
    }
}

/// As many threads as the process may use.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    llama::start(cli.verbose);
    if !matches!(cli.command, Command::Info) {
        eprintln!("{}: {}", info::library(), llama::system_info());
    }
    let result = match &cli.command {
        Command::Logits(args) => logits::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Info => info::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that went away has what it wanted.
        Err(error::Error::Stdout(source)) if source.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("redlite-oracle: {error}");
            ExitCode::from(error.code())
        }
    }
}
