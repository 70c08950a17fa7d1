//! The plan: which memory a run takes and how prompts are cut, decided before anything is loaded.

pub mod chunk;
mod expect;

use model::state::{KvType, PAGE, SnapshotShape};
use model::{GRID, Limits, Model};

use crate::machine::Spare;
use chunk::PassTime;
pub use expect::{Expected, HitCurve, Rates, Writing, cost};

/// Code, stacks, tokenizer, allocator.
const FIXED: u64 = 64 << 20;

/// What a cache that lends memory lacks at least of all experts.
const MARGIN: u64 = 4096;

/// Least memory left to others when a cache is sized by itself.
const RESERVE: u64 = 512 << 20;

/// Rows up to which a pass is small: single tokens, short turns. Larger ones may borrow memory of the cache.
pub const SMALL_ROWS: usize = 512;

/// What the user wants of the cache of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheWish {
    /// What the machine can spare.
    Auto,
    /// A slot for every expert.
    Full,
    /// No slots: experts are used from the mapped file.
    Mapped,
    /// So many bytes.
    Bytes(u64),
}

/// Where experts are while they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// In the mapped file; the system caches it.
    Mapped,
    /// In slots of so many bytes, while tokens are written.
    Slots(u64),
}

/// What a phase of a run takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// `load`, `read` or `write`.
    pub name: &'static str,
    /// Activations.
    pub scratch: u64,
    /// Slots of experts.
    pub slots: u64,
    /// Everything this process owns then.
    pub total: u64,
}

/// What a plan is made for.
pub struct Needs<'a> {
    /// Positions of keys and values, over all sequences.
    pub positions: usize,
    /// Most tokens of a session.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Tokens of the prompt, if they are known.
    pub prompt: Option<usize>,
    /// Rows of a chunk, if they are not the plan's to choose, and why not.
    pub chunk: Option<(usize, &'static str)>,
    /// Bytes of activations under some limits.
    pub scratch: &'a dyn Fn(&Limits) -> u64,
    /// Whether activations and slots are in the same memory, so that large chunks may borrow what slots have while
    /// tokens are written.
    pub shares: bool,
    /// Bytes of the smallest cache that works.
    pub floor: u64,
    /// What the user wants of the cache.
    pub cache: CacheWish,
    /// Whether many prompts are to come: then experts that fit are worth memory of our own, which is read faster
    /// (huge pages) than the mapped file, but takes time to fill.
    pub lasting: bool,
}

/// The memory of a run, in bytes, and how it reads prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Dense weights, in memory of our own.
    pub dense: u64,
    /// Keys and values.
    pub kv: u64,
    /// Recurrent states: a pass writes a new one beside the old one.
    pub state: u64,
    /// Activations of the largest pass.
    pub scratch: u64,
    /// Bytes that slots lend to activations while passes of more than [`SMALL_ROWS`] rows are computed.
    pub lent: u64,
    /// Code, stacks, tokenizer, allocator.
    pub fixed: u64,
    /// All routed experts.
    pub experts: u64,
    /// Where they are.
    pub cache: Cache,
    /// Why.
    pub reason: String,
    /// What is not as it was asked for.
    pub warning: Option<String>,
    /// What the backend may allocate.
    pub limits: Limits,
    /// Most rows of a chunk.
    pub chunk: usize,
    /// Bytes of experts that a pass over the model reads.
    pub streamed: u64,
    /// What such a pass takes, as far as it is known.
    pub pass: PassTime,
    /// Why the chunk is what it is.
    pub chunk_reason: String,
    /// What can be expected.
    pub expected: Expected,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not enough memory: {needed} bytes are needed ({without} without experts, and at least {floor} for them), {spare} \
     are there ({limit}); a shorter context or smaller chunks need less"
)]
pub struct NotEnough {
    needed: u64,
    without: u64,
    floor: u64,
    spare: u64,
    limit: &'static str,
}

impl Plan {
    /// The plan for `model`, with `spare` memory, if it is known, on a machine that reaches `rates`.
    ///
    /// # Errors
    /// [`NotEnough`] if not even the smallest cache fits beside the smallest chunk.
    pub fn new(
        model: &Model,
        needs: &Needs,
        spare: Option<&Spare>,
        rates: &Rates,
    ) -> Result<Plan, NotEnough> {
        let sizes = match needs.chunk {
            Some((chunk, _)) => vec![chunk],
            None => chunk::candidates(needs.prompt, needs.context, rates.decoding.is_some()),
        };
        let with = |rows| Plan::with_chunk(model, needs, spare, rates, rows);
        let mut plans: Vec<Plan> = sizes.iter().flat_map(|&rows| with(rows)).collect();
        if plans.is_empty() {
            // Slow is better than not at all. The smallest chunk needs least.
            let halves = (1..).map(|n| (sizes[0] >> n) & !(GRID - 1)).take_while(|&rows| rows > 0);
            let smaller: Vec<usize> = halves.filter(|_| needs.chunk.is_none()).collect();
            let found = smaller.iter().find_map(|&rows| with(rows).ok());
            plans.push(match found {
                Some(plan) => plan,
                None => with(smaller.last().copied().unwrap_or(sizes[0]))?,
            });
        }
        // Beside a smaller chunk experts may fit that do not beside a larger one: then nothing need be read.
        if let Some(least) = plans.iter().map(|plan| plan.streamed).min().filter(|&least| least == 0) {
            plans.retain(|plan| plan.streamed == least);
        }
        let times: Vec<_> = plans.iter().map(|plan| (plan.chunk, plan.pass)).collect();
        let index = chunk::choose(needs.prompt, &times).expect("there is a plan");
        let mut plan = plans.swap_remove(index);
        plan.chunk_reason = plan.explain(needs);
        plan.expected = plan.expect(model, needs, rates);
        Ok(plan)
    }

    /// The plan with chunks of `rows` rows.
    fn with_chunk(
        model: &Model,
        needs: &Needs,
        spare: Option<&Spare>,
        rates: &Rates,
        rows: usize,
    ) -> Result<Plan, NotEnough> {
        let shape = SnapshotShape::new(&model.spec, needs.kv);
        let limits =
            Limits { pass_rows: pass_rows(rows, needs.context), positions: needs.positions, kv: needs.kv };
        let positions = limits.positions.next_multiple_of(PAGE);
        let mut plan = Plan {
            dense: model.dense_bytes(),
            kv: (positions * shape.position_len() * limits.kv.bytes()) as u64,
            state: 2 * (shape.slot_len() * size_of::<f32>()) as u64,
            scratch: (needs.scratch)(&limits),
            lent: 0,
            fixed: FIXED,
            experts: model.expert_bytes(),
            cache: Cache::Mapped,
            reason: String::new(),
            warning: None,
            limits,
            chunk: rows,
            streamed: 0,
            pass: PassTime::default(),
            chunk_reason: String::new(),
            expected: Expected::default(),
        };
        plan.choose(needs, spare)?;
        plan.streamed = plan.streamed_bytes(model.spec.layers.len());
        plan.pass = rates.pass(model, needs.kv, needs.context, plan.streamed);
        Ok(plan)
    }

    /// Bytes that a pass reads: the cache keeps what is left beside a window of a layer and a quarter, and
    /// nothing below two layers.
    fn streamed_bytes(&self, layers: usize) -> u64 {
        let layer = self.experts / layers.max(1) as u64;
        let Cache::Slots(bytes) = self.cache else { return 0 };
        match bytes - self.lent {
            bytes if bytes >= self.experts => 0,
            bytes if bytes <= 2 * layer => self.experts,
            bytes => (self.experts + layer + layer / 4).saturating_sub(bytes).min(self.experts),
        }
    }

    /// Seconds of reading each row of a full chunk, as far as they are known.
    pub fn seconds_per_row(&self) -> f64 {
        self.pass.compute(self.chunk).max(self.pass.load) / self.chunk as f64
    }

    fn explain(&self, needs: &Needs) -> String {
        let PassTime { load, .. } = self.pass;
        let rows = needs.prompt.map_or(self.chunk, |prompt| prompt.min(self.chunk));
        let (compute, gib) = (self.pass.compute(rows), self.streamed as f64 / (1u64 << 30) as f64);
        let given = needs.chunk.map_or(String::new(), |(_, why)| format!("{why}; "));
        let why = match (self.streamed, needs.prompt) {
            (0, Some(prompt)) if prompt <= self.chunk => "the whole prompt".to_string(),
            (0, _) => "nothing is read meanwhile".to_string(),
            _ if self.pass.row == 0.0 => format!(
                "{gib:.1} GiB are read for each; the fewer the better until this machine's speed is known \
                 (`redlite bench MODEL` measures it)"
            ),
            _ if self.pass.hides(rows) => {
                format!(
                    "reading {gib:.1} GiB for each takes {load:.1} s, hidden behind {compute:.1} s of computing"
                )
            }
            _ => format!("reading decides: {gib:.1} GiB for each take {load:.1} s, computing {compute:.1} s"),
        };
        format!("{given}{why}")
    }

    fn expect(&self, model: &Model, needs: &Needs, rates: &Rates) -> Expected {
        let rows = needs.prompt.map_or(self.chunk, |prompt| prompt.min(self.chunk)).max(1);
        let seconds = self.pass.compute(rows).max(self.pass.load);
        let known = rates.ingestion.is_some() && (self.streamed == 0 || rates.read.is_some());
        let share = match self.cache {
            Cache::Mapped => 1.0,
            Cache::Slots(bytes) => bytes as f64 / self.experts.max(1) as f64,
        };
        Expected {
            ingestion: known.then(|| rows as f64 / seconds),
            decode: rates.decode(model, needs.kv, needs.context, share),
        }
    }

    /// Everything but experts.
    pub fn without_experts(&self) -> u64 {
        self.dense + self.kv + self.state + self.scratch + self.fixed
    }

    /// Everything this process owns, at most; the mapped file belongs to the system's cache.
    pub fn total(&self) -> u64 {
        self.without_experts() + self.slots() - self.lent
    }

    fn slots(&self) -> u64 {
        match self.cache {
            Cache::Mapped => 0,
            Cache::Slots(bytes) => bytes,
        }
    }

    /// What is taken while dense weights are loaded, prompts are read, tokens are written.
    pub fn phases(&self) -> [Phase; 3] {
        let rest = self.dense + self.fixed;
        let all = rest + self.kv + self.state;
        let phase =
            |name, scratch, slots, rest| Phase { name, scratch, slots, total: rest + scratch + slots };
        [
            phase("load", 0, 0, rest),
            phase("read", self.scratch, self.slots() - self.lent, all),
            phase("write", self.scratch - self.lent, self.slots(), all),
        ]
    }

    fn choose(&mut self, needs: &Needs, spare: Option<&Spare>) -> Result<(), NotEnough> {
        let floor = needs.floor;
        let without = self.without_experts();
        let room = spare.map(|spare| spare.bytes.saturating_sub(without));
        let (cache, reason) = match (needs.cache, spare) {
            (CacheWish::Mapped, _) => (Cache::Mapped, "asked for".to_string()),
            (CacheWish::Full, _) => (Cache::Slots(self.experts), "asked for".to_string()),
            (CacheWish::Bytes(bytes), _) => (Cache::Slots(bytes), "asked for".to_string()),
            (CacheWish::Auto, None) => {
                (Cache::Mapped, "this system does not tell how much memory is free".into())
            }
            (CacheWish::Auto, Some(spare)) => {
                let reserve = RESERVE.min(spare.bytes / 8);
                let usable = spare.bytes.saturating_sub(reserve).saturating_sub(without);
                if self.experts <= usable && needs.lasting {
                    (Cache::Slots(self.experts), format!("everything fits {}", spare.limit))
                } else if self.experts <= usable {
                    (Cache::Mapped, format!("everything fits {}", spare.limit))
                } else {
                    (Cache::Slots(usable), format!("what {} leaves", spare.limit))
                }
            }
        };
        (self.cache, self.reason) = (cache, reason);
        let Cache::Slots(bytes) = self.cache else { return Ok(()) };
        let bytes = bytes.min(self.experts + self.experts / 8);
        self.cache = Cache::Slots(bytes.max(floor));
        if let (Some(room), Some(spare)) = (room, spare)
            && floor > room
        {
            let needed = without + floor;
            return Err(NotEnough { needed, without, floor, spare: spare.bytes, limit: spare.limit });
        }
        if bytes < floor {
            self.warning = Some(format!("a cache of {bytes} bytes is raised to the {floor} that work"));
        } else if room.is_some_and(|room| bytes > room) {
            self.warning = Some("the cache is larger than the memory there is".to_string());
        }
        if needs.cache == CacheWish::Auto && needs.shares {
            self.lend(needs);
        }
        Ok(())
    }

    /// Slots take the memory of activations that only large passes need, and lend it to those.
    fn lend(&mut self, needs: &Needs) {
        let Cache::Slots(bytes) = self.cache else { return };
        let small = Limits { pass_rows: self.limits.pass_rows.min(SMALL_ROWS), ..self.limits };
        let idle = self.scratch.saturating_sub((needs.scratch)(&small));
        // A cache of everything has nothing to read, so it lends nothing.
        let most = self.experts - self.experts.min(MARGIN);
        let slots = (bytes + idle).min(most).max(bytes);
        if bytes < self.experts {
            (self.cache, self.lent) = (Cache::Slots(slots), slots - bytes);
        }
    }
}

/// Rows of the largest pass when sessions of `context` tokens are read in chunks of `chunk`: a tail may join the
/// last one.
pub fn pass_rows(chunk: usize, context: usize) -> usize {
    chunk.max(GRID).saturating_add(GRID).min(context.max(GRID))
}
