//! The plan of memory: what is chosen for which wish and which machine.

use engine::machine::Spare;
use engine::plan::{Cache, CacheWish, Needs, Plan, Rates};
use model::{KvType, Limits, Model};
use testkit::{TinyModel, TinyOptions};

const SCRATCH: u64 = 1_000;
const FLOOR: u64 = 50_000;

/// What is needed for 256 positions.
fn needs(scratch: &dyn Fn(&Limits) -> u64) -> Needs<'_> {
    Needs {
        positions: 256,
        context: 256,
        kv: KvType::F16,
        prompt: None,
        chunk: None,
        scratch,
        shares: true,
        lasting: false,
        floor: FLOOR,
        cache: CacheWish::Auto,
    }
}

fn plan(model: &Model, wish: CacheWish, memory: Option<u64>) -> Result<Plan, String> {
    let scratch = |_: &Limits| SCRATCH;
    let needs = Needs { cache: wish, chunk: Some((128, "asked for")), ..needs(&scratch) };
    let spare = memory.map(|bytes| Spare { bytes, limit: "a test" });
    Plan::new(model, &needs, spare.as_ref(), &Rates::default()).map_err(|error| error.to_string())
}

#[test]
fn a_cache_is_what_memory_leaves_and_never_below_the_floor() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let of = |wish, memory| plan(model, wish, memory).unwrap();
    let roomy = of(CacheWish::Auto, Some(1 << 40));
    assert_eq!(roomy.cache, Cache::Mapped, "everything fits");
    assert_eq!(of(CacheWish::Auto, None).cache, Cache::Mapped, "nobody knows");
    let scratch = |_: &Limits| SCRATCH;
    let lasting = Needs { chunk: Some((128, "asked for")), lasting: true, ..needs(&scratch) };
    let spare = Spare { bytes: 1 << 40, limit: "a test" };
    let kept = Plan::new(model, &lasting, Some(&spare), &Rates::default()).unwrap();
    assert_eq!(kept.cache, Cache::Slots(model.expert_bytes()), "worth filling");
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

/// A plan for a prompt in a cache of half the experts, read at `read` bytes a second; 1,000 bytes a row.
fn chunked(model: &Model, prompt: usize, memory: u64, read: f64) -> Result<Plan, String> {
    let scratch = |limits: &Limits| 1_000 * limits.pass_rows as u64;
    let wish = CacheWish::Bytes(model.expert_bytes() / 2);
    let room =
        Needs { positions: 40_000, context: 40_000, prompt: Some(prompt), cache: wish, ..needs(&scratch) };
    let spare = Spare { bytes: memory, limit: "a test" };
    let rates = Rates {
        read: Some(read),
        ingestion: Some(1e9),
        decoding: Some(1e9),
        tokens: Some(1e9),
        ..Rates::default()
    };
    Plan::new(model, &room, Some(&spare), &rates).map_err(|error| error.to_string())
}

#[test]
fn chunks_grow_until_reading_is_hidden() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let fast = chunked(model, 16_384, 1 << 40, 1e12).unwrap();
    assert!(
        fast.chunk < 2048 && fast.chunk_reason.contains("hidden"),
        "{} {}",
        fast.chunk,
        fast.chunk_reason
    );
    // As slow a disk as hides behind no less than 3,000 rows.
    let seconds = fast.pass.compute(3_000);
    let slow = chunked(model, 16_384, 1 << 40, fast.streamed as f64 / seconds).unwrap();
    assert!((3_000..6_000).contains(&slow.chunk), "{}", slow.chunk);
    assert!(slow.chunk_reason.contains("hidden"), "{}", slow.chunk_reason);
    let hopeless = chunked(model, 16_384, 1 << 40, 1.0).unwrap();
    assert_eq!(hopeless.chunk, 16_384);
    assert!(hopeless.chunk_reason.contains("reading decides"), "{}", hopeless.chunk_reason);
    let rates = [fast, slow, hopeless].map(|plan| plan.expected.ingestion.unwrap());
    assert!((rates[0] / rates[1] - 1.0).abs() < 0.05 && rates[1] > 10.0 * rates[2], "{rates:?}");
}

#[test]
fn chunks_shrink_to_the_memory_there_is() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let roomy = chunked(model, 16_384, 1 << 40, 1.0).unwrap();
    let least = roomy.without_experts() - roomy.scratch + FLOOR;
    for rows in [1_000, 3_000] {
        let plan = chunked(model, 16_384, least + rows * 1_000, 1.0).unwrap();
        assert!(plan.chunk as u64 <= rows, "{} in {rows}", plan.chunk);
        assert!(plan.without_experts() + FLOOR <= least + rows * 1_000);
    }
    // Below the smallest chunk that is chosen freely; only the smallest of all says how much is missing.
    let plan = chunked(model, 16_384, least + 64 * 1_000 + 64_000, 1.0).unwrap();
    assert!((64..512).contains(&plan.chunk), "{}", plan.chunk);
    let error = chunked(model, 16_384, least, 1.0).unwrap_err();
    assert!(error.contains("not enough memory") && error.contains(&(least + 128_000).to_string()), "{error}");
}

#[test]
fn where_everything_fits_beside_a_smaller_chunk_nothing_is_read() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let scratch = |limits: &Limits| 1_000 * limits.pass_rows as u64;
    let room = Needs { positions: 40_000, context: 40_000, prompt: Some(16_384), ..needs(&scratch) };
    let rates = Rates { read: Some(1.0), decoding: Some(1e3), ..Rates::default() };
    let plan = |bytes| Plan::new(model, &room, Some(&Spare { bytes, limit: "a test" }), &rates).unwrap();
    let roomy = plan(1 << 40);
    assert_eq!((roomy.cache, roomy.chunk), (Cache::Mapped, 16_384), "a pass is costly");
    let needed = (roomy.without_experts() - roomy.scratch + roomy.experts + 5_000_000) * 8 / 7;
    let tight = plan(needed);
    assert!(tight.cache == Cache::Mapped && tight.chunk < 5_000, "{:?} {}", tight.cache, tight.chunk);
}

#[test]
fn slots_lend_what_only_large_chunks_need() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let scratch = |limits: &Limits| 1_000 * limits.pass_rows as u64;
    let needs = |chunk, cache, shares| Needs {
        positions: 40_000,
        context: 40_000,
        chunk: Some((chunk, "asked for")),
        cache,
        shares,
        ..needs(&scratch)
    };
    let plan = |needs: &Needs, bytes| {
        Plan::new(model, needs, Some(&Spare { bytes, limit: "a test" }), &Rates::default()).unwrap()
    };
    let slots = |plan: &Plan| match plan.cache {
        Cache::Slots(bytes) => bytes,
        Cache::Mapped => panic!("slots"),
    };
    let large = 512 + 64 + 40;
    let alone = plan(&needs(large, CacheWish::Auto, false), 1 << 40);
    // Half of the experts beside the activations of a large chunk.
    let memory = (alone.without_experts() + model.expert_bytes() / 2) / 7 * 8;
    let apart = plan(&needs(large, CacheWish::Auto, false), memory);
    let shared = plan(&needs(large, CacheWish::Auto, true), memory);
    assert_eq!((apart.lent, shared.lent), (0, 1_000 * (large as u64 + 64 - 512)));
    assert_eq!(slots(&shared), slots(&apart) + shared.lent);
    assert_eq!((shared.total(), shared.streamed), (apart.total(), apart.streamed));
    let [load, read, write] = shared.phases();
    assert_eq!((load.name, read.name, write.name), ("load", "read", "write"));
    assert_eq!((read.total, write.total), (shared.total(), shared.total()), "each phase takes all of it");
    assert_eq!((read.slots, write.slots), (slots(&apart), slots(&shared)));
    assert_eq!((read.scratch, write.scratch), (shared.scratch, 512_000));
    assert_eq!(load.total, shared.dense + shared.fixed);
    // Nothing to lend: small chunks, a size that was asked for, experts from the mapped file.
    assert_eq!(plan(&needs(256, CacheWish::Auto, true), memory).lent, 0);
    let asked = plan(&needs(large, CacheWish::Bytes(60_000), true), memory);
    assert_eq!((asked.lent, slots(&asked)), (0, 60_000));
    assert_eq!(plan(&needs(large, CacheWish::Auto, true), 1 << 40).lent, 0);
    // What is lent never makes a cache of everything, which nothing would be read into.
    let tight = (alone.without_experts() + model.expert_bytes() - 5_000) / 7 * 8;
    let most = plan(&needs(large, CacheWish::Auto, true), tight);
    assert!(slots(&most) < model.expert_bytes() && most.lent > 0, "{} {}", slots(&most), most.lent);
}
