//! Experts that the GPU fetches by itself: all of them lie in pinned memory of the host, which it can read, and as many as
//! fit in slots of its own. Which ones stay is decided on the GPU, so that a token needs no word from the host.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::DriverError;
use model::{ExpertSource, ExpertTensor, LayerCall, MappedExperts, Matrix, Model, Wave};

use crate::driver::{Buffer, Device, Function, Module, Pinned, failed};
use crate::error::Result;
use crate::open::Open;
use crate::sources::{Source, Target};
use crate::{Cuda, kernels};

/// A matrix of a layer's experts in pinned memory, as the kernels see it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Home {
    at: u64,
    stride: i64,
    bytes: i64,
}

/// Parameters of both kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Book {
    homes: u64,
    places: u64,
    slot_of: u64,
    owner: u64,
    stamp: u64,
    now: u64,
    sums: u64,
    slots: u64,
    slot_bytes: i64,
    parts: [i64; 3],
    list: u64,
    counts: u64,
    experts: i32,
    count: i32,
    layer: i32,
}

/// All experts of a model in pinned memory.
pub struct PinnedExperts {
    /// Of each tensor: its number in the file, its bytes.
    tensors: Vec<(usize, Pinned)>,
    model: Arc<Model>,
}

impl PinnedExperts {
    /// Reads them.
    ///
    /// # Errors
    /// If there is no GPU, or not so much memory.
    pub fn read(model: &Arc<Model>, device: i32) -> Result<PinnedExperts> {
        let device = Device::open(device)?;
        let all = model.experts.iter().flat_map(|layer| [&layer.gate, &layer.up, &layer.down]);
        let mut numbers: Vec<usize> = all.map(|tensor| tensor.tensor).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut tensors = Vec::with_capacity(numbers.len());
        for number in numbers {
            let len = model.gguf.bytes(&model.gguf.tensors()[number]).len();
            // The GPU copies whole words of 16 bytes.
            let pinned = device.pinned(len + 16);
            tensors.push((number, pinned.map_err(failed("pinning memory of the host for all experts"))?));
        }
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(4, usize::from).min(16) {
                scope.spawn(|| {
                    while let Some((number, pinned)) =
                        tensors.get(next.fetch_add(1, Ordering::Relaxed) as usize)
                    {
                        let bytes = model.gguf.bytes(&model.gguf.tensors()[*number]);
                        // SAFETY: each tensor is filled by one thread, and nobody reads it yet.
                        unsafe { pinned.fill(bytes) };
                    }
                });
            }
        });
        Ok(PinnedExperts { tensors, model: model.clone() })
    }

    fn tensor(&self, number: usize) -> &Pinned {
        let found = self.tensors.iter().find(|(tensor, _)| *tensor == number);
        &found.expect("every tensor of experts was read").1
    }

    /// Whether addresses lie in it.
    pub(crate) fn holds(&self, range: Range<usize>) -> bool {
        self.tensors.iter().any(|(_, pinned)| {
            let start = pinned.host() as usize;
            range.start >= start && range.end <= start + pinned.bytes
        })
    }

    fn home(&self, tensor: &ExpertTensor) -> Home {
        Home {
            at: self.tensor(tensor.tensor).host() as u64 + tensor.offset,
            stride: tensor.stride as i64,
            bytes: tensor.bytes() as i64,
        }
    }

    /// `len` bytes of file number `shard` from `offset` on, if they belong to experts.
    pub fn bytes(&self, shard: usize, offset: u64, len: usize) -> Option<&[u8]> {
        self.tensors.iter().find_map(|(number, pinned)| {
            let info = &self.model.gguf.tensors()[*number];
            let start = offset.checked_sub(info.offset).filter(|_| info.shard == shard)? as usize;
            pinned.as_slice().get(..pinned.bytes - 16)?.get(start..start.checked_add(len)?)
        })
    }
}

/// Slots that the GPU manages, and the books of them in its memory.
pub(crate) struct Fetch {
    book: Book,
    choose: Function,
    copy: Function,
    /// What the book names.
    tables: Arc<Buffer>,
    _slots: Buffer,
    home: Arc<PinnedExperts>,
    _module: Module,
}

/// What the GPU found and fetched so far, readable at any time.
pub(crate) struct Sums {
    device: Arc<Device>,
    at: u64,
    /// What `at` lies in.
    _tables: Arc<Buffer>,
}

/// Rooms of a slot begin at multiples of this.
const ALIGN: i64 = 64;

impl Fetch {
    fn new(device: &Arc<Device>, target: &Target, home: Arc<PinnedExperts>, bytes: u64) -> Result<Fetch> {
        let model = home.model.clone();
        let (layers, experts) = (model.experts.len(), model.spec.moe.experts);
        let homes: Vec<Home> = (model.experts.iter())
            .flat_map(|layer| [&layer.gate, &layer.up, &layer.down].map(|tensor| home.home(tensor)))
            .collect();
        let largest = |matrix: usize| {
            let bytes = homes.iter().skip(matrix).step_by(3).map(|home| home.bytes + 30);
            (bytes.max().unwrap_or(0) + ALIGN - 1) / ALIGN * ALIGN
        };
        let sizes = [0, 1, 2].map(largest);
        let slot_bytes: i64 = sizes.iter().sum();
        let count = ((bytes as i64 / slot_bytes.max(1)) as usize).min(layers * experts);
        let modules = kernels::load(device, &[Source::fetch(target)])?;
        let module = modules.into_iter().next().expect("one source");
        let find = |name: &'static str| module.function(name).map_err(failed(name));
        let (choose, copy) = (find("fetch_choose")?, find("fetch_copy")?);
        let places: Vec<u64> = (homes.iter())
            .flat_map(|home| (0..experts as i64).map(move |e| (home.at as i64 + e * home.stride) as u64))
            .collect();
        let parts = [
            size_of_val(&homes[..]),
            size_of_val(&places[..]),
            4 * layers * experts,
            4 * count,
            4 * count,
            8,
            16,
            4 * (1 + experts),
        ]
        .map(|bytes| bytes.next_multiple_of(16));
        let fail = || failed("making room for experts");
        let tables = device.allocate(parts.iter().sum()).map_err(fail())?;
        let slots = device.allocate(count * slot_bytes as usize).map_err(fail())?;
        let mut at = tables.at;
        let [homes_at, places_at, slot_of, owner, stamp, now, sums, list] = parts.map(|bytes| {
            at += bytes as u64;
            at - bytes as u64
        });
        let fill = || {
            device.zero(tables.at, tables.bytes)?;
            device.upload(&homes, homes_at)?;
            device.upload(&places, places_at)?;
            device.upload(&vec![-1i32; layers * experts], slot_of)?;
            device.upload(&vec![-1i32; count], owner)?;
            device.wait()
        };
        fill().map_err(fail())?;
        let book = Book {
            homes: homes_at,
            places: places_at,
            slot_of,
            owner,
            stamp,
            now,
            sums,
            slots: slots.at,
            slot_bytes,
            parts: [0, sizes[0], sizes[0] + sizes[1]],
            list,
            counts: 0,
            experts: experts as i32,
            count: count as i32,
            layer: 0,
        };
        Ok(Fetch { book, choose, copy, tables: Arc::new(tables), _slots: slots, home, _module: module })
    }

    /// Where the table of a layer's places is: [3, experts] u64.
    pub(crate) fn places(&self, layer: usize) -> u64 {
        self.book.places + (8 * 3 * layer * self.book.experts as usize) as u64
    }

    /// Slots there are.
    fn count(&self) -> usize {
        self.book.count as usize
    }
}

impl Sums {
    /// Experts found in slots, and fetched. Waits for what is enqueued.
    pub(crate) fn read(&self) -> std::result::Result<[u64; 2], DriverError> {
        self.device.bind()?;
        let sums: Vec<u64> = self.device.download(self.at, 2)?;
        Ok([sums[0], sums[1]])
    }
}

impl Cuda {
    /// From now on passes that choose few experts have the GPU fetch them from `home` into `bytes` bytes of slots;
    /// see [`Fetching`]. Returns the most rows of such a pass.
    ///
    /// # Errors
    /// If the memory is not there.
    pub fn fetch_from(&mut self, home: Arc<PinnedExperts>, bytes: u64) -> Result<usize> {
        self.device.bind().map_err(failed("making room for experts"))?;
        let fetch = Fetch::new(&self.device, &self.target, home, bytes)?;
        let rows = fetch.count() / (self.model.experts.len() * self.model.spec.moe.used).max(1);
        self.fetch = Some(fetch);
        Ok(rows)
    }

    /// All experts in pinned memory, if they are there.
    pub(crate) fn home(&self) -> Option<Arc<PinnedExperts>> {
        self.fetch.as_ref().map(|fetch| fetch.home.clone())
    }

    /// What the GPU found and fetched, to be asked for later.
    pub(crate) fn sums(&self) -> Option<Sums> {
        let fetch = self.fetch.as_ref()?;
        Some(Sums { device: self.device.clone(), at: fetch.book.sums, _tables: fetch.tables.clone() })
    }

    /// Fetches what the pass has chosen in `layer`.
    pub(crate) fn fetch(&self, open: &Open, layer: usize) -> std::result::Result<(), DriverError> {
        let fetch = self.fetch.as_ref().expect("there is one");
        if open.single {
            self.chosen_single(open)?;
        }
        let p = Book { counts: open.buffers.counts.at(), layer: layer as i32, ..fetch.book };
        self.device.launch(&fetch.choose, (1, 1, 1), 1024, 0, &p)?;
        self.device.launch(&fetch.copy, (2 * self.device.processors as usize, 1, 1), 256, 0, &p)
    }
}

/// A source for [`Cuda::fetch_from`]: small passes need nothing of it, others get their experts from `inner`.
pub struct Fetching<S> {
    inner: S,
    all: MappedExperts,
    /// Rows of a small pass.
    rows: usize,
    /// Whether the last wave was one of `inner`.
    by_inner: bool,
}

impl<S: ExpertSource> Fetching<S> {
    /// A source for `model` whose passes of at most `rows` rows are left to the GPU.
    pub fn new(model: &Model, inner: S, rows: usize) -> Fetching<S> {
        Fetching { inner, all: MappedExperts::new(model).in_whole_layers(), rows, by_inner: false }
    }
}

impl<S: ExpertSource> ExpertSource for Fetching<S> {
    fn needs_routes(&self, rows: usize) -> bool {
        rows > self.rows && self.inner.needs_routes(rows)
    }

    fn start(&mut self, call: &LayerCall) -> model::Result<()> {
        if call.rows > self.rows { self.inner.start(call) } else { Ok(()) }
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> model::Result<Wave> {
        self.by_inner = call.rows > self.rows;
        if self.by_inner { self.inner.wave(call, from) } else { self.all.wave(call, from) }
    }

    fn release(&mut self) {
        if self.by_inner {
            self.inner.release();
        }
    }

    fn wants_prediction(&self, rows: usize) -> Option<usize> {
        self.inner.wants_prediction(rows).filter(|_| rows > self.rows)
    }

    fn predicted(&mut self, layer: usize, experts: &[u32]) {
        self.inner.predicted(layer, experts);
    }

    fn wants_choices(&self, _: &LayerCall) -> bool {
        false // what decoding finds in slots is not up to `inner`
    }

    fn choices(&mut self, _: usize, _: &Matrix) {}
}
