//! What this machine reached before, kept in the user's cache folder: the plan's rates come from there.
//!
//! `doctor` measures disks and peaks, `bench` what prompts and tokens reach; `run` and `serve` only measure a disk that is
//! not known yet. Numbers belong to a processor, a number of threads and kernels of one version; a machine that
//! differs in any of these starts anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use engine::plan::{HitCurve, Rates};
use experts::Io;
use model::{Capabilities, Cost, Model, Peaks};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::folders;

/// Layout of the file.
const VERSION: u64 = 1;

/// Tokens that older numbers count for at most, so that newer ones are heard.
const MOST_TOKENS: f64 = 4096.0;

/// Tokens from which on it is noted what a cache found.
pub const ENOUGH_TOKENS: usize = 32;

/// Bytes of a router that tell models apart.
const ROUTER_BYTES: usize = 64 << 10;

/// Largest file that is read.
const MOST_BYTES: u64 = 1 << 20;

/// Rates of reading a disk, bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disk {
    /// Around the file cache; `None` where the system cannot.
    pub direct: Option<f64>,
    /// Through the file cache.
    pub cached: f64,
}

/// A time per prompt length, measured on one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Passes.
    pub passes: usize,
    /// Seconds of all of it.
    pub seconds: f64,
    /// Operations of all of it.
    pub operations: f64,
}

/// Everything known about this machine.
pub struct Calibration {
    path: Option<PathBuf>,
    /// The entry of this machine: `workers.NAME.…`, `disks.NAME.…`, `models.NAME.…`.
    entry: Value,
}

impl Calibration {
    /// What is stored for this machine; empty if nothing is, or it cannot be read: then it is measured again.
    pub fn load() -> Calibration {
        let path = folders::cache().map(|folder| folder.join("machine.json"));
        let stored = path.as_deref().and_then(read);
        let entry = stored.filter(|entry| entry["machine"] == machine() && entry["version"] == VERSION);
        let entry = entry.unwrap_or_else(|| json!({ "version": VERSION, "machine": machine() }));
        Calibration { path, entry }
    }

    /// Stores what has been noted. A cache folder that cannot be written only means measuring again.
    pub fn store(&self) {
        let Some(path) = &self.path else { return };
        let write = || -> std::io::Result<()> {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            // Several runs may end at once: each writes a file of its own, the last one to be renamed stays.
            let new = path.with_extension(format!("{}.new", std::process::id()));
            let mut file = fs::File::create(&new)?;
            writeln!(file, "{:#}", self.entry)?;
            fs::rename(&new, path)
        };
        let _ = write();
    }

    /// Where it is stored.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The disk of a file.
    pub fn disk(&self, file: &Path) -> Option<Disk> {
        let disk = &self.entry["disks"][disk_name(file)?];
        Some(Disk { direct: positive(&disk["direct"]), cached: positive(&disk["cached"])? })
    }

    /// Notes the rates of a disk.
    pub fn note_disk(&mut self, file: &Path, disk: Disk) {
        if let Some(name) = disk_name(file) {
            self.entry["disks"][name] = json!({ "direct": disk.direct, "cached": disk.cached });
        }
    }

    /// Notes what some workers could do at most.
    pub fn note_peaks(&mut self, capabilities: &Capabilities, peaks: &Peaks) {
        let entry = &mut self.entry["workers"][workers(capabilities, Some(peaks.workers))];
        entry["peak_quantised"] = peaks.quantised.rate.into();
        entry["peak_plain"] = peaks.plain.rate.into();
        entry["peak_bytes"] = peaks.bytes.into();
    }

    /// Notes how long prompts of `model` took, whose experts were in place. Two lengths tell what a row costs and
    /// what a pass costs whatever its rows.
    pub fn note_reading(
        &mut self,
        model: &Model,
        capabilities: &Capabilities,
        threads: Option<usize>,
        readings: &[Reading],
    ) {
        let entry = &mut self.entry["workers"][workers(capabilities, threads)];
        let bytes = model.expert_bytes() as f64;
        let known = positive(&entry["decoded_bytes_per_second"]).map(|rate| bytes / rate);
        if let Some((operation, pass)) = fit(readings, known) {
            entry["operations_per_second"] = (1.0 / operation).into();
            if let Some(pass) = pass {
                entry["decoded_bytes_per_second"] = (bytes / pass).into();
            }
        }
    }

    /// Notes how long single tokens took, whose experts were in place.
    pub fn note_tokens(
        &mut self,
        capabilities: &Capabilities,
        threads: Option<usize>,
        cost: &Cost,
        seconds: f64,
    ) {
        let entry = &mut self.entry["workers"][workers(capabilities, threads)];
        entry["token_bytes_per_second"] = (cost.bytes as f64 / seconds.max(1e-9)).into();
    }

    /// Notes that a cache of `share` of a model's experts found `hits` of what `tokens` single tokens wanted. What
    /// was known of such a cache counts as well, for as many tokens as it was known from.
    pub fn note_hits(&mut self, model: &str, share: f64, hits: f64, tokens: usize) {
        let percent = (100.0 * share).round();
        if !(1.0..100.0).contains(&percent) || !(0.0..=1.0).contains(&hits) {
            return;
        }
        let entry = &mut self.entry["models"][model];
        let key = format!("found_of_{percent}_percent");
        let known =
            entry[&key].as_array().and_then(|pair| Some((pair.first()?.as_f64()?, pair.get(1)?.as_f64()?)));
        let (before, weight) = known.unwrap_or((0.0, 0.0));
        let (weight, tokens) = (weight.clamp(0.0, MOST_TOKENS), tokens as f64);
        entry[key] = json!([(before * weight + hits * tokens) / (weight + tokens).max(1.0), weight + tokens]);
    }

    /// What caches of a model find, as far as it was measured; else what is assumed.
    pub fn hits(&self, model: &str) -> HitCurve {
        let point = |(key, value): (&String, &Value)| {
            let percent = key.strip_prefix("found_of_")?.strip_suffix("_percent")?.parse::<f64>().ok()?;
            Some((percent / 100.0, value.as_array()?.first()?.as_f64()?))
        };
        let entry = self.entry["models"][model].as_object();
        let curve = HitCurve::measured(entry.into_iter().flatten().filter_map(point));
        if curve.is_measured() { curve } else { HitCurve::default() }
    }

    /// Rates for a plan: of the workers, and of reading from `disk`, if experts are read.
    pub fn rates(
        &self,
        capabilities: &Capabilities,
        threads: Option<usize>,
        disk: Option<(Disk, Io)>,
    ) -> Rates {
        let entry = &self.entry["workers"][workers(capabilities, threads)];
        let mut rates = Rates {
            ingestion: positive(&entry["operations_per_second"]),
            decoding: positive(&entry["decoded_bytes_per_second"]),
            tokens: positive(&entry["token_bytes_per_second"]),
            ..Rates::default()
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        match disk {
            Some((Disk { direct: Some(direct), .. }, Io::Direct)) => rates.read = Some(direct),
            Some((Disk { cached, .. }, _)) => {
                // Copying occupies a processor, which computes nothing meanwhile.
                (rates.read, rates.copy) = (Some(cached), 1.0 / (cached * processors));
            }
            None => {}
        }
        rates
    }
}

/// A name for a model, by what decides which experts are chosen and how many there are: the router of its first layer, and
/// the shape of its experts.
pub fn model_name(model: &Model) -> String {
    let moe = &model.spec.moe;
    let mut hash = Sha256::new();
    for number in [model.spec.layers.len(), model.spec.hidden, moe.experts, moe.used] {
        hash.update((number as u64).to_le_bytes());
    }
    hash.update(model.expert_bytes().to_le_bytes());
    let router = model.gguf.tensors().iter().find(|tensor| tensor.name == "blk.0.ffn_gate_inp.weight");
    if let Some(tensor) = router {
        let bytes = model.gguf.shards()[tensor.shard].bytes();
        let end = bytes.len().min((tensor.offset as usize).saturating_add(ROUTER_BYTES));
        hash.update(bytes.get(tensor.offset as usize..end).unwrap_or_default());
    }
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Seconds of an operation and of a pass, from times of prompts: least squares of relative errors. With one length, or
/// lengths that contradict the sense, `known` seconds of a pass are taken.
fn fit(readings: &[Reading], known: Option<f64>) -> Option<(f64, Option<f64>)> {
    let (mut xx, mut xy, mut yy, mut xt, mut yt) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for reading in readings.iter().filter(|reading| reading.seconds > 0.0 && reading.operations > 0.0) {
        let (x, y) = (reading.operations / reading.seconds, reading.passes as f64 / reading.seconds);
        (xx, xy, yy, xt, yt) = (xx + x * x, xy + x * y, yy + y * y, xt + x, yt + y);
    }
    if xx == 0.0 {
        return None;
    }
    let determinant = xx * yy - xy * xy;
    // Lengths alike say nothing about the difference.
    if determinant > 1e-3 * xx * yy {
        let (operation, pass) = ((xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant);
        if operation > 0.0 && pass > 0.0 {
            return Some((operation, Some(pass)));
        }
    }
    let operation = (xt - known.unwrap_or(0.0) * xy) / xx;
    if operation > 0.0 { Some((operation, None)) } else { Some((xt / xx, None)) }
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && *number > 0.0)
}

/// The key of workers with kernels.
fn workers(capabilities: &Capabilities, threads: Option<usize>) -> String {
    let Capabilities { name, variant, kernel_version, .. } = capabilities;
    let threads = threads.map_or(String::new(), |threads| format!(" x{threads}"));
    format!("{name} {variant} v{kernel_version}{threads}")
}

fn read(path: &Path) -> Option<Value> {
    let file = fs::File::open(path).ok()?;
    (file.metadata().ok()?.len() <= MOST_BYTES).then_some(())?;
    let value: Value = serde_json::from_reader(file).ok()?;
    // Indexing inserts only into objects.
    let is_object = |value: &Value| value.is_null() || value.is_object();
    let fields = |value: &Value| value.as_object().is_none_or(|map: &Map<_, _>| map.values().all(is_object));
    let sound = value.is_object()
        && ["workers", "disks", "models"].iter().all(|&key| is_object(&value[key]) && fields(&value[key]));
    sound.then_some(value)
}

/// The processor and how many of it there are.
fn machine() -> String {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {count} processors", processor())
}

/// The processor's name, or its architecture.
pub fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string()
}

/// A name for the disk of a file.
#[cfg(unix)]
fn disk_name(file: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    Some(format!("device {}", fs::metadata(file).ok()?.dev()))
}

/// As above: the volume.
#[cfg(not(unix))]
fn disk_name(file: &Path) -> Option<String> {
    let whole = file.canonicalize().ok()?;
    Some(whole.components().next()?.as_os_str().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(rows: usize, passes: usize) -> Reading {
        let operations = (rows * passes) as f64 * 1e9;
        // 2 ps an operation, half a second a pass.
        Reading { passes, seconds: operations * 2e-12 + 0.5 * passes as f64, operations }
    }

    #[test]
    fn two_lengths_tell_rows_from_passes() {
        let (operation, pass) = fit(&[reading(512, 1), reading(2048, 1), reading(2048, 4)], None).unwrap();
        assert!((operation / 2e-12 - 1.0).abs() < 1e-9 && (pass.unwrap() / 0.5 - 1.0).abs() < 1e-9);
        let (operation, pass) = fit(&[reading(2048, 1)], Some(0.5)).unwrap();
        assert!((operation / 2e-12 - 1.0).abs() < 1e-9 && pass.is_none());
        assert_eq!(fit(&[], None), None);
        // A longer prompt that was faster for each row and pass: no pass takes less than nothing.
        let odd = [Reading { seconds: 1.0, ..reading(512, 1) }, Reading { seconds: 4.2, ..reading(2048, 1) }];
        assert!(fit(&odd, None).unwrap().1.is_none());
    }

    fn capabilities() -> Capabilities {
        Capabilities {
            name: "cpu",
            variant: "fast".to_string(),
            kernel_version: 1,
            block_rows: 2048,
            smallest_chunk: 1,
        }
    }

    #[test]
    fn what_is_noted_comes_back_and_damage_is_measured_again() {
        let folder = std::env::temp_dir().join(format!("redlite-calibration-{}", std::process::id()));
        let path = folder.join("machine.json");
        let entry = json!({ "version": VERSION, "machine": machine() });
        let mut first = Calibration { path: Some(path.clone()), entry };
        let disk = Disk { direct: Some(1e9), cached: 2e9 };
        fs::create_dir_all(&folder).unwrap();
        first.note_disk(&folder, disk);
        first.note_tokens(&capabilities(), Some(2), &Cost { bytes: 30, ..Cost::default() }, 2.0);
        first.store();
        let again = Calibration { path: None, entry: read(&path).unwrap() };
        assert_eq!(again.disk(&folder), Some(disk));
        let rates = again.rates(&capabilities(), Some(2), Some((disk, Io::Direct)));
        assert_eq!(
            (rates.tokens, rates.read, rates.copy, rates.ingestion),
            (Some(15.0), Some(1e9), 0.0, None)
        );
        let cached = again.rates(&capabilities(), Some(2), Some((disk, Io::Cached)));
        assert!(cached.read == Some(2e9) && cached.copy > 0.0);
        assert_eq!(again.rates(&capabilities(), Some(1), None), Rates::default(), "other workers");
        let mut first = Calibration { path: None, ..again };
        assert!(!first.hits("m").is_measured(), "assumed");
        first.note_hits("m", 0.221, 0.5, 100);
        first.note_hits("m", 0.219, 0.8, 200);
        first.note_hits("m", 1.0, 1.0, 100);
        first.note_hits("m", 0.5, f64::NAN, 100);
        let curve = first.hits("m");
        assert!(curve.is_measured() && (curve.at(0.22) - 0.7).abs() < 1e-9, "weighed by tokens: {curve:?}");
        assert!((0..100).all(|_| {
            first.note_hits("m", 0.22, 0.2, 4096);
            first.hits("m").at(0.22) < 0.7
        }));
        assert!((first.hits("m").at(0.22) - 0.2).abs() < 1e-3, "old numbers fade");
        assert!(!first.hits("other").is_measured());
        first.entry["models"]["m"] = json!({ "found_of_x_percent": [1], "found_of_3_percent": 4 });
        assert!(!first.hits("m").is_measured());
        for damaged in ["", "[]", "{\"disks\": 3}", "{\"workers\": {\"a\": 1}}", "nonsense"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), None, "{damaged}");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
