//! Hugging Face's side: names, lists of files, and which of them make a model.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::error::Error;
use super::http::Client;
use crate::report;

/// Most parts of a list of files.
const PARTS: usize = 100;

/// A file to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Where it is.
    pub url: String,
    /// Its name here.
    pub name: String,
    /// Bytes, if the server has told.
    pub size: Option<u64>,
    /// SHA-256 in hexadecimal digits, if the server has told.
    pub sha256: Option<String>,
}

/// What the user asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    /// A repository, and what to take from it.
    Repo {
        /// `owner/name`.
        repo: String,
        /// A quantisation or a file's name.
        quant: Option<String>,
    },
    /// An address.
    Url(String),
}

/// A SHA-256 as it is compared: 64 lower-case digits.
pub fn hash(text: &str) -> Option<String> {
    let is_hash = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| text.to_ascii_lowercase())
}

/// Understands what the user asked for.
///
/// # Errors
/// [`Error::Source`].
pub fn source(text: &str) -> Result<Source, Error> {
    let wrong = |why| Err(Error::Source(text.to_string(), why));
    if text.contains("://") {
        let http = text.starts_with("https://") || text.starts_with("http://");
        return if http {
            Ok(Source::Url(text.to_string()))
        } else {
            wrong("only https and http are spoken")
        };
    }
    let (repo, quant) = match text.split_once(':') {
        Some((repo, quant)) => (repo, Some(quant.to_string())),
        None => (text, None),
    };
    let part = |part: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !part.is_empty() && !part.starts_with('.') && part.bytes().all(plain)
    };
    match repo.split('/').collect::<Vec<_>>()[..] {
        [owner, name] if part(owner) && part(name) => Ok(Source::Repo { repo: repo.to_string(), quant }),
        _ => wrong("expected OWNER/REPO, OWNER/REPO:QUANT or an https address"),
    }
}

/// The files of a repository.
///
/// # Errors
/// Those of the client, [`Error::Protocol`].
pub fn list(client: &Client, endpoint: &str, repo: &str, revision: &str) -> Result<Vec<Remote>, Error> {
    let revision = encode(revision, false);
    let mut url = format!("{endpoint}/api/models/{repo}/tree/{revision}?recursive=true");
    let mut files = Vec::new();
    for _ in 0..PARTS {
        let (text, next) = client.text(&url)?;
        let odd = |reason: &str| Error::Protocol { url: url.clone(), reason: reason.to_string() };
        let json: Json = serde_json::from_str(&text).map_err(|error| odd(&error.to_string()))?;
        let entries = json.as_array().ok_or_else(|| odd("expected a list of files"))?;
        for entry in entries.iter().filter(|entry| entry["type"] == "file") {
            let path = entry["path"].as_str().ok_or_else(|| odd("a file without a path"))?;
            let name = path.rsplit('/').next().unwrap_or(path).to_string();
            files.push((
                path.to_string(),
                Remote {
                    url: format!("{endpoint}/{repo}/resolve/{revision}/{}", encode(path, true)),
                    name,
                    size: entry["lfs"]["size"].as_u64().or(entry["size"].as_u64()),
                    sha256: entry["lfs"]["oid"].as_str().and_then(hash),
                },
            ));
        }
        match next {
            Some(next) => url = next,
            None => break,
        }
    }
    Ok(models_only(files))
}

/// GGUF files with safe names, sorted by path.
fn models_only(mut files: Vec<(String, Remote)>) -> Vec<Remote> {
    files.retain(|(_, file)| is_safe(&file.name));
    files.sort_by(|a, b| a.0.cmp(&b.0));
    files.into_iter().map(|(_, file)| file).collect()
}

/// Whether a name from outside may become a file's name here.
pub fn is_safe(name: &str) -> bool {
    let odd = |c: char| c.is_control() || "/\\:*?\"<>|".contains(c);
    name.ends_with(".gguf") && !name.starts_with('.') && name.len() <= 200 && !name.contains(odd)
}

/// The files of the one model that is meant: its shards in order.
///
/// # Errors
/// [`Error::NoModel`], [`Error::Choice`], [`Error::Shards`].
pub fn choose(repo: &str, files: Vec<Remote>, quant: Option<&str>) -> Result<Vec<Remote>, Error> {
    let mut models: BTreeMap<String, (u64, Vec<Remote>)> = BTreeMap::new();
    for file in files {
        let (stem, count) = match gguf::shard_of(&file.name) {
            Some((stem, _, count)) => (stem.to_string(), count),
            None => (file.name.trim_end_matches(".gguf").to_string(), 1),
        };
        // A projector of images and a matrix of importance are no models.
        let lower = stem.to_lowercase();
        if !lower.starts_with("mmproj") && !lower.contains("imatrix") {
            models.entry(stem).or_insert((count, Vec::new())).1.push(file);
        }
    }
    if models.is_empty() {
        return Err(Error::NoModel(repo.to_string()));
    }
    let name = meant(&models, quant).map_err(|problem| Error::Choice {
        repo: repo.to_string(),
        problem,
        choices: choices(&models),
    })?;
    let (count, mut shards) = models.remove(&name).unwrap_or_default();
    shards.sort_by(|a, b| a.name.cmp(&b.name));
    shards.dedup_by(|a, b| a.name == b.name);
    if shards.len() as u64 != count {
        return Err(Error::Shards { repo: repo.to_string(), name, found: shards.len(), count });
    }
    Ok(shards)
}

/// The name of the one model that `quant` means.
fn meant(models: &BTreeMap<String, (u64, Vec<Remote>)>, quant: Option<&str>) -> Result<String, String> {
    let names: Vec<&str> = models.keys().map(String::as_str).collect();
    let Some(quant) = quant else {
        return match names[..] {
            [only] => Ok(only.to_string()),
            _ => Err(format!("{} models", names.len())),
        };
    };
    let wanted = quant.trim_end_matches(".gguf").to_lowercase();
    let wanted =
        gguf::shard_of(&format!("{wanted}.gguf")).map_or(wanted.clone(), |(stem, ..)| stem.to_string());
    let wanted = wanted.rsplit('/').next().unwrap_or_default();
    let shared = shared_prefix(&names);
    // A whole name, or what tells the names apart, before a part of it.
    let exact = |name: &&&str| name.to_lowercase() == wanted || name[shared..].to_lowercase() == wanted;
    let matching: Vec<&&str> = match names.iter().filter(exact).collect::<Vec<_>>() {
        exact if exact.is_empty() => {
            names.iter().filter(|name| has_part(&name.to_lowercase(), wanted)).collect()
        }
        exact => exact,
    };
    match matching[..] {
        [only] => Ok(only.to_string()),
        [] => Err(format!("no `{quant}`")),
        _ => Err(format!("{} models that `{quant}` may mean", matching.len())),
    }
}

/// Bytes that all names begin with, up to a place where a word begins; 0 for a single name.
fn shared_prefix(names: &[&str]) -> usize {
    let (Some(first), 2..) = (names.first(), names.len()) else { return 0 };
    let common = |other: &&str| first.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    let most = names.iter().map(common).min().unwrap_or(0);
    first.as_bytes()[..most].iter().rposition(|byte| b"-.".contains(byte)).map_or(0, |at| at + 1)
}

/// Whether `part` stands in `name` as words of its own: `Q4_K` is no part of `Q4_K_M`.
fn has_part(name: &str, part: &str) -> bool {
    !part.is_empty()
        && name.match_indices(part).any(|(at, _)| {
            let (before, after) = (name[..at].chars().next_back(), name[at + part.len()..].chars().next());
            before.is_none_or(|c| "-._".contains(c)) && after.is_none_or(|c| "-.".contains(c))
        })
}

fn choices(models: &BTreeMap<String, (u64, Vec<Remote>)>) -> String {
    let line = |(name, (_, files)): (&String, &(u64, Vec<Remote>))| {
        let bytes: Option<u64> = files.iter().map(|file| file.size).sum();
        let size = bytes.map_or(String::new(), |bytes| format!("  {}", report::size(bytes)));
        format!("  {name}{size}")
    };
    models.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The files behind an address: itself, or all shards of the model it is one of.
///
/// # Errors
/// [`Error::Source`] if its last part is no name of a GGUF file.
pub fn of_url(url: &str) -> Result<Vec<Remote>, Error> {
    let wrong = || Error::Source(url.to_string(), "its path does not end with the name of a .gguf file");
    let end = url.find(['?', '#']).unwrap_or(url.len());
    let start = url[..end].rfind('/').ok_or_else(wrong)? + 1;
    let name = decode(&url[start..end]).filter(|name| is_safe(name)).ok_or_else(wrong)?;
    let Some((stem, _, count)) = gguf::shard_of(&name) else {
        return Ok(vec![Remote { url: url.to_string(), name, size: None, sha256: None }]);
    };
    let shard = |number: u64| {
        let name = format!("{stem}-{number:05}-of-{count:05}.gguf");
        let url = format!("{}{}{}", &url[..start], encode(&name, false), &url[end..]);
        Remote { url, name, size: None, sha256: None }
    };
    Ok((1..=count).map(shard).collect())
}

/// A path as addresses have it; slashes stay if they are meant.
fn encode(path: &str, slashes: bool) -> String {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || (slashes && byte == b'/');
    path.bytes()
        .map(|byte| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The text behind a part of an address.
fn decode(part: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = part.as_bytes();
    while let [first, more @ ..] = rest {
        (rest, _) = match first {
            b'%' => {
                let digits = std::str::from_utf8(more.get(..2)?).ok()?;
                (&more[2..], bytes.push(u8::from_str_radix(digits, 16).ok()?))
            }
            _ => (more, bytes.push(*first)),
        };
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<Remote> {
        let file =
            |name: &&str| Remote { url: String::new(), name: name.to_string(), size: Some(1), sha256: None };
        names.iter().map(file).collect()
    }

    fn chosen(names: &[&str], quant: Option<&str>) -> Result<Vec<String>, String> {
        let chosen = choose("a/b", files(names), quant).map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn names_and_addresses_are_told_apart() {
        let repo = |quant: Option<&str>| {
            Ok(Source::Repo { repo: "a-b/c.d_e".into(), quant: quant.map(str::to_string) })
        };
        assert_eq!(source("a-b/c.d_e").map_err(|e| e.to_string()), repo(None));
        assert_eq!(source("a-b/c.d_e:IQ2_XXS").map_err(|e| e.to_string()), repo(Some("IQ2_XXS")));
        assert!(matches!(source("https://x/y.gguf"), Ok(Source::Url(_))));
        for bad in ["a", "a/b/c", "a/..", "../b", "a/b?c", "a//", "", "ftp://x/y.gguf", "a b/c"] {
            assert!(source(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_model_is_meant() {
        let names = [
            "M-80B-Q4_K_M.gguf",
            "M-80B-UD-Q4_K_M.gguf",
            "M-80B-Q4_K_S-00002-of-00002.gguf",
            "M-80B-Q4_K_S-00001-of-00002.gguf",
            "M-80B-IQ2_XXS.gguf",
            "mmproj-M-F16.gguf",
            "imatrix.gguf",
        ];
        let one = |name: &str| Ok(vec![name.to_string()]);
        assert_eq!(chosen(&names, Some("iq2_xxs")), one("M-80B-IQ2_XXS.gguf"));
        assert_eq!(chosen(&names, Some("Q4_K_M")), one("M-80B-Q4_K_M.gguf"));
        assert_eq!(chosen(&names, Some("UD-Q4_K_M")), one("M-80B-UD-Q4_K_M.gguf"));
        assert_eq!(chosen(&names, Some("M-80B-IQ2_XXS.gguf")), one("M-80B-IQ2_XXS.gguf"));
        let shards = vec![names[3].to_string(), names[2].to_string()];
        assert_eq!(chosen(&names, Some("Q4_K_S")), Ok(shards));
        let unclear = chosen(&names, None).unwrap_err();
        assert!(unclear.contains("4 models") && unclear.contains("M-80B-Q4_K_S  2 B"), "{unclear}");
        assert!(chosen(&names, Some("Q4_K")).unwrap_err().contains("no `Q4_K`"));
        assert!(chosen(&names, Some("Q8_0")).unwrap_err().contains("no `Q8_0`"));
        assert_eq!(chosen(&["only.gguf"], None), one("only.gguf"));
        assert!(chosen(&["M-00001-of-00002.gguf"], None).unwrap_err().contains("1 of 2 shards"));
        assert!(chosen(&["mmproj.gguf"], None).unwrap_err().contains("no GGUF files"));
    }

    #[test]
    fn several_may_be_meant() {
        let names = ["M-Q4_0.gguf", "M-x-Q4_0.gguf", "N-Q4_0.gguf"];
        assert!(chosen(&names, Some("Q4_0")).unwrap_err().contains("3 models that `Q4_0` may mean"));
        assert_eq!(chosen(&names, Some("N-Q4_0")), Ok(vec!["N-Q4_0.gguf".to_string()]));
    }

    #[test]
    fn addresses_become_files() {
        let name = |url: &str| {
            of_url(url).map(|files| files.into_iter().map(|file| (file.url, file.name)).collect())
        };
        let one: Result<Vec<_>, Error> = name("https://x/a%20b.gguf?download=true");
        assert_eq!(
            one.unwrap(),
            [("https://x/a%20b.gguf?download=true".to_string(), "a b.gguf".to_string())]
        );
        let two: Vec<_> = name("https://x/M-00002-of-00002.gguf?y").unwrap();
        assert_eq!(
            two[0],
            ("https://x/M-00001-of-00002.gguf?y".to_string(), "M-00001-of-00002.gguf".to_string())
        );
        assert_eq!(two.len(), 2);
        for bad in [
            "https://x/",
            "https://x/a.bin",
            "https://x/%2e%2e%2fa.gguf",
            "https://x/..gguf",
            "https://x/a%zz.gguf",
        ] {
            assert!(of_url(bad).is_err(), "{bad}");
        }
    }
}
