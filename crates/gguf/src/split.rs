//! Models split over several files.
//!
//! Names say where to look (`NAME-00001-of-00003.gguf`, counted from one); the metadata says what a file
//! is: `split.no` (from zero), `split.count`, `split.tensors.count` (over all shards).

use std::fs;
use std::io;
use std::path::Path;

use crate::error::{Error, ErrorKind};
use crate::file::Part;
use crate::metadata::Metadata;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Number of shards that a file says its model has; 1 if it says nothing (or 0, as a merged file does).
pub(crate) fn count(metadata: &Metadata) -> Result<u64, Error> {
    Ok(metadata.u64(COUNT)?.unwrap_or(1).max(1))
}

/// Drops the keys that describe a shard.
pub(crate) fn forget(metadata: &mut Metadata) {
    for key in [NUMBER, COUNT, TENSORS] {
        metadata.remove(key);
    }
}

/// `NAME`, number (from one) and count of a file name like `NAME-00001-of-00003.gguf`.
pub fn shard_of(name: &str) -> Option<(&str, u64, u64)> {
    let number = |digits: &str| match digits.len() {
        5 if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().ok(),
        _ => None,
    };
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    Some((prefix, number(no)?, number(count)?))
}

/// The names of the GGUF files of the only model in a folder, in order; at least one.
pub(crate) fn candidates(folder: &Path) -> Result<Vec<String>, Error> {
    let io = |error| Error::new(folder, ErrorKind::Io { action: "list the folder", error });
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        // A name that is not Unicode cannot be listed in a message; such a file can still be opened itself.
        if let Some(name) = name.to_str().filter(|name| name.ends_with(".gguf") && !name.starts_with('.')) {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    let model = |name: &str| shard_of(name).map(|(prefix, _, count)| (prefix.to_owned(), count));
    let Some(first) = names.first() else { return Err(Error::new(folder, ErrorKind::NoModel)) };
    let first = model(first);
    if names.len() > 1 && (first.is_none() || names.iter().any(|name| model(name) != first)) {
        return Err(Error::new(folder, ErrorKind::SeveralModels { found: names }));
    }
    Ok(names)
}

/// Opens the siblings of `opened`, which says it is one of `count` shards, and puts all in order.
pub(crate) fn gather(opened: Part, count: u64) -> Result<Vec<Part>, Error> {
    let path = opened.shard.path().to_owned();
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((prefix, _, named)) = shard_of(name) else {
        return Err(Error::new(&path, ErrorKind::ShardName { count }));
    };
    if named != count {
        let other = "its name".to_owned();
        return Err(Error::new(&path, ErrorKind::SplitCount { found: count, expected: named, other }));
    }
    // The name has five digits for it, so the count is small.
    let mut parts: Vec<Option<Part>> = (0..count).map(|_| None).collect();
    let mut opened = Some(opened);
    for number in 1..=count {
        let sibling = path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf"));
        let part = match opened.take_if(|opened| opened.shard.path() == sibling) {
            Some(part) => part,
            None => Part::open(&sibling).map_err(|error| missing(error, &path, number, count))?,
        };
        let no = shard_number(&part, count, name)?;
        match &parts[no as usize] {
            None => parts[no as usize] = Some(part),
            Some(other) => {
                let other = other.shard.path().to_owned();
                return Err(Error::new(&sibling, ErrorKind::DuplicateShard { number: no, other }));
            }
        }
    }
    let parts: Vec<Part> = parts.into_iter().flatten().collect();
    check_tensor_count(&parts)?;
    Ok(parts)
}

/// Says of a sibling that cannot be found that a shard is missing.
fn missing(error: Error, opened: &Path, number: u64, count: u64) -> Error {
    match error.kind() {
        ErrorKind::Io { error: cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
            let expected = error.path().to_owned();
            Error::new(opened, ErrorKind::MissingShard { number, count, expected })
        }
        _ => error,
    }
}

/// The `split.no` of a shard, below `count`; its `split.count` is that of the file called `opened`.
fn shard_number(part: &Part, count: u64, opened: &str) -> Result<u64, Error> {
    let refuse = |kind| Error::new(part.shard.path(), kind);
    let metadata = &part.header.metadata;
    let found = metadata.u64(COUNT)?.unwrap_or(0);
    if found != count {
        return Err(refuse(ErrorKind::SplitCount { found, expected: count, other: opened.to_owned() }));
    }
    match metadata.u64(NUMBER)? {
        Some(no) if no < count => Ok(no),
        Some(no) => Err(refuse(ErrorKind::SplitNumber { found: no.to_string(), count })),
        None => Err(refuse(ErrorKind::SplitNumber { found: "absent".to_owned(), count })),
    }
}

/// Every shard that declares how many tensors the shards hold together must be right.
fn check_tensor_count(parts: &[Part]) -> Result<(), Error> {
    let found = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    for part in parts {
        match part.header.metadata.u64(TENSORS)? {
            Some(declared) if declared != found => {
                return Err(Error::new(part.shard.path(), ErrorKind::SplitTensors { declared, found }));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_shards() {
        assert_eq!(shard_of("a-b-00002-of-00013.gguf"), Some(("a-b", 2, 13)));
        assert_eq!(shard_of("of--00002-of-00003.gguf"), Some(("of-", 2, 3)));
        for other in
            ["a.gguf", "a-0002-of-00003.gguf", "a-00002-of-3.gguf", "a-+0002-of-00003.gguf", "a-of-b"]
        {
            assert_eq!(shard_of(other), None, "{other}");
        }
    }
}
