//! The plan: which memory a run takes, decided before anything is loaded.

use model::state::{PAGE, SnapshotShape};
use model::{Limits, Model};

use crate::machine::Spare;

/// Code, stacks, tokenizer, allocator.
const FIXED: u64 = 64 << 20;

/// Least memory left to others when a cache is sized by itself.
const RESERVE: u64 = 512 << 20;

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
    /// In slots of so many bytes.
    Slots(u64),
}

/// The memory of a run, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Dense weights, in memory of our own.
    pub dense: u64,
    /// Keys and values.
    pub kv: u64,
    /// Recurrent states: a pass writes a new one beside the old one.
    pub state: u64,
    /// Activations of the largest pass.
    pub scratch: u64,
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
    /// The plan for `model` under `limits`, with `scratch` bytes of activations; `floor` is the smallest cache
    /// that works, `spare` the memory there is, if it is known.
    ///
    /// # Errors
    /// [`NotEnough`] if not even the smallest cache fits.
    pub fn new(
        model: &Model,
        limits: &Limits,
        (scratch, floor): (u64, u64),
        wish: CacheWish,
        spare: Option<&Spare>,
    ) -> Result<Plan, NotEnough> {
        let shape = SnapshotShape::new(&model.spec, limits.kv);
        let positions = limits.positions.next_multiple_of(PAGE);
        let mut plan = Plan {
            dense: model.dense_bytes(),
            kv: (positions * shape.position_len() * limits.kv.bytes()) as u64,
            state: 2 * (shape.slot_len() * size_of::<f32>()) as u64,
            scratch,
            fixed: FIXED,
            experts: model.expert_bytes(),
            cache: Cache::Mapped,
            reason: String::new(),
            warning: None,
        };
        plan.choose(floor, wish, spare)?;
        Ok(plan)
    }

    /// Everything but experts.
    pub fn without_experts(&self) -> u64 {
        self.dense + self.kv + self.state + self.scratch + self.fixed
    }

    /// Everything this process owns; the mapped file belongs to the system's cache.
    pub fn total(&self) -> u64 {
        self.without_experts()
            + match self.cache {
                Cache::Mapped => 0,
                Cache::Slots(bytes) => bytes,
            }
    }

    /// Decides where experts are, given everything else; `floor` is the smallest cache that works, `spare` the
    /// memory there is, if it is known.
    ///
    /// # Errors
    /// [`NotEnough`] if not even the smallest cache fits.
    pub fn choose(&mut self, floor: u64, wish: CacheWish, spare: Option<&Spare>) -> Result<(), NotEnough> {
        let without = self.without_experts();
        let room = spare.map(|spare| spare.bytes.saturating_sub(without));
        let (cache, reason) = match (wish, spare) {
            (CacheWish::Mapped, _) => (Cache::Mapped, "asked for".to_string()),
            (CacheWish::Full, _) => (Cache::Slots(self.experts), "asked for".to_string()),
            (CacheWish::Bytes(bytes), _) => (Cache::Slots(bytes), "asked for".to_string()),
            (CacheWish::Auto, None) => {
                (Cache::Mapped, "this system does not tell how much memory is free".into())
            }
            (CacheWish::Auto, Some(spare)) => {
                let reserve = RESERVE.min(spare.bytes / 8);
                let usable = spare.bytes.saturating_sub(reserve).saturating_sub(without);
                if self.experts <= usable {
                    (Cache::Mapped, format!("everything fits {}", spare.limit))
                } else {
                    (Cache::Slots(usable), format!("what {} leaves", spare.limit))
                }
            }
        };
        (self.cache, self.reason) = (cache, reason);
        self.warning = None;
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
        Ok(())
    }
}
