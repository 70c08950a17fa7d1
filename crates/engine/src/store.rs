//! Sessions on disk: what has been read survives a restart.
//!
//! A folder for each fingerprint of what computes (weights, template, kernels, version) holds an entry for each stored
//! session, named by the hash of its tokens. Files are written under a temporary name, synced and renamed, so that an
//! entry is there as a whole or not at all, whenever the program is killed. One that is damaged, cut short or foreign is
//! deleted when it is met, and its tokens are read again. Least recently used entries go when the folder outgrows its
//! budget.

mod format;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use model::state::SnapshotShape;
use model::{Capabilities, KvType, Model, Snapshot};
use sha2::{Digest, Sha256};

use crate::prefix::PrefixTree;
use format::{
    Bad, Hash, Head, KnownSegments, hash, hex, segment, segment_bytes, segment_pages, segments, token_bytes,
};

/// Sessions waiting to be written; beyond that a session is not stored this time.
const WAITING: usize = 2;

/// What tells states apart that must not be mixed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(Hash);

impl Fingerprint {
    /// The fingerprint of `model`, computed by a backend with these capabilities. All its bytes are hashed, once: the
    /// result is kept in `folder` for files of the same path, size and time.
    ///
    /// # Errors
    /// If the folder cannot be made, or the file is not there any more.
    pub fn new(
        model: &Model,
        template: Option<&str>,
        capabilities: &Capabilities,
        kv: KvType,
        folder: &Path,
    ) -> io::Result<Fingerprint> {
        let mut identity = String::new();
        for shard in model.gguf.shards() {
            let (path, about) = (fs::canonicalize(shard.path())?, fs::metadata(shard.path())?);
            identity += &format!("{path:?} {} {:?}\n", about.len(), about.modified()?);
        }
        fs::create_dir_all(folder)?;
        let kept = folder.join(format!("weights-{}", &hex(&hash(identity.as_bytes()))[..16]));
        let weights = match fs::read_to_string(&kept) {
            Ok(known) if known.len() == 64 => known,
            _ => {
                let mut weights = Sha256::new();
                model.gguf.shards().iter().for_each(|shard| weights.update(shard.bytes()));
                let weights = hex(&weights.finalize().into());
                let temporary = kept.with_extension("tmp");
                fs::write(&temporary, &weights)?;
                fs::rename(&temporary, &kept)?;
                weights
            }
        };
        Ok(Fingerprint::of(&weights, template, capabilities, kv))
    }

    /// As [`Fingerprint::new`], where the hash of the file's bytes is known.
    fn of(weights: &str, template: Option<&str>, capabilities: &Capabilities, kv: KvType) -> Fingerprint {
        let version = capabilities.kernel_version.to_string();
        let template = template.map(|source| hex(&hash(source.as_bytes()))).unwrap_or_default();
        let parts = [
            env!("CARGO_PKG_VERSION"),
            capabilities.name,
            &capabilities.variant,
            &version,
            format::kv_name(kv),
            &template,
            weights,
        ];
        Fingerprint(hash(parts.join("\n").as_bytes()))
    }
}

/// Sessions on disk.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    /// `None` once it is closed.
    jobs: Option<SyncSender<(Vec<u32>, Snapshot)>>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    fingerprint: Hash,
    shape: SnapshotShape,
    budget: u64,
    index: Mutex<Index>,
    /// Segments that need not be hashed again.
    known: Mutex<KnownSegments>,
}

/// What is in the folder.
#[derive(Debug)]
struct Index {
    /// File names by tokens.
    tree: PrefixTree<String>,
    entries: HashMap<String, Known>,
    segments: HashSet<Hash>,
}

#[derive(Debug)]
struct Known {
    tokens: Vec<u32>,
    segments: Vec<Hash>,
    bytes: u64,
    used: SystemTime,
}

impl Store {
    /// Opens the part of `folder` that belongs to `fingerprint`, makes it if need be, and deletes what is no entry.
    ///
    /// # Errors
    /// If the folder cannot be made or read, or there is no thread to write with.
    pub fn open(
        folder: &Path,
        fingerprint: Fingerprint,
        shape: SnapshotShape,
        budget: u64,
    ) -> io::Result<Store> {
        let folder = folder.join(&hex(&fingerprint.0)[..16]);
        fs::create_dir_all(&folder)?;
        let index = Index { tree: PrefixTree::new(), entries: HashMap::new(), segments: HashSet::new() };
        let shared = Arc::new(Shared {
            folder,
            fingerprint: fingerprint.0,
            shape,
            budget,
            index: Mutex::new(index),
            known: Mutex::default(),
        });
        shared.scan()?;
        shared.trim();
        let (jobs, inbox) = sync_channel(WAITING);
        let work = shared.clone();
        let writer =
            std::thread::Builder::new().name("store".to_owned()).spawn(move || write_all(&work, &inbox))?;
        Ok(Store { shared, jobs: Some(jobs), writer: Some(writer) })
    }

    /// Tokens of the longest stored session that `tokens` begins with and exceeds.
    pub fn longest(&self, tokens: &[u32]) -> usize {
        let index = self.shared.index();
        let walk = index.tree.walk(tokens);
        let depths = walk.valued.iter().map(|&id| index.tree.depth(id));
        depths.filter(|&depth| depth < tokens.len()).max().unwrap_or(0)
    }

    /// Whether this very session is stored.
    pub fn contains(&self, tokens: &[u32]) -> bool {
        self.shared.index().entries.contains_key(&name_of(tokens))
    }

    /// Reads a stored session. `None` if it is not there or not as it was written: then it is deleted.
    pub fn load(&self, tokens: &[u32]) -> Option<Snapshot> {
        let name = name_of(tokens);
        match self.shared.load(&name, tokens) {
            Ok(snapshot) => {
                if let Some(known) = self.shared.index().entries.get_mut(&name) {
                    known.used = SystemTime::now();
                    // The order survives a restart, if the file system lets it.
                    let file = File::options().append(true).open(self.shared.folder.join(&name));
                    let _ = file.and_then(|file| file.set_modified(known.used));
                }
                Some(snapshot)
            }
            Err(_) => {
                self.shared.delete(&name);
                None
            }
        }
    }

    /// Stores a session, in the background. False if too many wait already.
    pub fn save(&self, tokens: &[u32], snapshot: Snapshot) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.try_send((tokens.to_vec(), snapshot)).is_ok())
    }

    /// Entries and bytes on disk.
    pub fn size(&self) -> (usize, u64) {
        let index = self.shared.index();
        (index.entries.len(), self.shared.bytes(&index))
    }
}

impl Drop for Store {
    /// Waits for what is being written.
    fn drop(&mut self) {
        self.jobs = None;
        // A writer that panicked has left a temporary file at most.
        self.writer.take().map(JoinHandle::join);
    }
}

fn write_all(shared: &Shared, inbox: &Receiver<(Vec<u32>, Snapshot)>) {
    for (tokens, snapshot) in inbox {
        // A full disk costs reading again, nothing else.
        if shared.save(tokens, &snapshot).is_ok() {
            shared.trim();
        }
    }
}

/// The file of a session.
fn name_of(tokens: &[u32]) -> String {
    hex(&hash(&token_bytes(tokens))) + ".state"
}

/// Has the names in a folder reach the disk.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Folders cannot be synced here; renaming is all there is.
#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

impl Shared {
    fn index(&self) -> MutexGuard<'_, Index> {
        // Changes to the index are single insertions and removals; none can be half done.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, KnownSegments> {
        // Whoever panicked left a list that is right, or lacks an entry.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn segment_path(&self, name: &Hash) -> PathBuf {
        self.folder.join(hex(name) + ".kv")
    }

    fn bytes(&self, index: &Index) -> u64 {
        let entries: u64 = index.entries.values().map(|known| known.bytes).sum();
        entries + (index.segments.len() * segment_bytes(&self.shape)) as u64
    }

    /// Learns what is in the folder.
    fn scan(&self) -> io::Result<()> {
        let mut there = HashMap::new();
        for file in fs::read_dir(&self.folder)? {
            let path = file?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else {
                continue;
            };
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("state") if self.learn(&name).is_ok() => {}
                Some("kv") => drop(there.insert(name, path)),
                // No entry, or what was being written when the program ended.
                Some("state" | "tmp") => fs::remove_file(&path)?,
                _ => {}
            }
        }
        let mut index = self.index();
        let wanted: HashSet<Hash> = index.entries.values().flat_map(|known| known.segments.clone()).collect();
        for segment in wanted {
            if there.remove(&(hex(&segment) + ".kv")).is_some() {
                index.segments.insert(segment);
            }
        }
        there.values().try_for_each(fs::remove_file)
    }

    fn learn(&self, name: &str) -> Result<(), Bad> {
        let file = File::open(self.folder.join(name))?;
        let (size, used) = (file.metadata()?.len(), file.metadata()?.modified()?);
        let head = Head::read(&mut BufReader::new(file), &self.fingerprint, &self.shape)?;
        if size != head.entry_bytes() || name_of(&head.tokens) != name {
            return Err(Bad::Damaged);
        }
        self.insert(name, &head, used);
        Ok(())
    }

    fn insert(&self, name: &str, head: &Head, used: SystemTime) {
        let (tokens, segments) = (head.tokens.clone(), head.segments.clone());
        let mut index = self.index();
        index.tree.insert(&tokens, name.to_owned());
        index.segments.extend(&segments);
        index.entries.insert(name.to_owned(), Known { tokens, segments, bytes: head.entry_bytes(), used });
    }

    fn load(&self, name: &str, tokens: &[u32]) -> Result<Snapshot, Bad> {
        let mut file = BufReader::new(File::open(self.folder.join(name))?);
        let head = Head::read(&mut file, &self.fingerprint, &self.shape)?;
        if head.tokens != tokens {
            return Err(Bad::Damaged);
        }
        let mut segments = Vec::new();
        for name in &head.segments {
            let path = self.segment_path(name);
            let whole = fs::metadata(&path)?.len() == segment_bytes(&self.shape) as u64;
            let bytes = if whole { fs::read(&path)? } else { Vec::new() };
            if hash(&bytes) != *name {
                // Others that need it will find it gone.
                self.index().segments.remove(name);
                let _ = fs::remove_file(&path);
                return Err(Bad::Damaged);
            }
            segments.push(bytes);
        }
        let snapshot = head.read_state(&mut file, &segments)?;
        let mut known = self.known();
        head.segments.iter().enumerate().for_each(|(n, name)| known.note(segment_pages(&snapshot, n), *name));
        Ok(snapshot)
    }

    fn save(&self, tokens: Vec<u32>, snapshot: &Snapshot) -> io::Result<()> {
        let name = name_of(&tokens);
        if self.index().entries.contains_key(&name) || tokens.len() != snapshot.position {
            return Ok(());
        }
        let names = (0..segments(snapshot)).map(|n| self.save_segment(snapshot, n));
        let names = names.collect::<io::Result<Vec<Hash>>>()?;
        let head = Head::new(self.fingerprint, self.shape, tokens, names);
        self.write(&self.folder.join(&name), |file| head.write(snapshot, file))?;
        self.insert(&name, &head, SystemTime::now());
        Ok(())
    }

    /// Stores a segment that is not there yet. One whose pages have been stored before is neither copied nor hashed.
    fn save_segment(&self, snapshot: &Snapshot, n: usize) -> io::Result<Hash> {
        let pages = segment_pages(snapshot, n);
        let known = self.known().name(pages);
        if let Some(name) = known.filter(|name| self.index().segments.contains(name)) {
            return Ok(name);
        }
        let bytes = segment(snapshot, n);
        let name = known.unwrap_or_else(|| hash(&bytes));
        if !self.index().segments.contains(&name) {
            self.write(&self.segment_path(&name), |file| file.write_all(&bytes))?;
        }
        self.known().note(pages, name);
        Ok(name)
    }

    /// A file that is there as a whole or not at all.
    fn write(
        &self,
        path: &Path,
        fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let temporary = path.with_extension("tmp");
        let written = (|| {
            let mut file = BufWriter::new(File::create(&temporary)?);
            fill(&mut file)?;
            file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&temporary, path)?;
            sync_folder(&self.folder)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Forgets an entry and deletes its file.
    fn delete(&self, name: &str) {
        let mut index = self.index();
        if let Some(known) = index.entries.remove(name)
            && let Some(&id) = index.tree.walk(&known.tokens).valued.last()
        {
            index.tree.remove(id);
        }
        let _ = fs::remove_file(self.folder.join(name));
    }

    /// Deletes least recently used entries until the rest fits, and segments nobody needs.
    fn trim(&self) {
        loop {
            let oldest = {
                let index = self.index();
                let oldest = index.entries.iter().min_by_key(|(_, known)| known.used);
                oldest.filter(|_| self.bytes(&index) > self.budget).map(|(name, _)| name.clone())
            };
            let Some(name) = oldest else { return };
            self.delete(&name);
            let mut index = self.index();
            let needed: HashSet<Hash> =
                index.entries.values().flat_map(|known| known.segments.clone()).collect();
            let unneeded: Vec<Hash> = index.segments.difference(&needed).copied().collect();
            for segment in unneeded {
                index.segments.remove(&segment);
                let _ = fs::remove_file(self.segment_path(&segment));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use model::state::PAGE;
    use model::state::host::Page;

    use super::*;

    #[test]
    fn only_segments_in_new_pages_are_hashed() {
        let shape = SnapshotShape {
            delta_layers: 1,
            window: 1,
            state: 1,
            attention_layers: 1,
            kv_heads: 1,
            head_dim: 2,
            kv: KvType::F16,
        };
        let folder = std::env::temp_dir().join(format!("redlite-hashed-{}", std::process::id()));
        let store = Store::open(&folder, Fingerprint([1; 32]), shape, 1 << 30).unwrap();
        let shared = &store.shared;
        let pages = |count: usize| -> Vec<Arc<Page>> {
            let page = |n: usize| {
                let mut page = Page::new(&shape);
                page.write_bytes(0, &[n as u8 + 1; 4]);
                Arc::new(page)
            };
            (0..count).map(page).collect()
        };
        let of = |pages: Vec<Arc<Page>>| Snapshot {
            shape,
            position: pages.len() * PAGE,
            recurrent: Arc::new(vec![0.0; shape.slot_len()]),
            pages,
        };
        let each = format::SEGMENT / PAGE;
        let mut first = of(pages(2 * each));
        let names = [0, 1].map(|n| shared.save_segment(&first, n).unwrap());
        assert_eq!(names, [0, 1].map(|n| hash(&segment(&first, n))));
        // Those of the same pages are taken at their word: this would be another name otherwise.
        let wrong = [7; 32];
        shared.known.lock().unwrap().0.iter_mut().find(|(_, name)| *name == names[0]).unwrap().1 = wrong;
        shared.index().segments.extend(names.into_iter().chain([wrong]));
        let more = of(first.pages.iter().cloned().chain(pages(each)).collect());
        assert_eq!(shared.save_segment(&more, 0).unwrap(), wrong);
        assert_eq!(shared.save_segment(&more, 1).unwrap(), names[1]);
        assert_eq!(shared.save_segment(&more, 2).unwrap(), names[0], "new pages with the same bytes");
        // Nor are they when a page has been written since, or its place is another's.
        drop(more);
        let page = Arc::make_mut(&mut first.pages[0]);
        page.write_bytes(0, &[9; 4]);
        assert_eq!(shared.save_segment(&first, 0).unwrap(), hash(&segment(&first, 0)));
        // A file that has gone is written again.
        shared.index().segments.remove(&names[1]);
        fs::remove_file(shared.segment_path(&names[1])).unwrap();
        assert_eq!(shared.save_segment(&first, 1).unwrap(), names[1]);
        assert!(shared.segment_path(&names[1]).exists());
        drop(store);
        fs::remove_dir_all(folder).unwrap();
    }
}
