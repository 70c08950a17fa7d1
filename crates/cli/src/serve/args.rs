//! Arguments of `serve`.

use std::path::PathBuf;

use clap::Args;

use crate::args::{BackendArgs, parse_positive};

/// Arguments of `serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// Address to listen on; anything but this machine's own needs an API key to be safe.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one. The address is the only line on standard output.
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// Key that clients must show [default: the environment variable REDLITE_API_KEY, if set].
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Origin of web pages that may use the server, such as `http://localhost:3000` (may be repeated; `*` is any).
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Name of the model for clients [default: the file's].
    #[arg(long)]
    pub name: Option<String>,
    /// Use the chat template in this file (Jinja) instead of the model's own.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Requests that run at once, each with a whole context.
    #[arg(long, value_name = "N", default_value = "4", value_parser = parse_positive)]
    pub parallel: usize,
    /// Requests that may wait for their turn; more are told to come back.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Memory for what has been read before, in MiB; 0 reads everything again.
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub session_cache: u64,
    /// Folder for what has been read, so that it survives a restart [default: none].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Most disk space for each model in it, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 16_384)]
    pub state_size: u64,
    /// Tokens between two checkpoints inside a long prompt.
    #[arg(long, value_name = "N", default_value = "2048", value_parser = parse_positive)]
    pub spacing: usize,
    /// No line for each request.
    #[arg(short, long)]
    pub quiet: bool,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
}
