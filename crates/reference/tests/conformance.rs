//! The promises every backend keeps, in both forms of the delta rule.

use std::sync::Arc;

use model::{Backend, Limits, Model};
use redlite_reference::{DeltaForm, Options, Reference};
use testkit::conformance;

fn chunked(model: Arc<Model>, limits: Limits) -> Box<dyn Backend> {
    Box::new(Reference::new(model, limits, Options::default()).unwrap())
}

fn sequential(model: Arc<Model>, limits: Limits) -> Box<dyn Backend> {
    let options = Options { delta: DeltaForm::Sequential, ..Options::default() };
    Box::new(Reference::new(model, limits, options).unwrap())
}

#[test]
fn chunks() {
    conformance::chunks(&chunked);
}

#[test]
fn blocks() {
    conformance::blocks(&chunked);
}

#[test]
fn batches() {
    conformance::batches(&chunked);
}

#[test]
fn decode_agrees_with_ingestion() {
    conformance::decode_agrees_with_ingestion(&chunked, 1e-4, 1e-5);
    conformance::decode_agrees_with_ingestion(&sequential, 0.0, 0.0);
}

#[test]
fn waves() {
    conformance::waves(&chunked);
}

#[test]
fn forks_and_host_copies() {
    conformance::forks_and_host_copies(&chunked);
}

#[test]
fn snapshots() {
    conformance::snapshots(&chunked, 1e-4);
    conformance::snapshots(&sequential, 0.0);
}

#[test]
fn aborts() {
    conformance::aborts(&chunked);
}

#[test]
fn interleaved_passes() {
    conformance::interleaved_passes(&chunked);
}

#[test]
fn layouts() {
    conformance::layouts(&chunked);
}

#[test]
fn strong_decay() {
    conformance::strong_decay(&chunked, 1e-4);
}

#[test]
fn wanted_rows() {
    conformance::wanted_rows(&chunked);
}

#[test]
fn largest() {
    conformance::largest(&chunked);
}

#[test]
fn in_one_go() {
    conformance::in_one_go(&chunked);
}

#[test]
fn misuse() {
    conformance::misuse(&chunked);
}
