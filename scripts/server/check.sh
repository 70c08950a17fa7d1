#!/usr/bin/env bash
# The official OpenAI client and curl against the server with the small model: scripts/server/check.sh REDLITE_BINARY
# Makes a virtual environment under target/ the first time.
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/redlite}

venv=target/openai-client
if ! [ -e "$venv/ready" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r scripts/server/requirements.txt
    touch "$venv/ready"
fi

work=$(mktemp -d) server=
stop() { [ -z "$server" ] || { kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; }; }
trap 'stop; rm -rf "$work"' EXIT
start() { # start OPTION...: the server with the small model; sets `address`
    stop
    : > "$work/address"
    REDLITE_API_KEY=secret "$binary" serve models/pocket.gguf --port 0 --context 4096 --parallel 4 --session-cache 256 \
        --state-dir "$work/state" "$@" > "$work/address" 2> "$work/log" &
    server=$!
    for _ in $(seq 600); do
        [ -s "$work/address" ] && break
        kill -0 "$server" || { cat "$work/log"; exit 1; }
        sleep 0.1
    done
    address=$(cat "$work/address")
}
client() { "$venv/bin/python" scripts/server/client.py "$address" secret "$@" || { tail -n 40 "$work/log"; exit 1; }; }

for notation in json xml; do
    start --chat-template "crates/text/tests/data/templates/tools_$notation.jinja"
    client calls
done
start
client

ask() { curl --silent --show-error --max-time 60 -H 'Authorization: Bearer secret' "$@"; }
ask "$address/health" | grep -q '"ok"'
ask "$address/metrics" | grep -q '^redlite_prompt_tokens_total{source="reused"} [1-9]'
ask "$address/v1/models" | grep -q '"context_length":4096'
ask -o /dev/null -w '%{http_code}' "$address/v1/nothing" | grep -q 404
ask -N "$address/v1/chat/completions" -d '{"messages":[{"role":"user","content":"Write a function."}],"max_tokens":8,"stream":true}' \
    | tail -n 2 | grep -q '^data: \[DONE\]'
grep -q 'Write a function' "$work/log" && { echo "a prompt is in the log"; exit 1; }
echo "server: the OpenAI client and curl are served"
