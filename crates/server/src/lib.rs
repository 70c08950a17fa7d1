//! HTTP over the engine's sessions: the endpoints agents speak to.
//!
//! - [`Service`]: a model being served. One thread owns the engine; requests reach it through a channel.
//! - [`router`]: the endpoints of the OpenAI dialect; anything else is 404.
//! - [`serve`], [`listen()`]: connections, with limits on everything a client controls.
//!
//! A further dialect is a module like `chat`: it turns its request into prompts ([`Service::submit`]), and the events
//! that come back into its answer.

mod answer;
mod chat;
mod completions;
mod error;
mod exchange;
mod fields;
pub mod grammar;
mod info;
mod listen;
mod prompt;
mod routes;
mod security;
mod service;
mod structure;
#[cfg(test)]
mod tests;

pub use error::ApiError;
pub use listen::{listen, serve};
pub use routes::router;
pub use security::Access;
pub use service::{Config, Running, Served, Service};
