//! One file: resumed where it broke off, checked, and there as a whole or not at all.
//!
//! While it comes, `NAME.part` holds what is there and `NAME.part.json` what file that is the beginning of: a later
//! download goes on only if the server still has that one.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use super::error::Error;
use super::http::{Client, Reply};
use super::hub::{self, Remote};
use super::space;
use crate::report::Bar;

/// Bytes that are read and written together.
const BLOCK: usize = 1 << 20;
/// What every file of ours begins with.
const MAGIC: &[u8; 4] = b"GGUF";

/// A file that is there now.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Where.
    pub path: PathBuf,
    /// Bytes.
    pub bytes: u64,
    /// SHA-256 of what is there.
    pub sha256: String,
    /// Whether somebody had told the hash.
    pub verified: bool,
    /// Bytes that were there before.
    pub resumed: u64,
}

/// What a server says that tells a file from another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Identity {
    /// SHA-256.
    hash: Option<String>,
    /// A strong ETag, or a time of change.
    validator: Option<String>,
    size: Option<u64>,
}

impl Identity {
    fn of(reply: &Reply, wanted: &Remote, size: Option<u64>) -> Identity {
        let tag = |text: &str| text.trim().trim_start_matches("W/").trim_matches('"').to_string();
        let linked = reply.linked.as_deref().and_then(|text| hub::hash(&tag(text)));
        let etag = reply.header("etag").filter(|etag| etag.starts_with('"'));
        let validator = etag.or_else(|| reply.header("last-modified")).map(str::to_string);
        Identity { hash: wanted.sha256.clone().or(linked), validator, size }
    }

    /// Whether two are certainly the same file.
    fn is(&self, other: &Identity) -> bool {
        match (&self.hash, &other.hash) {
            (Some(a), Some(b)) => a == b,
            _ => self.validator.is_some() && self.validator == other.validator && self.size == other.size,
        }
    }

    fn read(path: &Path) -> Option<Identity> {
        let json: Json = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let text = |name: &str| json[name].as_str().map(str::to_string);
        Some(Identity { hash: text("sha256"), validator: text("validator"), size: json["size"].as_u64() })
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        let json = json!({"sha256": self.hash, "validator": self.validator, "size": self.size});
        fs::write(path, json.to_string() + "\n")
    }
}

/// Fetches `wanted` into `folder`.
///
/// # Errors
/// Those of the client and of our files; [`Error::Hash`], [`Error::Different`], [`Error::Busy`], [`Error::Space`].
pub fn fetch(client: &Client, wanted: &Remote, folder: &Path, quiet: bool) -> Result<Fetched, Error> {
    let mut transfer = Transfer::open(client, wanted, folder, quiet)?;
    if transfer.path.exists() {
        let done = transfer.there_already();
        transfer.forget_part();
        return done;
    }
    let mut tries = 0;
    loop {
        let before = transfer.len;
        match transfer.attempt() {
            Ok(()) => return transfer.complete(),
            Err(error) if error.is_transient() => {
                // What brings bytes is worth any number of tries.
                if transfer.len > before {
                    tries = 0;
                }
                client.pause(&mut tries, error)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Bytes of `wanted` that lie in `folder` already.
pub fn present(wanted: &Remote, folder: &Path) -> u64 {
    let path = folder.join(&wanted.name);
    let len = |path: &Path| fs::metadata(path).map(|file| file.len()).ok();
    len(&path).or_else(|| len(&beside(&path, ".part"))).unwrap_or(0)
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |source| Error::File { path: path.to_path_buf(), source }
}

struct Transfer<'a> {
    client: &'a Client,
    wanted: &'a Remote,
    path: PathBuf,
    part: PathBuf,
    note: PathBuf,
    file: File,
    /// Bytes in the part, all of them hashed.
    len: u64,
    hash: Sha256,
    identity: Identity,
    resumed: u64,
    bar: Bar,
}

impl<'a> Transfer<'a> {
    /// Takes the part, which may be there from before, for itself.
    fn open(
        client: &'a Client,
        wanted: &'a Remote,
        folder: &Path,
        quiet: bool,
    ) -> Result<Transfer<'a>, Error> {
        let path = folder.join(&wanted.name);
        let (part, note) = (beside(&path, ".part"), beside(&path, ".part.json"));
        let open = File::options().read(true).write(true).create(true).truncate(false).open(&part);
        let file = open.map_err(io(&part))?;
        file.try_lock().map_err(|_| Error::Busy(part.clone()))?;
        let bar = Bar::bytes("reading", wanted.size.unwrap_or(0), quiet);
        let identity = Identity::default();
        let (len, hash, resumed) = (0, Sha256::new(), 0);
        let mut transfer =
            Transfer { client, wanted, path, part, note, file, len, hash, identity, resumed, bar };
        let known = Identity::read(&transfer.note);
        let told = Identity { hash: wanted.sha256.clone(), ..Identity::default() };
        match known {
            // Whether it is still the same file is asked with the request, where it is not known now.
            Some(known) if known.is(&told) || (told.hash.is_none() || known.hash.is_none()) => {
                transfer.hash_part()?;
                transfer.identity = known;
            }
            _ => transfer.restart()?,
        }
        transfer.resumed = transfer.len;
        Ok(transfer)
    }

    /// Hashes what is there.
    fn hash_part(&mut self) -> Result<(), Error> {
        let total = self.file.metadata().map_err(io(&self.part))?.len();
        self.bar.set_total(self.wanted.size.unwrap_or(total));
        (self.len, self.hash) = (0, Sha256::new());
        let mut block = vec![0; BLOCK];
        self.file.seek(SeekFrom::Start(0)).map_err(io(&self.part))?;
        loop {
            let read = self.file.read(&mut block).map_err(io(&self.part))?;
            if read == 0 {
                return Ok(());
            }
            self.hash.update(&block[..read]);
            self.len += read as u64;
            self.bar.set(self.len);
            if self.client.is_cancelled() {
                return Err(Error::Cancelled);
            }
        }
    }

    /// Begins again with nothing.
    fn restart(&mut self) -> Result<(), Error> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(io(&self.part))?;
        (self.len, self.hash, self.resumed) = (0, Sha256::new(), 0);
        self.identity = Identity::default();
        Ok(())
    }

    /// Asks for the rest and writes what comes.
    fn attempt(&mut self) -> Result<(), Error> {
        let mut headers = Vec::new();
        let is_certain = self.identity.hash.is_some() && self.identity.hash == self.wanted.sha256;
        if self.len > 0 && (is_certain || self.identity.validator.is_some() || self.identity.hash.is_some()) {
            headers.push(("range", format!("bytes={}-", self.len)));
            // Where the hash is known it decides; tags of caches on the way may change.
            if let (None, Some(validator)) = (&self.identity.hash, &self.identity.validator) {
                headers.push(("if-range", validator.clone()));
            }
        } else if self.len > 0 {
            self.restart()?;
        }
        let reply = self.client.get(&self.wanted.url, &headers)?;
        match reply.status {
            206 => self.go_on(reply),
            416 => self.at_the_end(reply),
            _ => {
                let size = number(reply.header("content-length"));
                let identity = Identity::of(&reply, self.wanted, size);
                self.restart()?;
                self.write(reply, identity)
            }
        }
    }

    /// The rest comes, if it is the rest of the same file.
    fn go_on(&mut self, reply: Reply) -> Result<(), Error> {
        let (start, size) = range(reply.header("content-range"));
        let identity = Identity::of(&reply, self.wanted, size);
        if self.len == 0 {
            let reason = "a part came, the whole was asked for".to_string();
            return Err(Error::Protocol { url: self.wanted.url.clone(), reason });
        }
        if start != Some(self.len) || !identity.is(&self.identity) {
            self.restart()?;
            return self.attempt();
        }
        self.write(reply, identity)
    }

    /// There is no rest: it is complete, or another file.
    fn at_the_end(&mut self, reply: Reply) -> Result<(), Error> {
        let (_, size) = range(reply.header("content-range"));
        if self.len == 0 {
            return Err(Error::Status { url: self.wanted.url.clone(), status: 416, retry_after: None });
        }
        if size == Some(self.len) && self.identity.size.is_none_or(|known| known == self.len) {
            return Ok(());
        }
        self.restart()?;
        self.attempt()
    }

    fn write(&mut self, mut reply: Reply, identity: Identity) -> Result<(), Error> {
        let url = &self.wanted.url;
        if let (Some(told), Some(size)) = (self.wanted.size, identity.size)
            && told != size
        {
            let reason = format!("{size} bytes come, {told} were announced");
            return Err(Error::Protocol { url: url.clone(), reason });
        }
        let total = identity.size.or(self.wanted.size);
        identity.write(&self.note).map_err(io(&self.note))?;
        self.identity = identity;
        if let Some(total) = total {
            self.bar.set_total(total);
            let folder = self.part.parent().unwrap_or(Path::new("."));
            space::check(folder, total.saturating_sub(self.len))?;
        }
        self.file.seek(SeekFrom::Start(self.len)).map_err(io(&self.part))?;
        let mut block = vec![0; BLOCK];
        loop {
            if self.client.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let read = reply.body.read(&mut block).map_err(|error| self.client.network(url, &error))?;
            let begins = self.len == 0 && read > 0;
            if begins && !block[..read].starts_with(&MAGIC[..read.min(4)]) {
                let kind = reply.header("content-type").unwrap_or("of no type").to_string();
                let error = Error::NotGguf { url: url.clone(), kind };
                self.forget_part();
                return Err(error);
            }
            if read == 0 {
                break;
            }
            self.file.write_all(&block[..read]).map_err(io(&self.part))?;
            self.hash.update(&block[..read]);
            self.len += read as u64;
            self.bar.set(self.len);
        }
        match total {
            Some(total) if self.len < total => {
                let reason = format!("the connection ended after {} of {total} bytes", self.len);
                Err(Error::Network { url: url.clone(), reason })
            }
            _ => Ok(()),
        }
    }

    /// Checks what has come and gives it its name.
    fn complete(mut self) -> Result<Fetched, Error> {
        self.bar.finish();
        let found = hex(&std::mem::take(&mut self.hash));
        let expected = self.identity.hash.clone();
        if let Some(expected) = expected.as_ref().filter(|expected| **expected != found) {
            self.forget_part();
            return Err(Error::Hash { path: self.part, found, expected: expected.clone() });
        }
        self.file.sync_all().map_err(io(&self.part))?;
        // Nothing is ever written over, not even what came in the meantime.
        if self.path.exists() {
            return Err(Error::Different(self.path));
        }
        fs::rename(&self.part, &self.path).map_err(io(&self.path))?;
        // It only tells of the part, which is none any more.
        let _ = fs::remove_file(&self.note);
        let (bytes, verified, resumed) = (self.len, expected.is_some(), self.resumed);
        Ok(Fetched { path: self.path, bytes, sha256: found, verified, resumed })
    }

    /// A file of that name is there: is it the one that is wanted?
    fn there_already(&mut self) -> Result<Fetched, Error> {
        let len = fs::metadata(&self.path).map_err(io(&self.path))?.len();
        let mut wanted = self.wanted.clone();
        if wanted.sha256.is_none() {
            let reply = self.client.get(&wanted.url, &[])?;
            let identity = Identity::of(&reply, &wanted, number(reply.header("content-length")));
            (wanted.sha256, wanted.size) = (identity.hash, identity.size);
        }
        if wanted.size.is_some_and(|size| size != len) || (wanted.size.is_none() && wanted.sha256.is_none()) {
            return Err(Error::Different(self.path.clone()));
        }
        self.file = File::open(&self.path).map_err(io(&self.path))?;
        self.hash_part()?;
        self.bar.finish();
        let sha256 = hex(&self.hash);
        if wanted.sha256.as_ref().is_some_and(|expected| *expected != sha256) {
            return Err(Error::Different(self.path.clone()));
        }
        let verified = wanted.sha256.is_some();
        Ok(Fetched { path: self.path.clone(), bytes: len, sha256, verified, resumed: len })
    }

    /// Deletes the part; what cannot be deleted is begun again the next time.
    fn forget_part(&self) {
        let _ = fs::remove_file(&self.part);
        let _ = fs::remove_file(&self.note);
    }
}

fn number(text: Option<&str>) -> Option<u64> {
    text?.trim().parse().ok()
}

/// First byte and size of `bytes FIRST-LAST/SIZE` or `bytes */SIZE`.
fn range(text: Option<&str>) -> (Option<u64>, Option<u64>) {
    let Some((range, size)) = text.and_then(|text| text.trim().strip_prefix("bytes ")?.split_once('/'))
    else {
        return (None, None);
    };
    (number(range.split('-').next()), number(Some(size)))
}

fn hex(hash: &Sha256) -> String {
    hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_understood() {
        assert_eq!(range(Some("bytes 10-19/20")), (Some(10), Some(20)));
        assert_eq!(range(Some("bytes 0-0/*")), (Some(0), None));
        assert_eq!(range(Some("bytes */20")), (None, Some(20)));
        assert_eq!(range(Some("tokens 1-2/3")), (None, None));
        assert_eq!(range(None), (None, None));
    }

    #[test]
    fn only_what_is_certainly_the_same_is_gone_on_with() {
        let of = |hash: Option<&str>, validator: Option<&str>, size| Identity {
            hash: hash.map(str::to_string),
            validator: validator.map(str::to_string),
            size,
        };
        assert!(of(Some("a"), Some("x"), Some(1)).is(&of(Some("a"), Some("y"), Some(1))));
        assert!(!of(Some("a"), Some("x"), Some(1)).is(&of(Some("b"), Some("x"), Some(1))));
        assert!(of(None, Some("x"), Some(1)).is(&of(None, Some("x"), Some(1))));
        assert!(!of(None, Some("x"), Some(1)).is(&of(None, Some("x"), Some(2))));
        assert!(!of(None, None, Some(1)).is(&of(None, None, Some(1))));
    }
}
