//! The plan of memory: what is chosen for which wish and which machine.

use engine::machine::Spare;
use engine::plan::{Cache, CacheWish, Plan};
use model::{KvType, Limits, Model};
use testkit::{TinyModel, TinyOptions};

const LIMITS: Limits = Limits { pass_rows: 128, positions: 256, kv: KvType::F16 };
const SCRATCH: u64 = 1_000;
const FLOOR: u64 = 50_000;

fn plan(model: &Model, wish: CacheWish, memory: Option<u64>) -> Result<Plan, String> {
    let spare = memory.map(|bytes| Spare { bytes, limit: "a test" });
    Plan::new(model, &LIMITS, (SCRATCH, FLOOR), wish, spare.as_ref()).map_err(|error| error.to_string())
}

#[test]
fn a_cache_is_what_memory_leaves_and_never_below_the_floor() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let of = |wish, memory| plan(model, wish, memory).unwrap();
    let roomy = of(CacheWish::Auto, Some(1 << 40));
    assert_eq!(roomy.cache, Cache::Mapped, "everything fits");
    assert_eq!(of(CacheWish::Auto, None).cache, Cache::Mapped, "nobody knows");
    let without = roomy.without_experts();
    assert_eq!(roomy.total(), without);
    assert!(roomy.dense == model.dense_bytes() && roomy.experts == model.expert_bytes());

    // An eighth stays with others.
    let memory = (without + roomy.experts / 2) / 7 * 8;
    let Plan { cache: Cache::Slots(bytes), .. } = of(CacheWish::Auto, Some(memory)) else { panic!("slots") };
    assert!(bytes.abs_diff(roomy.experts / 2) <= 8, "{bytes}");
    assert!(of(CacheWish::Auto, Some(memory)).total() <= memory);

    assert_eq!(of(CacheWish::Bytes(60_000), None).cache, Cache::Slots(60_000));
    assert_eq!(of(CacheWish::Full, None).cache, Cache::Slots(roomy.experts));
    assert_eq!(of(CacheWish::Mapped, Some(0)).cache, Cache::Mapped, "the file needs no memory of ours");
    let raised = of(CacheWish::Bytes(10), Some(without + FLOOR));
    assert_eq!(raised.cache, Cache::Slots(FLOOR));
    assert!(raised.warning.unwrap().contains("raised"));
    let too_large = of(CacheWish::Bytes(90_000), Some(without + 60_000));
    assert!(too_large.warning.unwrap().contains("larger than the memory"));
}

#[test]
fn too_little_memory_is_refused_with_the_number_needed() {
    let tiny = TinyModel::new(TinyOptions::default());
    let without = plan(&tiny.model, CacheWish::Mapped, None).unwrap().without_experts();
    for wish in [CacheWish::Auto, CacheWish::Bytes(10)] {
        let error = plan(&tiny.model, wish, Some(without + FLOOR - 1)).unwrap_err();
        assert!(error.contains(&(without + FLOOR).to_string()), "{error}");
    }
}
