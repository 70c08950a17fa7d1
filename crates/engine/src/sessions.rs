//! Sessions that are never read twice: checkpoints in memory, found by the tokens that lead to them.
//!
//! A checkpoint is a session nobody continues: opening one forks it, which copies nothing. Checkpoints share keys
//! and values by page, so one more of the same conversation costs its recurrent state and the pages behind its
//! predecessor.
//!
//! Bits: a checkpoint made while a prompt is read lies on the grid of 64 positions, and continuing from it gives the
//! bits of reading the prompt from the start. The state at the end of an answer continues with the bits of the
//! unbroken session.

use std::collections::{HashMap, HashSet};
use std::fmt;

use model::state::{PAGE, SnapshotShape};
use model::{GRID, KvType, SequenceId};

use crate::engine::{Engine, Session};
use crate::error::Result;
use crate::prefix::{NodeId, PrefixTree};
use crate::store::Store;

/// What the cache of sessions may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Most bytes of checkpoints in memory.
    pub budget: u64,
    /// Tokens between two checkpoints inside a long prompt.
    pub spacing: usize,
    /// How the backend stores keys and values.
    pub kv: KvType,
}

/// How much of a prompt was there already, and why the rest was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// Tokens taken from a checkpoint.
    pub reused: usize,
    /// Tokens to read.
    pub read: usize,
    /// Tokens that some known session begins with too; at least `reused`.
    pub known: usize,
    /// Why tokens that are known are read again.
    pub miss: Miss,
}

/// Why a prompt's tokens are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// They are new.
    New,
    /// No known session begins like this.
    Unknown,
    /// Known sessions part from the prompt where no checkpoint is.
    Parted,
    /// A session on disk that went further was not as it was written.
    Damaged,
    /// A checkpoint further on has been given up for others.
    Evicted {
        /// Where it was.
        position: usize,
    },
}

impl fmt::Display for Reuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reuse { reused, read, known, miss } = self;
        write!(f, "reused {reused} tokens, read {read}: ")?;
        match miss {
            Miss::New => write!(f, "all of them new"),
            Miss::Unknown => write!(f, "no known session begins like this"),
            Miss::Parted => write!(
                f,
                "known sessions go on differently after token {known}, the checkpoint before that is {reused}"
            ),
            Miss::Damaged => write!(f, "a stored session was damaged and has been deleted"),
            Miss::Evicted { position } => {
                write!(f, "{known} are known, but the checkpoint at {position} was given up for memory")
            }
        }
    }
}

/// A checkpoint, or the memory that there was one.
#[derive(Debug)]
enum Entry {
    Live(Checkpoint),
    /// Forgotten in the order of the numbers.
    Evicted(u64),
}

#[derive(Debug)]
struct Checkpoint {
    sequence: SequenceId,
    pages: Vec<u64>,
    /// The clock when it was last used.
    used: u64,
}

impl Entry {
    fn live(&self) -> Option<&Checkpoint> {
        match self {
            Entry::Live(checkpoint) => Some(checkpoint),
            Entry::Evicted(_) => None,
        }
    }
}

/// Counters for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Checkpoints in memory.
    pub checkpoints: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Checkpoints given up for memory.
    pub evicted: u64,
}

/// Checkpoints by their tokens.
#[derive(Debug)]
pub struct Sessions {
    tree: PrefixTree<Entry>,
    options: SessionOptions,
    slot_bytes: u64,
    page_bytes: u64,
    /// How many checkpoints hold each page.
    pages: HashMap<u64, usize>,
    live: usize,
    /// What the last checkpoint given up was worth: those not used since count for less.
    clock: u64,
    evicted: u64,
    store: Option<Store>,
}

/// How many times more likely the last checkpoint of a conversation is to be used than one in its middle.
const LAST: u64 = 16;
/// Checkpoints of a prompt that are not there for their distance alone.
const NAMED: usize = 5;
/// Tokens of a chunk that is larger than most.
const LARGE_CHUNK: usize = 8192;
/// Evicted checkpoints that are remembered.
const REMEMBERED: u64 = 256;

/// Whole pages that fit `bytes`, in positions.
fn positions(spec: &model::Spec, kv: KvType, bytes: u64) -> usize {
    let position = (SnapshotShape::new(spec, kv).position_len() * kv.bytes()).max(1) as u64;
    usize::try_from(bytes / position).unwrap_or(usize::MAX / 2) / PAGE * PAGE
}

impl Sessions {
    /// An empty cache for the sessions of `engine`.
    pub fn new(engine: &Engine, options: SessionOptions) -> Sessions {
        let shape = SnapshotShape::new(&engine.model().spec, options.kv);
        Sessions {
            tree: PrefixTree::new(),
            options,
            slot_bytes: 4 * shape.slot_len() as u64,
            page_bytes: (PAGE * shape.position_len() * options.kv.bytes()) as u64,
            pages: HashMap::new(),
            live: 0,
            clock: 0,
            evicted: 0,
            store: None,
        }
    }

    /// Positions that checkpoints may hold: room the backend needs beyond that of running sessions, for `spec`'s state
    /// within `budget` bytes.
    pub fn positions(spec: &model::Spec, options: &SessionOptions) -> usize {
        positions(spec, options.kv, options.budget)
    }

    /// Positions whose keys and values take as much memory as the recurrent states that `running` sequences need beyond
    /// the two of a lone one: each has one and writes another, and the chunk that is read leaves checkpoints before
    /// others are given up for them.
    pub fn state_positions(spec: &model::Spec, options: &SessionOptions, running: usize) -> usize {
        let made = NAMED + LARGE_CHUNK / options.spacing.max(GRID);
        let states = (2 * running.max(1) - 2).saturating_add(made) as u64;
        let slot = 4 * SnapshotShape::new(spec, options.kv).slot_len() as u64;
        // No more checkpoints than a prompt may leave.
        let bytes = states.saturating_mul(slot).min((2 * running.max(1)) as u64 * slot + options.budget / 2);
        positions(spec, options.kv, bytes).saturating_add(PAGE)
    }

    /// Looks for sessions on disk too, and stores them there.
    pub fn with_store(self, store: Store) -> Sessions {
        Sessions { store: Some(store), ..self }
    }

    /// A session that already holds as much of `tokens` as any checkpoint does, and at most all but the last: its
    /// logits have to be computed.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn open(&mut self, engine: &mut Engine, tokens: &[u32]) -> Result<(Session, Reuse)> {
        let damaged = self.load_longest(engine, tokens);
        let mut reuse = self.look_up(tokens);
        if damaged {
            reuse.miss = Miss::Damaged;
        }
        let clock = self.clock;
        let found = self.deepest(tokens).and_then(|id| self.tree.get_mut(id));
        let Some(Entry::Live(checkpoint)) = found else { return Ok((engine.open(), reuse)) };
        checkpoint.used = clock;
        let sequence = engine.backend.fork(checkpoint.sequence)?;
        let pages = checkpoint.pages.clone();
        Ok((Session { sequence, tokens: tokens[..reuse.reused].to_vec(), pages }, reuse))
    }

    /// Makes a checkpoint of the longest session on disk that `tokens` begins with, if it goes further than those in
    /// memory. Whether one was damaged.
    fn load_longest(&mut self, engine: &mut Engine, tokens: &[u32]) -> bool {
        let known = self.look_up(tokens).reused;
        let mut damaged = false;
        loop {
            let Some(store) = &self.store else { return damaged };
            let len = store.longest(tokens);
            if len <= known {
                return damaged;
            }
            let loaded = store.load(&tokens[..len]);
            let session = loaded.and_then(|snapshot| engine.adopt(&snapshot, &tokens[..len]).ok());
            match session {
                Some(session) => {
                    self.keep(engine, session);
                    return damaged;
                }
                // It is deleted; the next longest may do. One that is whole but finds no room stays.
                None if self.store.as_ref().is_some_and(|store| store.longest(tokens) == len) => {
                    return damaged;
                }
                None => damaged = true,
            }
        }
    }

    /// Stores a session on disk, if there is a store.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn save(&self, engine: &mut Engine, session: &Session) -> Result<()> {
        let Some(store) = self.store.as_ref().filter(|_| session.len() >= GRID) else { return Ok(()) };
        if !store.contains(&session.tokens) {
            // One that finds the writer busy is stored when its conversation goes on.
            store.save(&session.tokens, engine.backend.snapshot(session.sequence)?);
        }
        Ok(())
    }

    /// What [`Sessions::open`] would find.
    pub fn look_up(&self, tokens: &[u32]) -> Reuse {
        let reused = self.deepest(tokens).map_or(0, |id| self.tree.depth(id));
        let walk = self.tree.walk(tokens);
        let known = walk.common.max(reused);
        let evicted = (walk.valued.iter())
            .filter(|&&id| self.tree.get(id).is_some_and(|entry| entry.live().is_none()))
            .map(|&id| self.tree.depth(id))
            .rfind(|&position| position > reused && position < tokens.len());
        let miss = match evicted {
            Some(position) => Miss::Evicted { position },
            None if known == 0 => Miss::Unknown,
            None if known == reused => Miss::New,
            None => Miss::Parted,
        };
        Reuse { reused, read: tokens.len() - reused, known, miss }
    }

    /// Where a prompt of `len` tokens should leave checkpoints when it is read from `from` on: positions on the grid,
    /// ascending. `boundaries` are where its messages end.
    pub fn plan(&self, from: usize, len: usize, boundaries: &[usize]) -> Vec<usize> {
        let floor = |position: usize| position / GRID * GRID;
        // The most useful first ([`NAMED`] of them): the end (the answer is asked for again, or its history edited), the end of what
        // many conversations share, the last messages, then every so often.
        let mut wanted = vec![floor(len.saturating_sub(1))];
        wanted.extend(boundaries.first().map(|&first| floor(first)));
        wanted.extend(boundaries.iter().rev().take(3).map(|&end| floor(end)));
        let spacing = self.options.spacing.max(GRID) / GRID * GRID;
        wanted.extend((from / spacing + 1..=len / spacing).rev().map(|n| n * spacing));
        let mut seen = Vec::new();
        for position in wanted {
            if position > from && position < len && !seen.contains(&position) {
                seen.push(position);
            }
        }
        // One prompt never takes more than half the budget in states.
        let most = (self.options.budget / 2 / self.slot_bytes.max(1)) as usize;
        seen.truncate(most);
        seen.sort_unstable();
        seen
    }

    /// Takes a session over: a checkpoint if it fits the budget, else gone.
    pub fn keep(&mut self, engine: &mut Engine, session: Session) {
        if session.is_empty() {
            return engine.close(session);
        }
        if let Some(&id) = self.tree.walk(&session.tokens).valued.last()
            && self.tree.depth(id) == session.len()
            && let Some(Entry::Live(known)) = self.tree.get_mut(id)
        {
            known.used = self.clock;
            return engine.close(session);
        }
        let Session { sequence, tokens, pages } = session;
        pages.iter().for_each(|&page| *self.pages.entry(page).or_insert(0) += 1);
        self.live += 1;
        self.tree.insert(&tokens, Entry::Live(Checkpoint { sequence, pages, used: self.clock }));
        while self.bytes() > self.options.budget && self.evict(engine) {}
    }

    /// Checkpoints and their bytes.
    pub fn stats(&self) -> SessionStats {
        SessionStats { checkpoints: self.live, bytes: self.bytes(), evicted: self.evicted }
    }

    /// Gives every checkpoint up.
    pub fn clear(&mut self, engine: &mut Engine) {
        while self.evict(engine) {}
    }

    fn bytes(&self) -> u64 {
        self.live as u64 * self.slot_bytes + self.pages.len() as u64 * self.page_bytes
    }

    /// The checkpoint with most of `tokens`, but not all.
    fn deepest(&self, tokens: &[u32]) -> Option<NodeId> {
        let walk = self.tree.walk(tokens);
        let usable = |id: &&NodeId| {
            self.tree.depth(**id) < tokens.len() && self.tree.get(**id).is_some_and(|e| e.live().is_some())
        };
        walk.valued.iter().rev().find(usable).copied()
    }

    /// Gives up the checkpoint that is worth least: worth is what it takes to rebuild it from the one before it,
    /// on top of the clock of its last use; more for the last of a conversation, where it will go on. False if there
    /// is none.
    fn evict(&mut self, engine: &mut Engine) -> bool {
        let is_live = |id: &NodeId| self.tree.get(*id).is_some_and(|entry| entry.live().is_some());
        let live: Vec<NodeId> = self.tree.iter().map(|(id, _)| id).filter(is_live).collect();
        let before: HashMap<NodeId, NodeId> =
            live.iter().filter_map(|&id| Some((id, self.tree.above(id).find(is_live)?))).collect();
        let inner: HashSet<NodeId> = before.values().copied().collect();
        let worth = |id: NodeId, checkpoint: &Checkpoint| {
            let rebuild = self.tree.depth(id) - before.get(&id).map_or(0, |&before| self.tree.depth(before));
            let weight = if inner.contains(&id) { 1 } else { LAST };
            checkpoint.used + weight * rebuild as u64
        };
        let least = (self.tree.iter()).filter_map(|(id, entry)| Some((worth(id, entry.live()?), id))).min();
        let Some((worth, id)) = least else { return false };
        self.clock = self.clock.max(worth);
        let Some(entry) = self.tree.get_mut(id) else { return false };
        self.evicted += 1;
        let Entry::Live(gone) = std::mem::replace(entry, Entry::Evicted(self.evicted)) else { return false };
        engine.backend.free(gone.sequence);
        for page in gone.pages {
            if let Some(count) = self.pages.get_mut(&page) {
                *count -= 1;
                if *count == 0 {
                    self.pages.remove(&page);
                }
            }
        }
        self.live -= 1;
        self.forget();
        true
    }

    /// Forgets evictions of long ago.
    fn forget(&mut self) {
        let old = |entry: &Entry| matches!(entry, Entry::Evicted(n) if n + REMEMBERED <= self.evicted);
        let old: Vec<NodeId> = self.tree.iter().filter(|(_, e)| old(e)).map(|(id, _)| id).collect();
        old.into_iter().for_each(|id| drop(self.tree.remove(id)));
    }
}
