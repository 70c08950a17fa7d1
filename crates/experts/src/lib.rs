//! Routed experts through a window of bounded memory.
//!
//! A [`Store`] is an [`ExpertSource`](model::ExpertSource): it cuts a budget into slots (room for one expert's
//! gate, up and down matrices), reads experts into them with a few threads, and hands them out in waves of
//! ascending experts. It knows two ways of being used:
//!
//! - **A scan.** A large chunk of a prompt touches every expert of every layer, one layer after the other, and
//!   the next chunk does so again. The least recently used expert is then always the one needed soonest, so
//!   a fixed number of each layer stays, and the rest streams through a window of slots in the order of the file, in
//!   runs of consecutive experts, ahead of the computation and across layers and chunks. The last chunk
//!   leaves behind what the last tokens chose.
//! - **Small passes** (decoding, short turns). What is missing is read at once; the least recently used goes. While a
//!   layer computes, the experts that the next layer's router would choose for the same rows are read already.
//!
//! Activations of large chunks may borrow memory of slots ([`Loan`]): before the first one the last slots of each size are
//! given up, and they are taken back when single tokens are computed again.
//!
//! None of this changes a result: a wave's bytes are complete before it is handed out and stay until it has been
//! computed.

mod error;
mod layout;
mod load;
mod policy;
pub mod reader;
pub mod simulate;
mod slots;
mod state;
mod stats;
mod store;

pub use error::{Error, Result};
pub use layout::Layout;
pub use reader::{Io, Reader};
pub use stats::{Span, Stats, Wait};
pub use store::{Loan, Monitor, Options, Store};
