//! Why the backend could not start.

/// A result whose error is [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why the backend could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not there.
    #[error("no NVIDIA driver was found (libcuda); install the driver, or use `--backend cpu`")]
    NoDriver,
    /// A driver, but nothing to drive.
    #[error("no NVIDIA GPU was found ({0}); check `nvidia-smi`, or use `--backend cpu`")]
    NoDevice(String),
    /// The GPU lacks instructions the kernels use.
    #[error("{name} has compute capability {major}.{minor}; at least 8.0 is needed (Ampere or newer)")]
    TooOld {
        /// The GPU.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Of its compute capability.
        minor: i32,
    },
    /// The run-time compiler's library is not there.
    #[error(
        "the CUDA run-time compiler (libnvrtc) was not found: install the CUDA toolkit 12 or 13, or `pip install \
         nvidia-cuda-nvrtc` and add its folder to LD_LIBRARY_PATH; or put the compiled kernels of a release into the folder \
         `kernels` beside the program"
    )]
    NoCompiler,
    /// Our kernels do not compile, most likely because the compiler is too old.
    #[error("kernels `{module}` do not compile for {arch} with NVRTC {version}: {log}")]
    Compile {
        /// Which kernels.
        module: String,
        /// For what.
        arch: String,
        /// The compiler's version.
        version: String,
        /// What the compiler said.
        log: String,
    },
    /// More is needed than is free.
    #[error(
        "GPU {device} has {} MiB free, but its part of the model needs {} MiB; more GPUs (`--gpus`), a smaller context or \
         another file need less",
        .free >> 20, .needed >> 20
    )]
    Memory {
        /// The GPU's number.
        device: i32,
        /// Bytes free.
        free: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// A shape the kernels were not written for.
    #[error("the CUDA backend cannot run this model: {what} is {found}, expected {expected}")]
    Shape {
        /// What.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The weights could not be read.
    #[error(transparent)]
    Model(model::Error),
    /// A call of the driver failed.
    #[error("{call}: {source}")]
    Driver {
        /// What was attempted.
        call: &'static str,
        /// What the driver said.
        source: cudarc::driver::DriverError,
    },
}
