#!/usr/bin/env bash
# Compiles every CUDA kernel for some architectures, without a GPU, and reports registers and spills; fails if one does
# not compile or a hot one spills. Fetches the compiler from PyPI into a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=target/nvrtc
if ! [ -e "$environment/done" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install -q --disable-pip-version-check nvidia-cuda-nvrtc==13.0.88
    touch "$environment/done"
fi
libraries=$(dirname "$(find "$PWD/$environment" -name 'libnvrtc.so.13')")
LD_LIBRARY_PATH=$libraries cargo run --release --locked -q -p redlite-cuda --example compile -- \
    models/pocket.gguf "${@:-sm_90a}"
