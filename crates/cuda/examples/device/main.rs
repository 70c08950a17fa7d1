//! Checks and measurements that need a GPU; `scripts/cuda-check.sh` runs them.
//!
//! ```text
//! device check MODEL              decoders, conformance suite, stages and MODEL against the reference
//! device measure MODEL            tok/s and time of each stage
//! device tokens MODEL             time of a token by how it is chosen
//! device fetch MODEL [SLOTS …]    decode with slots for so many experts a layer, the others in pinned memory
//! device pipeline MODEL           tok/s of one GPU and of two, and whether they give the same bits
//! ```

mod cache;
mod check;
mod fetch;
mod measure;
mod passes;
mod pipeline;
mod rows;
mod tokens;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["check", model, ref only @ ..] => check::run(model.as_ref(), only),
        ["measure", model, ref lengths @ ..] => measure::run(model.as_ref(), lengths),
        ["tokens", model] => tokens::run(model.as_ref()),
        ["fetch", model, ref slots @ ..] => fetch::run(model.as_ref(), slots),
        ["pipeline", model, ref lengths @ ..] => pipeline::run(model.as_ref(), lengths),
        _ => {
            eprintln!(
                "usage: device check MODEL [NAME …] | device measure|pipeline MODEL [LENGTH …] | device tokens MODEL | device fetch MODEL [SLOTS …]"
            );
            ExitCode::from(2)
        }
    }
}
