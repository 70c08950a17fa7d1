//! The driver's functions this backend uses: memory, kernels, events, all on one stream.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum};
use cudarc::driver::{DriverError, result};

use crate::error::{Error, Result};

/// How many GPUs the driver shows.
///
/// # Errors
/// If there is no driver.
pub fn count() -> Result<usize> {
    // SAFETY: probes for the library, before anything of it is called.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    result::init().map_err(|error| Error::NoDevice(error.to_string()))?;
    Ok(result::device::get_count().map_err(|error| Error::NoDevice(error.to_string()))?.max(0) as usize)
}

/// A GPU, its context and the one stream all work goes to.
pub(crate) struct Device {
    ordinal: sys::CUdevice,
    context: sys::CUcontext,
    pub(crate) stream: sys::CUstream,
    pub(crate) name: String,
    /// Compute capability.
    pub(crate) capability: (i32, i32),
    /// Multiprocessors.
    pub(crate) processors: u32,
    /// Largest dynamic shared memory of a block, bytes.
    pub(crate) shared: usize,
}

// SAFETY: handles of the driver may be used from any thread; `bind` makes the context current on it.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks its own data.
unsafe impl Sync for Device {}

pub(crate) fn failed(call: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |source| Error::Driver { call, source }
}

impl Device {
    /// GPU number `ordinal`, of those the driver shows.
    pub(crate) fn open(ordinal: i32) -> Result<Arc<Device>> {
        // SAFETY: probes for the library, before anything of it is called.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        result::init().map_err(|error| Error::NoDevice(error.to_string()))?;
        let device = result::device::get(ordinal).map_err(|error| Error::NoDevice(error.to_string()))?;
        let attribute = |which| {
            // SAFETY: `device` is one the driver gave.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(failed("asking for the GPU's attributes"))
        };
        let name = result::device::get_name(device).map_err(failed("asking for the GPU's name"))?;
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(Error::TooOld { name, major, minor });
        }
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        // SAFETY: as above; released when the device is dropped.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(failed("taking the GPU's context"))?;
        // SAFETY: just retained.
        unsafe { result::ctx::set_current(context) }.map_err(failed("entering the GPU's context"))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("making a stream"))?;
        Ok(Arc::new(Device {
            ordinal: device,
            context,
            stream,
            name,
            capability: (major, minor),
            processors,
            shared,
        }))
    }

    /// Makes the context current on this thread; every other function needs that.
    pub(crate) fn bind(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: the context lives as long as the device.
        unsafe { result::ctx::set_current(self.context) }
    }

    /// Bytes of memory that are free.
    pub(crate) fn free_memory(&self) -> Result<usize> {
        Ok(result::mem_get_info().map_err(failed("asking for free memory"))?.0)
    }

    /// Waits for everything enqueued.
    pub(crate) fn wait(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::synchronize(self.stream) }
    }

    /// Enqueues a kernel with one parameter, a structure of the kernel's layout.
    pub(crate) fn launch<P: Copy>(
        &self,
        function: &Function,
        grid: (usize, usize, usize),
        block: usize,
        shared: usize,
        parameters: &P,
    ) -> std::result::Result<(), DriverError> {
        self.launch_on(self.stream, function, grid, (block, shared), parameters)
    }

    /// The same on another stream; `block`: its threads, and bytes of shared memory.
    pub(crate) fn launch_on<P: Copy>(
        &self,
        stream: sys::CUstream,
        function: &Function,
        grid: (usize, usize, usize),
        (block, shared): (usize, usize),
        parameters: &P,
    ) -> std::result::Result<(), DriverError> {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let mut list = [std::ptr::from_ref(parameters).cast::<c_void>().cast_mut()];
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: stream,
            attrs: &mut early,
            numAttrs: u32::from(function.early && self.capability.0 >= 9),
        };
        // SAFETY: the parameter has the layout the kernel declares, and its pointers lie in buffers of this
        // backend; the driver copies it and the attribute before it returns.
        unsafe { sys::cuLaunchKernelEx(&config, function.function, list.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
    }

    /// Records what `work` enqueues, and nothing else happens: a graph of it.
    pub(crate) fn record(
        &self,
        work: impl FnOnce() -> std::result::Result<(), DriverError>,
    ) -> std::result::Result<Graph, DriverError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::begin_capture(self.stream, mode) }?;
        let done = work();
        // SAFETY: as above; ends what was begun also after a failure.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        done?;
        let graph = graph?;
        // SAFETY: just made; the executable graph does not need it any more.
        unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            Ok(Graph(exec?))
        }
    }

    /// Enqueues a graph.
    pub(crate) fn replay(&self, graph: &Graph) -> std::result::Result<(), DriverError> {
        // SAFETY: both are alive, and whoever keeps the graph keeps the memory it names.
        unsafe { result::graph::launch(graph.0, self.stream) }
    }

    /// Memory of the host that the GPU writes at full speed.
    pub(crate) fn pinned(self: &Arc<Device>, bytes: usize) -> std::result::Result<Pinned, DriverError> {
        // SAFETY: freed when dropped.
        let at = unsafe { result::malloc_host(bytes.max(1), 0) }?;
        Ok(Pinned { at: at.cast(), bytes, device: self.clone() })
    }

    /// Copies numbers from the GPU to pinned memory of at least their size, after everything enqueued. Waits.
    pub(crate) fn download_to<'a>(
        &self,
        from: u64,
        len: usize,
        to: &'a mut Pinned,
    ) -> std::result::Result<&'a [f32], DriverError> {
        assert!(4 * len <= to.bytes, "room was made before");
        // SAFETY: the memory is ours alone, holds as much, and is aligned for any number, which any bits are; the wait ends
        // the copy.
        let numbers = unsafe { std::slice::from_raw_parts_mut(to.at.cast::<f32>(), len) };
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(numbers, from, self.stream) }?;
        self.wait()?;
        Ok(numbers)
    }

    /// Enqueues a fill with zeros.
    pub(crate) fn zero(&self, at: u64, bytes: usize) -> std::result::Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers name parts of living buffers.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }
    }

    /// Enqueues a copy inside the GPU's memory.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> std::result::Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers name parts of living buffers.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }
    }

    /// Lets this GPU reach the memory of another without help. Where they cannot, copies go by way of the host, and
    /// nothing else changes.
    pub(crate) fn reach(&self, other: &Device) -> std::result::Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the context lives as long as the other device, whose memory copies name only as long as that.
        let _ = unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) };
        Ok(())
    }

    /// Enqueues a copy from another GPU's memory, with this one's context current.
    pub(crate) fn copy_from(
        &self,
        other: &Device,
        from: u64,
        to: u64,
        bytes: usize,
    ) -> std::result::Result<(), DriverError> {
        // SAFETY: callers name parts of living buffers of the two GPUs.
        unsafe { result::memcpy_peer_async(self.context, to, other.context, from, bytes, self.stream) }
    }

    /// Copies numbers to the GPU, after everything enqueued; `from` may be reused at once.
    pub(crate) fn upload<T: Copy>(&self, from: &[T], to: u64) -> std::result::Result<(), DriverError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: callers name parts of living buffers. From pageable memory the driver copies before it returns.
        unsafe { result::memcpy_htod_async(to, from, self.stream) }
    }

    /// Copies numbers from the GPU, after everything enqueued. Waits.
    pub(crate) fn download<T: Copy + Default>(
        &self,
        from: u64,
        len: usize,
    ) -> std::result::Result<Vec<T>, DriverError> {
        let mut out = vec![T::default(); len];
        if len > 0 {
            // SAFETY: as above; the wait keeps `out` in place until it is filled.
            unsafe { result::memcpy_dtoh_async(&mut out, from, self.stream) }?;
        }
        self.wait()?;
        Ok(out)
    }

    /// Memory that is not initialised.
    pub(crate) fn allocate(self: &Arc<Device>, bytes: usize) -> std::result::Result<Buffer, DriverError> {
        // SAFETY: freed when the buffer is dropped. Copies of blocks read some words beyond the end of weights.
        let at = unsafe { result::malloc_sync(bytes + 1024) }?;
        Ok(Buffer { at, bytes, device: self.clone() })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nothing can be done about a failure here.
        let _ = self.bind();
        // SAFETY: all buffers and modules hold the device and are gone; both handles are ours.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.ordinal);
        }
    }
}

/// A queue beside the one that computes.
pub(crate) struct Queue {
    pub(crate) stream: sys::CUstream,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Queue {}

impl Queue {
    pub(crate) fn new(device: &Arc<Device>) -> std::result::Result<Queue, DriverError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Queue { stream, device: device.clone() })
    }

    /// What is enqueued here from now on waits for what is enqueued on another.
    pub(crate) fn follow(&self, other: sys::CUstream) -> std::result::Result<(), DriverError> {
        Event::record_on(other)?.hold(self.stream)
    }

    /// What is enqueued on another from now on waits for what is enqueued here.
    pub(crate) fn before(&self, other: sys::CUstream) -> std::result::Result<(), DriverError> {
        Event::record_on(self.stream)?.hold(other)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: the stream is ours; what is enqueued is waited for, as it uses memory that is freed next.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Memory of the GPU.
pub(crate) struct Buffer {
    pub(crate) at: u64,
    pub(crate) bytes: usize,
    device: Arc<Device>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: allocated by us; the driver waits for kernels that use it.
        let _ = unsafe { result::free_sync(self.at) };
    }
}

/// Memory that grows to what is asked of it; its contents do not survive that.
#[derive(Default)]
pub(crate) struct Room(Option<Buffer>);

impl Room {
    /// The address of at least `bytes` bytes.
    pub(crate) fn take(
        &mut self,
        device: &Arc<Device>,
        bytes: usize,
    ) -> std::result::Result<u64, DriverError> {
        if self.0.as_ref().is_none_or(|buffer| buffer.bytes < bytes) {
            self.0 = None;
            let buffer = device.allocate(bytes)?;
            // Numbers that were never written must at least be finite.
            device.zero(buffer.at, bytes)?;
            self.0 = Some(buffer);
        }
        Ok(self.at())
    }

    /// Its address; 0 before anything was taken.
    pub(crate) fn at(&self) -> u64 {
        self.0.as_ref().map_or(0, |buffer| buffer.at)
    }
}

/// Pinned memory of the host.
pub(crate) struct Pinned {
    at: *mut u8,
    pub(crate) bytes: usize,
    device: Arc<Device>,
}

// SAFETY: memory like any other.
unsafe impl Send for Pinned {}
// SAFETY: shared, it is only read, or written as its owner allows.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Where it begins, for the host and for the GPU.
    pub(crate) fn host(&self) -> *mut u8 {
        self.at
    }

    /// Writes its first bytes.
    ///
    /// # Safety
    /// Nobody else reads or writes it meanwhile.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) unsafe fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "bytes that fit");
        // SAFETY: inside the memory, and exclusive by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, bytes.len()) };
    }

    /// All of it as whole words.
    ///
    /// # Safety
    /// Nobody writes it while it is lent.
    pub(crate) unsafe fn words(&self) -> &[u32] {
        // SAFETY: pinned memory begins with a page; any bits are a number, and nobody writes by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at.cast::<u32>(), self.bytes / 4) }
    }

    /// All of it, of memory that is written no more.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: numbers of any value; whoever fills it does so before it is shared.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made by us, and every copy was waited for.
        let _ = unsafe { result::free_host(self.at.cast()) };
    }
}

/// Recorded work, ready to be enqueued at once.
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: as for `Device`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by us; the driver waits for what of it is enqueued.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

/// A compiled kernel; lives as long as its module.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    function: sys::CUfunction,
    /// Whether it may begin before the kernel ahead of it has ended; it waits itself.
    early: bool,
}

// SAFETY: as for `Device`.
unsafe impl Send for Function {}
// SAFETY: as for `Device`.
unsafe impl Sync for Function {}

/// Compiled kernels on the GPU.
pub(crate) struct Module {
    module: sys::CUmodule,
    /// Whether it was compiled for this GPU's architecture: what serves older ones too has no instruction to wait.
    native: bool,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Module {}

impl Module {
    /// Loads machine code, or, if it is not `native`, what the driver compiles further.
    pub(crate) fn load(
        device: &Arc<Device>,
        code: &[u8],
        native: bool,
    ) -> std::result::Result<Module, DriverError> {
        // SAFETY: the image is read during the call; the driver checks it.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) }?;
        Ok(Module { module, native, device: device.clone() })
    }

    /// The kernel called `name`, allowed to use as much shared memory as a block can have.
    pub(crate) fn function(&self, name: &str) -> std::result::Result<Function, DriverError> {
        let text = CString::new(name).expect("names of kernels hold no zero");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, text) }?;
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: just found.
        let used = unsafe { result::function::get_function_attribute(function, attribute) }?;
        let most = self.device.shared as i32 - used;
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: just found.
        unsafe { result::function::set_function_attribute(function, attribute, most) }?;
        Ok(Function { function, early: false })
    }

    /// The same kernel, begun early where the GPU can do that and the kernel was compiled to wait.
    pub(crate) fn early(&self, name: &str) -> std::result::Result<Function, DriverError> {
        Ok(Function { early: self.native, ..self.beside(name)? })
    }

    /// A kernel whose blocks run beside those of others: a multiprocessor changes what it has of shared memory only when it is
    /// empty, so all of them get the most.
    pub(crate) fn beside(&self, name: &str) -> std::result::Result<Function, DriverError> {
        let found = self.function(name)?;
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: just found.
        unsafe { result::function::set_function_attribute(found.function, attribute, 100) }?;
        Ok(found)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: loaded by us; whoever holds its functions holds the module.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// A point on a stream.
pub(crate) struct Event {
    event: sys::CUevent,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}
// SAFETY: as for `Device`.
unsafe impl Sync for Event {}

impl Event {
    /// A point behind everything enqueued.
    pub(crate) fn record(device: &Device) -> std::result::Result<Event, DriverError> {
        Event::record_on(device.stream)
    }

    /// A point behind everything enqueued on a stream.
    pub(crate) fn record_on(stream: sys::CUstream) -> std::result::Result<Event, DriverError> {
        let event = Event { event: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)? };
        // SAFETY: both are alive.
        unsafe { result::event::record(event.event, stream) }?;
        Ok(event)
    }

    /// What is enqueued on `stream` from now on waits for it.
    pub(crate) fn hold(&self, stream: sys::CUstream) -> std::result::Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe {
            result::stream::wait_event(stream, self.event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
    }

    /// Whether the GPU has come past it.
    pub(crate) fn has_passed(&self) -> std::result::Result<bool, DriverError> {
        // SAFETY: made by us.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits for it.
    pub(crate) fn wait(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: made by us.
        unsafe { result::event::synchronize(self.event) }
    }

    /// Milliseconds of the GPU from `self` to `end`, both of which have passed.
    pub(crate) fn until(&self, end: &Event) -> std::result::Result<f32, DriverError> {
        // SAFETY: both are alive.
        unsafe { result::event::elapsed(self.event, end.event) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
