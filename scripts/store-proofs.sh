#!/usr/bin/env bash
# What the cache of experts promises, measured: the cap, flat memory, reading hidden behind computing, decoding at a hit
# rate, follow-up turns, and llama.cpp's mapping under the same cap.
#
#   scripts/store-proofs.sh [OPTION...] WHAT FILE
#
#   WHAT           cap | flat | hidden | decode | turns | mmap
#   --cache SIZE   the cache, for example a fifth of the experts [800MiB]
#   --cap BYTES    limit of the memory control group [2 GiB]
#   --threads N    threads [2]
#   --pairs N      pairs of each comparison [3]
#
# cap     one run in a memory control group that counts the file cache too: peak resident memory while loading, reading
#         and writing, beside the plan of each phase; --cache auto lends memory of slots to large chunks
# flat    200 turns and more than 20,000 tokens in one process: resident memory after each hundred
# hidden  8192 tokens with the cache and with everything resident, in turn: through the file cache, and by direct reads
# decode  tokens one by one, choices of experts replayed at a hit rate of 0.8: with the cache and resident, in turn
# turns   64, 256 and 1024 new tokens behind 4096: time beside the longer of computing and reading
# mmap    the same file under the same cap through `redlite-oracle bench`
#
# Needs target/release/redlite (or REDLITE), for `mmap` redlite-oracle (or ORACLE), for `cap` and `mmap` the right to make
# memory control groups. Exit status: 0 measured, 2 something could not run.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
redlite=${REDLITE:-${CARGO_TARGET_DIR:-$root/target}/release/redlite}
oracle=${ORACLE:-${CARGO_TARGET_DIR:-$root/oracle/target}/release/redlite-oracle}
cache=800MiB cap=$((2 << 30)) threads=2 pairs=3 args=()
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }
while (($#)); do
    case $1 in
        --cache) cache=${2:?a size}; shift ;;
        --cap) cap=${2:?bytes}; shift ;;
        --threads) threads=${2:?a number}; shift ;;
        --pairs) pairs=${2:?a number}; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "$0: unknown argument $1; see --help" >&2; exit 2 ;;
        *) args+=("$1") ;;
    esac
    shift
done
((${#args[@]} == 2)) || { usage >&2; exit 2; }
what=${args[0]} file=${args[1]}
[[ -x $redlite ]] || { echo "$redlite is missing: cargo build --release" >&2; exit 2; }
[[ -e $file ]] || { echo "$file is missing" >&2; exit 2; }
work=$(mktemp -d)
group=
cleanup() {
    rm -rf "$work"
    [[ -z $group ]] || rmdir "$group" 
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# number NAME FILE: the last number of that name in JSON.
number() { grep -o "\"$1\": *[0-9.e+-]*" "$2" | tail -n 1 | sed 's/.*: *//'; }

# phases FILE: the peak of each phase beside its plan.
phases() {
    grep -o '{[^{}]*"plan_bytes"[^{}]*}' "$1" | tr -d '"{} ' | awk -F '[:,]' '{
        for (i = 1; i < NF; i += 2) of[$i] = $(i + 1)
        printf "%s%s: peak %d MiB of %d MiB planned (%.1f %%)", (NR > 1 ? "; " : ""), of["phase"],
            of["peak_bytes"]/1048576, of["plan_bytes"]/1048576, 100*of["peak_bytes"]/of["plan_bytes"] }'
}

# capped CMD...: runs it in a new memory group with the limit `cap`, file cache counted.
make_group() {
    local v1=/sys/fs/cgroup/memory v2=/sys/fs/cgroup
    if [[ -e $v1/memory.limit_in_bytes ]]; then
        group=$v1/redlite-proof-$$
        mkdir "$group" 2>/dev/null && echo "$cap" >"$group/memory.limit_in_bytes" && return
    elif [[ -e $v2/cgroup.controllers ]]; then
        group=$v2/redlite-proof-$$
        mkdir "$group" 2>/dev/null && echo "$cap" >"$group/memory.max" && return
    fi
    group=
    echo "no memory control group can be made here: this needs root, or a delegated group" >&2
    exit 2
}
capped() { bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' _ "$group" "$@"; }

# forget: what the file cache holds of the file is given back.
forget() { dd if="$file" of=/dev/null bs=1M count=0 iflag=nocache 2>/dev/null || true; }

words() { # words COUNT: a prompt of about so many words
    awk -v n="$1" 'BEGIN { srand(7); for (i = 0; i < n; i++) printf "%s%c%d ", i % 9 ? "" : "\n", 97 + int(rand() * 26), rand() * 1000 }'
}

case $what in
    cap)
        make_group
        words 2500 >"$work/prompt"
        run=(run "$file" --raw -f "$work/prompt" -n 64 --ignore-eos --temp 0 --threads "$threads")
        forget
        capped "$redlite" "${run[@]}" --cache "$cache" --json >"$work/run.json"
        tokens=$(number prompt_tokens "$work/run.json")
        "$redlite" plan "$file" --prompt "$tokens" --context $((tokens + 64)) --threads "$threads" --cache "$cache" \
            --memory "$cap" --json >"$work/plan.json"
        awk -v peak="$(number peak_memory_bytes "$work/run.json")" -v plan="$(number total_bytes "$work/plan.json")" \
            -v cap="$cap" -v group="$(cat "$group"/memory.max_usage_in_bytes 2>/dev/null || cat "$group/memory.peak")" \
            -v phases="$(phases "$work/run.json")" -v in_="$(number prompt_tokens_per_second "$work/run.json")" \
            -v out="$(number generated_tokens_per_second "$work/run.json")" \
            -v bytes="$(stat -Lc %s "$file")" 'BEGIN { M = 1048576
                printf "file %d MiB, cap %d MiB, plan %d MiB, peak resident %d MiB (%.1f %% of the plan), peak of the group with file cache %d MiB; %.1f tokens/s read, %.1f written\n%s\n",
                bytes/M, cap/M, plan/M, peak/M, 100*peak/plan, group/M, in_, out, phases }'
        ;;
    flat)
        "$redlite" serve "$file" --port 0 --quiet --parallel 1 --session-cache 64 --threads "$threads" \
            --cache "$cache" --context 4096 >"$work/address" 2>"$work/errors" &
        server=$!
        trap 'kill $server 2>/dev/null; cleanup' EXIT
        for _ in $(seq 100); do [[ -s $work/address ]] && break; sleep 0.1; done
        address=$(head -n 1 "$work/address")
        tokens=0
        for turn in $(seq 200); do
            prompt="$turn $(words 24 | tr -d '\n')"
            curl -sf "$address/v1/completions" -H 'content-type: application/json' \
                -d "{\"prompt\": \"$prompt\", \"max_tokens\": 32, \"temperature\": 0}" >"$work/answer"
            tokens=$((tokens + $(number total_tokens "$work/answer")))
            if ((turn % 25 == 0)); then
                awk -v turn="$turn" -v tokens="$tokens" '/VmRSS/ { rss = $2 } /VmHWM/ { peak = $2 } END {
                    printf "turn %d, %d tokens: resident %.1f MiB, peak %.1f MiB\n", turn, tokens, rss/1024, peak/1024 }' \
                    "/proc/$server/status"
            fi
        done
        ;;
    hidden)
        for io in cached direct; do
            echo "8192 tokens, $io reads: cache of $cache / resident"
            "$redlite" bench "$file" --prompt 8192 --gen 0 --repeat "$pairs" --threads "$threads" --pause 0 \
                --ab "--cache full" "--cache $cache --io $io" 
        done
        ;;
    decode)
        "$redlite" bench "$file" --prompt 0 --gen 48 --repeat "$pairs" --threads "$threads" --trace-hits 0.8 \
            --trace-cache "$cache" --pause 0 --ab "--cache full" "--cache $cache --io cached"
        ;;
    turns)
        for setting in "full" "$cache"; do
            "$redlite" bench "$file" --depth 4096 --prompt 64,256,1024 --gen 0 --repeat 3 --threads "$threads" \
                --cache "$setting" --no-profile
        done
        ;;
    mmap)
        make_group
        [[ -x $oracle ]] || { echo "$oracle is missing: cargo build --release in oracle/" >&2; exit 2; }
        forget
        capped "$oracle" bench "$file" --prompt 2048 --gen 16 --ubatch 2048 --threads "$threads" --repeat 1
        forget
        capped "$redlite" bench "$file" --prompt 2048,8192 --gen 16 --threads "$threads" --repeat 1 --no-profile --cache "$cache"
        ;;
    *) usage >&2; exit 2 ;;
esac
