//! Text in and out of the model: byte-level BPE from the arrays a model file stores, chat templates, and decoding as
//! tokens come.
//!
//! - [`Vocabulary`]: the tokenizer as plain arrays, from a GGUF file or (for conversion) a Hugging Face folder.
//! - [`Tokenizer`]: text to ids. Control tokens never come from a user's text: [`Tokenizer::encode_text`] takes all of
//!   it as text, [`Tokenizer::encode_rendered`] takes the control tokens that a [`ChatTemplate`] wrote itself, and
//!   [`Tokenizer::encode_raw_with_specials`] is for prompts written with control tokens on purpose.
//! - [`AnswerParser`]: reasoning, text and tool calls in an answer, as it streams.
//! - [`Decoder`] and [`StopMatcher`]: whole characters and no part of a stop string, whatever the stream's pieces.

mod bpe;
mod cache;
mod calls;
mod decoder;
mod error;
mod guard;
mod hf;
mod json;
mod normalize;
mod shallow;
mod specials;
mod split;
mod stop;
mod template;
mod time;
mod tokenizer;
mod unicode;
mod unicode_table;
mod vocabulary;

pub use calls::{AnswerParser, BadTool, CallFormat, Piece, call_rules};
pub use decoder::Decoder;
pub use error::Error;
pub use guard::Segment;
pub use stop::StopMatcher;
pub use template::{ChatTemplate, Rendered, TemplateError};
pub use tokenizer::Tokenizer;
pub use vocabulary::{TokenKind, Vocabulary};
