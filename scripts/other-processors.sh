#!/usr/bin/env bash
# What processors of other kinds need, without one of them: the kernels for aarch64 are tested in emulation, and the
# workspace is type-checked for Apple's processors.
#
#   scripts/other-processors.sh
#
# Needs rustup, aarch64-linux-gnu-gcc with its C library, and qemu-aarch64-static (on Debian and Ubuntu the packages
# gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static).
set -euo pipefail
cd "$(dirname "$0")/.."

for command in rustup aarch64-linux-gnu-gcc qemu-aarch64-static; do
    command -v "$command" >/dev/null || { echo "$0: $command is missing; see the head of this file" >&2; exit 2; }
done
linux=aarch64-unknown-linux-gnu apple=aarch64-apple-darwin
rustup target add "$linux" "$apple" || {
    echo "$0: no standard library for $linux and $apple; make \`rustup target add\` work" >&2
    exit 2
}

echo "--- type check for $apple"
# A type check links nothing: the C inside the TLS library needs no compiler for Apple's processors.
CC_aarch64_apple_darwin=true AR_aarch64_apple_darwin=true cargo check --workspace --target "$apple" --locked

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# emulated PROCESSOR CARGO_ARGUMENT...: tests of the CPU backend on an emulated processor.
emulated() {
    echo "--- tests on an emulated $1"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu -cpu $1" \
        cargo test --release -p redlite-cpu --target "$linux" --locked "${@:2}"
}
# Whole prompts take minutes in emulation: kernels and products of every variant, and one prompt through each.
emulated max --lib -- --skip rates_are_of_this_world
emulated max --test reference stages_agree_in_every_variant
# A processor without dot products must not be given them.
emulated cortex-a72 --lib kernels::int8
