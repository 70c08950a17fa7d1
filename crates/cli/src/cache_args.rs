//! Arguments about experts in bounded memory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use engine::plan::CacheWish;
use experts::simulate::Likeness;

use crate::args::BackendArgs;

/// How experts are kept and read.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Experts in memory")]
pub struct CacheArgs {
    /// Memory for experts: a size such as 4GiB, `full`, `auto` (what the machine can spare), or `mmap` (none:
    /// they are used from the mapped file).
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = parse_cache)]
    pub cache: CacheWish,
    /// How experts are read into it.
    #[arg(long, value_enum, default_value = "auto")]
    pub io: IoName,
    /// Threads that read them.
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub readers: u8,
    /// Experts beyond each token's own that are read ahead for the next layer while generating; `off` reads none.
    #[arg(long, value_name = "N", default_value = "4", value_parser = parse_look_ahead)]
    pub look_ahead: LookAhead,
    /// Memory that may be taken, or planned with [default: what this machine can spare now].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Memory of the GPU that may be taken [default: what is free there].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub gpu_memory: Option<u64>,
    /// Whether all experts lie in pinned memory of the host, from where a GPU with a cache fetches them by itself.
    #[arg(long, value_enum, default_value = "auto")]
    pub pin: Pin,
    /// Prefer experts that are in the cache while generating: X is added to their router logits. Fewer are read,
    /// but answers change, and depend on what the cache holds [default: off].
    #[arg(long, value_name = "X", value_parser = parse_bias, allow_negative_numbers = true)]
    pub route_bias: Option<f32>,
    /// A routing trace to be replayed, for a cache of so many bytes [that of the plan].
    #[arg(skip)]
    pub replay: Option<(Likeness, Option<u64>)>,
    /// Whether times of every load are kept.
    #[arg(skip)]
    pub trace: bool,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Model file, any shard of a split one, or its folder.
    pub model: PathBuf,
    /// Tokens of a prompt to plan for [default: long ones].
    #[arg(long, value_name = "N", value_parser = crate::args::parse_positive)]
    pub prompt: Option<usize>,
    /// Backend.
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A model file whose disk is measured.
    pub model: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Experts beyond each token's own that the look-ahead reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookAhead(pub Option<usize>);

/// Whether all experts are kept in pinned memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pin {
    /// If four fifths of what the host can spare hold them.
    Auto,
    /// Yes.
    On,
    /// No: they are read from the file.
    Off,
}

/// How experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoName {
    /// Whichever of `direct` and `cached` is faster now.
    Auto,
    /// Around the system's file cache.
    Direct,
    /// Through the system's file cache.
    Cached,
    /// Copied from the mapped file.
    Mmap,
}

/// Bytes of a size as people write it: 4GiB, 4G, 512MiB, 4096.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1u64 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err("should look like 4GiB or 512MiB".to_string()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| "should look like 4GiB or 512MiB".to_string())?;
    let bytes = number * unit as f64;
    // Finer than any memory, coarser than any overflow.
    if (0.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err("is no size of memory".to_string()) }
}

fn parse_cache(text: &str) -> Result<CacheWish, String> {
    match text {
        "auto" => Ok(CacheWish::Auto),
        "full" => Ok(CacheWish::Full),
        "mmap" => Ok(CacheWish::Mapped),
        size => parse_size(size)
            .map(CacheWish::Bytes)
            .map_err(|error| format!("{error}; or be `full`, `auto`, `mmap`")),
    }
}

fn parse_bias(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(bias) if (0.0..=100.0).contains(&bias) => Ok(bias),
        _ => Err("is a number from 0 to 100".to_string()),
    }
}

fn parse_look_ahead(text: &str) -> Result<LookAhead, String> {
    match text {
        "off" => Ok(LookAhead(None)),
        number => number.parse().map(|n| LookAhead(Some(n))).map_err(|_| "is a number or `off`".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        let found = ["4GiB", "4g", "1.5 GiB", "512MiB", "100", "2GB"].map(|text| parse_size(text).unwrap());
        assert_eq!(found, [4 << 30, 4 << 30, 3 << 29, 512 << 20, 100, 2_000_000_000]);
        for bad in ["", "GiB", "-1", "1e30", "4 Gib b", "4XB", "nan"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_cache("auto"), Ok(CacheWish::Auto));
        assert!(parse_cache("half").unwrap_err().contains("`full`"));
        assert_eq!(parse_look_ahead("off"), Ok(LookAhead(None)));
    }
}
