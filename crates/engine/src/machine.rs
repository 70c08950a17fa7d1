//! What the machine has: memory that this process may still take.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory this process may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spare {
    /// Bytes.
    pub bytes: u64,
    /// What limits it, in words.
    pub limit: &'static str,
}

/// Memory that this process may still take without pushing anybody out: what the system calls available, or
/// what is left of the control group's limit, if that is less. File cache counts as free in both. `None` where the
/// system does not tell.
pub fn spare_memory() -> Option<Spare> {
    spare_under(Path::new("/"))
}

/// As [`spare_memory`], for a system whose files lie under `root`.
fn spare_under(root: &Path) -> Option<Spare> {
    let system = meminfo(&root.join("proc/meminfo"), "MemAvailable:");
    let system = system.map(|bytes| Spare { bytes, limit: "available memory" });
    let group = group_spare(root).map(|bytes| Spare { bytes, limit: "the control group's limit" });
    system.into_iter().chain(group).min_by_key(|spare| spare.bytes)
}

/// Memory of the machine.
pub fn total_memory() -> Option<u64> {
    meminfo(Path::new("/proc/meminfo"), "MemTotal:")
}

/// The limit of the control group, if there is one.
pub fn group_limit() -> Option<u64> {
    let root = Path::new("/");
    groups(root).into_iter().filter_map(|group| group.limit()).min()
}

fn meminfo(path: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A memory control group, of version 1 or 2.
struct Group {
    folder: PathBuf,
    /// File of the limit, file of the use, key of evictable file cache in `memory.stat`.
    files: [&'static str; 3],
}

impl Group {
    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }

    /// Version 1 writes a number near 2^63 for "none", version 2 a word.
    fn limit(&self) -> Option<u64> {
        self.number(self.files[0]).filter(|&limit| limit < 1 << 60)
    }

    fn spare(&self) -> Option<u64> {
        let used = self.number(self.files[1])?;
        let stat = fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let cache: u64 = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(key, _)| key.strip_prefix("total_").unwrap_or(key).ends_with(self.files[2]))
            .filter(|(key, _)| key.starts_with("total_") == self.files[0].ends_with("in_bytes"))
            .filter_map(|(_, bytes)| bytes.parse::<u64>().ok())
            .sum();
        Some(self.limit()?.saturating_sub(used.saturating_sub(cache)))
    }
}

fn group_spare(root: &Path) -> Option<u64> {
    groups(root).into_iter().filter_map(|group| group.spare()).min()
}

/// The process's group and those above it.
fn groups(root: &Path) -> Vec<Group> {
    const V1: [&str; 3] = ["memory.limit_in_bytes", "memory.usage_in_bytes", "active_file"];
    const V2: [&str; 3] = ["memory.max", "memory.current", "active_file"];
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", V2),
            list if list.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", V1),
            _ => continue,
        };
        let mount = root.join(mount);
        // A container sees its own group at the mount itself.
        let relative = Path::new(path.trim_start_matches('/'));
        groups.extend(relative.ancestors().map(|part| Group { folder: mount.join(part), files }));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system of files: path, contents.
    fn system(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("redlite-machine-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n");

    #[test]
    fn the_smaller_of_system_and_group_counts() {
        let free = system("free", &[MEMINFO]);
        assert_eq!(spare_under(&free), Some(Spare { bytes: 3000 * 1024, limit: "available memory" }));
        let two = system(
            "two",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                ("sys/fs/cgroup/a/memory.max", "1000000\n"),
                ("sys/fs/cgroup/a/memory.current", "700000\n"),
                ("sys/fs/cgroup/a/memory.stat", "anon 5\nactive_file 150000\ninactive_file 50000\n"),
            ],
        );
        let group = |bytes| Some(Spare { bytes, limit: "the control group's limit" });
        assert_eq!(spare_under(&two), group(500_000));
        let one = system(
            "one",
            &[
                MEMINFO,
                ("proc/self/cgroup", "4:cpu,memory:/x\n3:cpuset:/\n"),
                ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n"),
                ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "400000\n"),
                ("sys/fs/cgroup/memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
            ],
        );
        assert_eq!(spare_under(&one), group(700_000));
        assert_eq!(spare_under(Path::new("/nowhere")), None);
        for root in [free, two, one] {
            fs::remove_dir_all(root).unwrap();
        }
    }
}
