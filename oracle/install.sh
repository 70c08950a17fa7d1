#!/bin/sh
# Installs what building llama.cpp needs on Debian or Ubuntu: a C++ compiler,
# cmake, and libclang for the bindings. Does nothing when all of it is there.
# Run as root or with sudo available; asks nothing.
set -eu

have_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] || ldconfig -p 2>/dev/null | grep -q 'libclang[-.0-9]*\.so' ||
        ls /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1
}

packages=
command -v cmake >/dev/null 2>&1 || packages="$packages cmake"
command -v c++ >/dev/null 2>&1 || packages="$packages g++"
command -v make >/dev/null 2>&1 || packages="$packages make"
# bindgen also wants clang's own headers (stddef.h), which come with clang.
if ! command -v clang >/dev/null 2>&1 || ! have_libclang; then
    packages="$packages clang libclang-dev"
fi
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "install.sh: no apt-get here; install these yourself:$packages" >&2
    exit 1
fi
as_root=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
        echo "install.sh: run as root to install:$packages" >&2
        exit 1
    fi
    as_root="sudo -n"
fi
$as_root apt-get update -q
# $packages is a list of words.
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages
