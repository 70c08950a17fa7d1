//! Arguments of `pull`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

/// Arguments of `pull`.
#[derive(Clone, Debug, Args)]
pub struct PullArgs {
    /// `OWNER/REPO:QUANT` on Hugging Face, such as `:IQ2_XXS` or a file's name, or the https address of a GGUF file.
    #[arg(value_name = "NAME|URL")]
    pub source: String,
    /// Folder for the files [default: ~/.local/share/redlite/models, in folders of owner and repository].
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,
    /// Branch, tag or commit of the repository.
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub revision: String,
    /// SHA-256 that the file must have, where the server does not say.
    #[arg(long, value_name = "HEX", value_parser = parse_hash)]
    pub sha256: Option<String>,
    /// Times to try again when nothing comes.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub retries: u32,
    /// Seconds before the first time, twice as many before each further one.
    #[arg(long, value_name = "S", default_value = "1", value_parser = parse_seconds)]
    pub retry_delay: Duration,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// No progress.
    #[arg(short, long)]
    pub quiet: bool,
}

fn parse_hash(text: &str) -> Result<String, String> {
    super::hub::hash(text).ok_or_else(|| "is no SHA-256: expected 64 hexadecimal digits".to_string())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "is not a number of seconds from 0 to 3600".to_string())
}
