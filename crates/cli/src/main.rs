//! The `redlite` binary: arguments in, libraries called, text out.

mod args;
mod bench;
mod cache;
mod cache_args;
mod calibration;
mod chat;
mod experts;
mod failure;
mod folders;
mod forge_files;
mod gpu;
mod info;
mod interrupt;
mod kept;
mod logits;
mod open;
mod parity;
mod perplexity;
mod planning;
mod prompt;
mod pull;
mod report;
mod run;
mod serve;
mod stored;
mod tokenize;
mod trace;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::{Failure, Outcome};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Plan(args) => planning::plan(&args),
        Command::Doctor(args) => planning::doctor(&args),
        Command::Info(args) => info::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Convert(args) => forge_files::convert(&args),
        Command::Quantize(args) => forge_files::quantize(&args),
        Command::Synth(args) => forge_files::synth(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Parity(args) => parity::run(&args),
        Command::Experts(args) => experts::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    match result {
        Ok(Outcome::Success) => ExitCode::SUCCESS,
        Ok(Outcome::Negative) => ExitCode::from(1),
        Err(Failure::Interrupted) => ExitCode::from(130),
        // The reader of our output has gone (`redlite … | head`): nobody is left to tell.
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            report::say(format_args!("redlite: {failure}"));
            ExitCode::from(2)
        }
    }
}
