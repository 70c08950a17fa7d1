//! What users see besides the result: progress bars, tables, sizes, memory.

use std::io::Write as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line on standard error. Nobody may be listening there any more, which is no reason to fail.
pub fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A progress bar on standard error, drawn only where somebody watches.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar that counts bytes.
    pub fn bytes(what: &'static str, total: u64, quiet: bool) -> Bar {
        Bar::new(what, total, quiet, "{bytes:>10} of {total_bytes}  {binary_bytes_per_sec}  {eta} left")
    }

    /// A bar that counts tokens.
    pub fn tokens(what: &'static str, total: usize, quiet: bool) -> Bar {
        Bar::new(what, total as u64, quiet, "{pos:>6} of {len} tokens  {per_sec}  {eta} left")
    }

    fn new(what: &'static str, total: u64, quiet: bool, numbers: &str) -> Bar {
        // Hidden by itself when standard error is not a terminal.
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(8) };
        let style = ProgressStyle::with_template(&format!("{{prefix:>9}} {{bar:14.cyan/dim}} {numbers}"));
        let style = style.expect("the template is ours").progress_chars("━╸─");
        let rate = |state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{:.1} tok/s", state.per_sec());
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        Bar(bar.with_style(style.with_key("per_sec", rate)).with_prefix(what))
    }

    /// Moves the bar.
    pub fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    /// Corrects the total.
    pub fn set_total(&self, total: u64) {
        self.0.set_length(total);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// A size for people: binary units, as memory is counted.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// Items a second.
pub fn rate(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-9)
}

/// Peak resident memory of this process by phase, where the system tells.
#[derive(Debug)]
pub struct PhasePeaks {
    phases: Vec<(&'static str, Option<u64>)>,
    /// The highest before the phase at hand.
    most: u64,
    /// Whether the system begins to count anew.
    fresh: bool,
}

impl PhasePeaks {
    /// The first phase is that since the program began.
    pub fn new() -> PhasePeaks {
        PhasePeaks { phases: Vec::new(), most: 0, fresh: true }
    }

    /// A phase ends.
    pub fn mark(&mut self, phase: &'static str) {
        let peak = peak_memory();
        self.phases.push((phase, peak.filter(|_| self.fresh)));
        self.most = self.most.max(peak.unwrap_or(0));
        // The number for "peak resident memory".
        self.fresh = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    }

    /// The peak of each phase that has ended.
    pub fn phases(&self) -> &[(&'static str, Option<u64>)] {
        &self.phases
    }

    /// The peak since the program began.
    pub fn most(&self) -> Option<u64> {
        peak_memory().map(|now| now.max(self.most))
    }
}

/// Peak resident memory of this process in bytes, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Rows of text in columns: the first left-aligned, numbers right-aligned.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let aligned = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        aligned.collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    let mut out = line(header.to_vec());
    for row in rows {
        out += &line(row.iter().map(String::as_str).collect());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.50 KiB");
        assert_eq!(size(18 << 30), "18.00 GiB");
    }

    #[test]
    fn tables_align() {
        let rows = [vec!["a".to_string(), "1".to_string()], vec!["long".to_string(), "12345".to_string()]];
        assert_eq!(table(&["name", "n"], &rows), "name      n\na         1\nlong  12345\n");
    }
}
