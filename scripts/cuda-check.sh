#!/usr/bin/env bash
# Checks the CUDA backend on the GPU at hand: decoders against `quant`, the conformance suite, every stage and the pocket
# model against the reference. Options: names of checks (beginnings); BINARY=path of a built `device` example.
set -euo pipefail
cd "$(dirname "$0")/.."

binary=${BINARY:-}
if [ -z "$binary" ]; then
    cargo build --release --locked -q -p redlite-cuda --example device
    binary=${CARGO_TARGET_DIR:-target}/release/examples/device
fi
toolkit=/usr/local/cuda/lib64
[ -d "$toolkit" ] && export LD_LIBRARY_PATH=$toolkit${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$binary" check models/pocket.gguf "$@"
