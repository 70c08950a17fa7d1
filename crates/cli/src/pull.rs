//! `redlite pull`: model files from Hugging Face, or from any server.

pub mod args;
mod error;
mod http;
mod hub;
mod space;
mod transfer;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::{folders, interrupt, report};
use args::PullArgs;
pub use error::Error;
use http::{Client, Origin, Patience};
use hub::{Remote, Source};
use transfer::Fetched;

/// Where names are looked up unless HF_ENDPOINT says another.
const ENDPOINT: &str = "https://huggingface.co";

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<Outcome, Failure> {
    let source = hub::source(&args.source)?;
    let endpoint = endpoint()?;
    let agent = http::agent();
    let connections = agent.clone();
    // Whoever waits for bytes is woken.
    let cancel = interrupt::on_ctrl_c_then(move || connections.clone().shutdown())?;
    let patience = Patience { retries: args.retries, delay: args.retry_delay };
    let client = Client::new(agent, token(&endpoint), cancel, patience);
    let (mut wanted, folder) = match &source {
        Source::Repo { repo, quant } => {
            let files = hub::list(&client, &endpoint, repo, &args.revision)?;
            (hub::choose(repo, files, quant.as_deref())?, folder(args, Path::new(repo))?)
        }
        Source::Url(url) => (hub::of_url(&page_to_file(url, &endpoint))?, folder(args, Path::new(""))?),
    };
    check_against_user(&mut wanted, args)?;
    std::fs::create_dir_all(&folder).map_err(|source| Failure::File { path: folder.clone(), source })?;
    let to_come =
        |file: &Remote| file.size.map_or(0, |size| size.saturating_sub(transfer::present(file, &folder)));
    space::check(&folder, wanted.iter().map(to_come).sum())?;
    let mut fetched = Vec::new();
    for file in &wanted {
        if !args.quiet && !args.json {
            report::say(format_args!("{}", file.name));
        }
        let done = transfer::fetch(&client, file, &folder, args.quiet || args.json);
        if let (Err(Error::Cancelled), false) = (&done, args.quiet) {
            report::say("redlite: interrupted; the same command goes on from here");
        }
        fetched.push(done?);
    }
    check_model(&fetched[0].path)?;
    tell(&fetched, args)?;
    Ok(Outcome::Success)
}

/// Where names are looked up.
fn endpoint() -> Result<String, Failure> {
    let named = std::env::var("HF_ENDPOINT").ok().filter(|endpoint| !endpoint.is_empty());
    let endpoint = named.map_or(ENDPOINT.to_string(), |named| named.trim_end_matches('/').to_string());
    match Origin::of(&endpoint) {
        Some(_) => Ok(endpoint),
        None => {
            Err(Failure::Usage(format!("HF_ENDPOINT is `{endpoint}`, which is no address of http or https")))
        }
    }
}

/// The user's token, and whom it is for. It never goes where somebody might listen.
fn token(endpoint: &str) -> Option<(Origin, String)> {
    let token = std::env::var("HF_TOKEN").ok().map(|token| token.trim().to_string())?;
    let origin = Origin::of(endpoint).filter(|_| !token.is_empty())?;
    if !origin.is_private() {
        report::say("redlite: warning: HF_ENDPOINT is not https, so HF_TOKEN is not sent");
        return None;
    }
    Some((origin, token))
}

/// The address of a file, where that of its page was given.
fn page_to_file(url: &str, endpoint: &str) -> String {
    match Origin::of(url) == Origin::of(endpoint) {
        true => url.replacen("/blob/", "/resolve/", 1),
        false => url.to_string(),
    }
}

/// The folder for the files, `below` the one for all models unless the user says another.
fn folder(args: &PullArgs, below: &Path) -> Result<PathBuf, Failure> {
    let models = || folders::data().map(|data| data.join("models").join(below));
    let none = || Failure::Usage("there is no home folder for models; name a folder with --to".to_string());
    args.to.clone().or_else(models).ok_or_else(none)
}

/// What the user says about the file's hash.
fn check_against_user(wanted: &mut [Remote], args: &PullArgs) -> Result<(), Failure> {
    let Some(sha256) = &args.sha256 else { return Ok(()) };
    let [file] = wanted else {
        return Err(Failure::Usage(format!("--sha256 is for one file, these are {}", wanted.len())));
    };
    match &file.sha256 {
        Some(theirs) if theirs != sha256 => Err(Failure::Usage(format!(
            "{}: the server says that its SHA-256 is {theirs}, not the one given",
            file.name
        ))),
        _ => {
            file.sha256 = Some(sha256.clone());
            Ok(())
        }
    }
}

/// Checks that a whole model has come, and says so if this program cannot run it.
fn check_model(path: &Path) -> Result<(), Failure> {
    gguf::Gguf::open(path)
        .map_err(|error| Failure::Model { path: path.to_path_buf(), source: error.into() })?;
    if let Err(error) = model::Model::open(path) {
        report::say(format_args!("redlite: warning: this program cannot run it: {error}"));
    }
    Ok(())
}

/// Tells what is there, and what to do next.
fn tell(fetched: &[Fetched], args: &PullArgs) -> Result<(), Failure> {
    let next = format!("redlite run {} -p \"Hello\"", quoted(&fetched[0].path));
    let mut out = std::io::stdout().lock();
    if args.json {
        let file = |file: &Fetched| {
            json!({
                "path": file.path,
                "bytes": file.bytes,
                "sha256": file.sha256,
                "verified": file.verified,
                "resumed_from": file.resumed,
            })
        };
        let files: Vec<_> = fetched.iter().map(file).collect();
        return Ok(writeln!(out, "{}", json!({"model": fetched[0].path, "files": files, "next": next}))?);
    }
    for file in fetched {
        let checked = if file.verified { "verified" } else { "not verified: the server tells no SHA-256" };
        let size = report::size(file.bytes);
        report::say(format_args!("{}: {size}, SHA-256 {} {checked}", file.path.display(), file.sha256));
    }
    Ok(writeln!(out, "{next}")?)
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@%".contains(c);
    if path.chars().all(plain) { path } else { format!("'{}'", path.replace('\'', "'\\''")) }
}
