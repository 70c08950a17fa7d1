#!/usr/bin/env bash
# Red Lite against llama.cpp on one file and machine, in turn, as one table and JSON.
#
#   scripts/compare-llama.sh [OPTION...] FILE
#
#   --prompt LIST   prompt lengths, separated by commas [512,2048,8192]
#   --gen N         tokens generated one by one; 0 leaves generation out [64]
#   --ubatch LIST   llama.cpp's physical batches; the fastest for each length counts [512,2048,4096]
#   --threads N     threads of both, each on a core of its own [2]
#   --pairs N       pairs of each test, at least 5 for a result [5]
#   --pause S       seconds of rest before every process [1]
#   -o, --output F  where the JSON goes [compare-llama.json]
#
# Needs both programs, built with `cargo build --release` here and in oracle/; the environment variables REDLITE and
# ORACLE name others. Exit status: 0 measured, 2 something could not run, 130 interrupted.
#
# For each test, first llama.cpp's batches are tried once. Then `redlite bench --ab` runs both programs in turn, a process
# for each measurement, each with an unmeasured run of the same shape before it, the order alternating from pair to pair.
# Both read the same random token ids, keep keys and values in f16, and compute the logits of the last row of a prompt and
# of every generated token. The ratio is the median of the pairs' ratios.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
redlite=${REDLITE:-${CARGO_TARGET_DIR:-$root/target}/release/redlite}
oracle=${ORACLE:-${CARGO_TARGET_DIR:-$root/oracle/target}/release/redlite-oracle}
prompts=512,2048,8192 generate=64 ubatches=512,2048,4096 threads=2 pairs=5 pause=1 output=compare-llama.json file=
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }
while (($#)); do
    case $1 in
        --prompt) prompts=${2:?a list of lengths}; shift ;;
        --gen) generate=${2:?a number}; shift ;;
        --ubatch) ubatches=${2:?a list of batches}; shift ;;
        --threads) threads=${2:?a number}; shift ;;
        --pairs) pairs=${2:?a number}; shift ;;
        --pause) pause=${2:?seconds}; shift ;;
        -o | --output) output=${2:?a file}; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "$0: unknown argument $1; see --help" >&2; exit 2 ;;
        *) [[ -z $file ]] || { echo "$0: one file only; see --help" >&2; exit 2; }; file=$1 ;;
    esac
    shift
done
[[ $file ]] || { usage >&2; exit 2; }
[[ -e $file ]] || { echo "$file is missing" >&2; exit 2; }
for program in "$redlite" "$oracle"; do
    [[ -x $program ]] || { echo "$program is missing: cargo build --release" >&2; exit 2; }
done

# llama.cpp's threads on cores of their own; redlite pins its own.
export OMP_PROC_BIND=true OMP_PLACES=cores
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# field NAME FILE: the last number of that name in JSON with a field a line.
field() { sed -n "s/^ *\"$1\": \([0-9.e+-]*\),*$/\1/p" "$2" | tail -n 1; }

# fastest LENGTH: the batch with which llama.cpp reads a prompt of this length fastest.
fastest() {
    "$oracle" bench "$file" --prompt "$1" --gen 0 --ubatch "$ubatches" --threads "$threads" --repeat 1 --json \
        >"$work/batches.json" 2>"$work/said" || { tail -n 5 "$work/said" >&2; return 2; }
    awk '/"median":/ { gsub(",", ""); rate = $2 } /"ubatch":/ { gsub(",", ""); if (rate > best) { best = rate; batch = $2 } }
        END { print batch }' "$work/batches.json"
}

# side a|b: the median of one side of the last test.
side() {
    awk -v key="\"$1\": {" 'index($0, key) { on = 1 } on && /"median":/ { gsub(",", ""); last = $2; on = 0 } END { print last }' \
        "$work/pair.json"
}

# compare NAME BATCH OPTION...: both programs in turn; A is llama.cpp.
compare() {
    local name=$1 batch=$2
    shift 2
    "$redlite" bench "$file" "$@" --threads "$threads" --repeat "$pairs" --pause "$pause" --json \
        --ab "\"$oracle\" --ubatch $batch" "" >"$work/pair.json"
    row "$name" "$batch" "$(side a)" "$(side b)" "$(field ratio "$work/pair.json")" \
        "$(field min "$work/pair.json")" "$(field max "$work/pair.json")"
    [[ -s $work/all ]] && echo , >>"$work/all"
    printf '{ "name": "%s", "ubatch": %s, "comparison":\n' "$name" "$batch" >>"$work/all"
    cat "$work/pair.json" >>"$work/all"
    echo '}' >>"$work/all"
}
row() { LC_ALL=C printf '%-14s %7s %12.2f %12.2f %8.2f %8.2f %8.2f\n' "$@"; }

printf '%-14s %7s %12s %12s %8s %8s %8s\n' test ubatch 'llama.cpp' 'Red Lite' ratio min max
for length in ${prompts//,/ }; do
    batch=$(fastest "$length")
    compare "prompt $length" "$batch" --prompt "$length" --gen 0
done
if ((generate > 0)); then
    # llama.cpp wants a prompt; the last test counts.
    compare "gen $generate" 512 --prompt 1 --gen "$generate"
fi

processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
{
    printf '{ "file": "%s", "processor": "%s", "cores": %s, "threads": %s, "pairs": %s,\n' \
        "$(basename "$file")" "${processor:-unknown}" "$(nproc)" "$threads" "$pairs"
    printf '"llama": "%s",\n"redlite": "%s",\n"results": [\n' \
        "$("$oracle" info 2>/dev/null | sed -n '1s/^library *//p' | tr -d '"\\')" "$("$redlite" --version)"
    cat "$work/all"
    echo ']}'
} >"$output"
echo "all samples: $output"
