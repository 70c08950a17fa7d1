#!/usr/bin/env bash
# The reference backend against llama.cpp, as one table.
#
#   scripts/oracle-parity.sh [--short] [--types LIST] [--keep]
#
#   --short        a minute instead of half an hour: the pocket model and two synthetic ones
#   --types LIST   only these expert types, separated by commas
#   --keep         leave the files made on the way, and say where
#
# Needs both programs, built with `cargo build --release` here and in oracle/; the environment variables REDLITE and
# ORACLE name others. Exit status: 0 all gates hold, 1 one does not, 2 something could not run.
#
# Parts and gates:
#
#   f32       Synthetic F32 models, every layout. Nothing is rounded, so relative RMS of the logits <= 1e-3.
#   layer     The pocket model with the experts of one layer in the type, the rest F32: each layer in turn, with a
#             stretch of the text of its own. Mean KL <= 1e-6 over all of them.
#   pocket    The experts of all layers in the type, the whole text unbroken. Mean KL <= 1e-4, or at most 3 times
#             that of llama.cpp with itself ("itself": one token at a time against 512).
#   synth     Quantised synthetic models: reported, not gated; near-tied routing amplifies every rounding.
#
# Why two parts for a type. Rounding activations to 8 bits makes a step of 1 % out of a difference of 1e-7 whenever a
# value lies at the edge of two integers. A step in one layer makes many in the next, and what one position does,
# attention and state hand to all later ones: after a few layers and some dozen positions the roundings of two
# computations that differ in the order of their sums alone have nothing in common, and their KL is that of the
# rounding noise itself. llama.cpp is no nearer to itself. With one rounded layer there is nothing to amplify, and
# what remains shows whether the rounding is the right one: 1e-8 if so, 2e-5 to 6e-4 without it.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
redlite=${REDLITE:-${CARGO_TARGET_DIR:-$root/target}/release/redlite}
oracle=${ORACLE:-${CARGO_TARGET_DIR:-$root/oracle/target}/release/redlite-oracle}
types=IQ1_M,IQ2_XXS,IQ2_XS,IQ3_XXS,IQ3_S,Q2_K,Q3_K,Q4_K,IQ4_XS,IQ4_NL,MXFP4,Q8_0,IQ1_S,IQ2_S,Q4_0,Q4_1,Q5_0,Q5_1,Q5_K,Q6_K
short= keep=
while (($#)); do
    case $1 in
        --short) short=1 ;;
        --types) types=${2:?a list of types}; shift ;;
        --keep) keep=1 ;;
        -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        *) echo "$0: unknown argument $1; see --help" >&2; exit 2 ;;
    esac
    shift
done
for program in "$redlite" "$oracle"; do
    [[ -x $program ]] || { echo "$program is missing: cargo build --release" >&2; exit 2; }
done

work=$(mktemp -d)
clean() { [[ $keep ]] && echo "files are in $work" || rm -rf "$work"; }
trap clean EXIT
cd "$work"

# Runs a command quietly; shows what it said, and ends, if it fails.
quiet() {
    "$@" >said 2>&1 || { echo "failed: $*" >&2; tail -n 5 said >&2; exit 2; }
}

# logits MODEL IDS OUTPUT OPTION...: by llama.cpp; on one thread, for its threads wait for one another busily.
logits() { quiet "$oracle" logits "$1" --tokens "$2" -o "$3" --threads 1 "${@:4}"; }

# compare MODEL A B IDS: the JSON of `redlite parity`, which gates nothing here.
compare() {
    "$redlite" parity "$1" "$2" "$3" --tokens "$4" --limit 1000000 --kv f32 --json \
        --max-kl 1e9 --min-top1 0 2>said || { echo "failed: redlite parity $*" >&2; tail -n 5 said >&2; exit 2; }
}

# field NAME JSON; what is no number is beyond every limit.
field() { sed -n "s/.*\"$1\":\([^,}]*\).*/\1/p" <<<"$2" | sed 's/null\|inf\|.*nan.*/1e999/'; }

# holds EXPRESSION: arithmetic of floating-point numbers.
holds() { awk "BEGIN { exit !($1) }"; }

failed=0
row() { printf '%-8s %-30s %9s %9s %9s %9s %8s %9s  %s\n' "$@"; }

# report PART NAME JSON ITSELF VERDICT
report() {
    row "$1" "$2" "$(field positions "$3")" "$(printf %.2e "$(field logits_relative_rms "$3")")" \
        "$(printf %.2e "$(field kl_mean "$3")")" "$(printf %.2e "$(field kl_max "$3")")" \
        "$(awk "BEGIN { printf \"%.2f %%\", 100 * $(field top1 "$3") }")" "$4" "$5"
}

# verdict EXPRESSION: sets $verdict and counts failures.
verdict() {
    verdict=passed
    holds "$1" || { verdict=FAILED; failed=1; }
}

# Synthetic models: small, all sizes unlike one another, two value heads for every key head.
shape="--layers 8 --hidden 256 --vocab 1024 --context 4096 --heads 4 --kv-heads 2 --head-dim 64 --rope-dims 16
    --key-heads 2 --value-heads 4 --state-dim 64 --expert-count 16 --experts-used 4 --expert-width 256 --shared-width 512"
synthetic() { # FILE OPTION...
    # shellcheck disable=SC2086 # words
    quiet "$redlite" synth "$1" $shape --seed 7 -q "${@:2}"
}
awk 'BEGIN { x = 1; for (i = 0; i < 320; i++) { x = (x * 16807) % 2147483647; print x % 1000 } }' >random.ids

f32() { # NAME OPTION...
    synthetic model.gguf --recipe f32 "${@:2}"
    logits model.gguf random.ids base.npy
    local result
    result=$(compare model.gguf reference base.npy random.ids)
    verdict "$(field logits_relative_rms "$result") <= 1e-3"
    report f32 "$1" "$result" - "$verdict"
}

synth() { # NAME OPTION...
    synthetic model.gguf "${@:2}"
    logits model.gguf random.ids base.npy
    logits model.gguf random.ids other.npy --ubatch 1
    local result own
    result=$(compare model.gguf reference-llama base.npy random.ids)
    own=$(itself model.gguf random.ids)
    report synth "$1" "$result" "$own" reported
}

# itself MODEL IDS: mean KL of base.npy and other.npy.
itself() {
    local result
    result=$(compare "$1" base.npy other.npy "$2") || exit 2
    printf %.2e "$(field kl_mean "$result")"
}

# unbroken NAME MODEL IDS: the part `pocket`.
unbroken() {
    logits "$2" "$3" base.npy
    logits "$2" "$3" other.npy --ubatch 1
    local result own
    result=$(compare "$2" reference-llama base.npy "$3")
    own=$(itself "$2" "$3")
    verdict "$(field kl_mean "$result") <= 1e-4 || $(field kl_mean "$result") <= 3 * $own"
    report pocket "$1" "$result" "$own" "$verdict"
}

# layers TYPE LAYER...: the part `layer`; the layers' results become one.
layers() {
    local type=$1 layer result all=()
    for layer in "${@:2}"; do
        quiet "$oracle" quantize pocket-f32.gguf model.gguf --experts F32 --dense F32 \
            --tensor "blk.$layer.ffn_gate_exps=$type" --tensor "blk.$layer.ffn_up_exps=$type" \
            --tensor "blk.$layer.ffn_down_exps=$type"
        logits model.gguf "text.$layer.ids" base.npy
        result=$(compare model.gguf reference-llama base.npy "text.$layer.ids")
        all+=("$result")
    done
    result=$(for json in "${all[@]}"; do
        echo "$(field positions "$json") $(field kl_mean "$json") $(field kl_max "$json") $(field top1 "$json")" \
            "$(field logits_relative_rms "$json")"
    done | awk '{ n += $1; kl += $1 * $2; top += $1 * $4; rms += $1 * $5 * $5; if ($3 > most) most = $3 }
        END { printf "{\"positions\":%d,\"kl_mean\":%.6e,\"kl_max\":%.6e,\"top1\":%.6f,\"logits_relative_rms\":%.6e}",
              n, kl / n, most, top / n, sqrt(rms / n) }')
    verdict "$(field kl_mean "$result") <= 1e-6"
    report layer "experts $type" "$result" - "$verdict"
}

pocket=$root/models/pocket.gguf
cat "$root"/scripts/fixtures/*.py "$root"/crates/engine/src/*.rs >text
"$redlite" tokenize "$pocket" -f text --json >text.json || { echo "failed: redlite tokenize" >&2; exit 2; }
tr -d '[] \n' <text.json | tr ',' '\n' | sed -n 1,2048p >text.ids
[[ $(wc -l <text.ids) -ge 2048 ]] || { echo "the text has fewer than 2048 tokens" >&2; exit 2; }
for layer in {0..7}; do
    sed -n "$((layer * 256 + 1)),$((layer * 256 + 256))p" text.ids >"text.$layer.ids"
done
quiet "$redlite" quantize "$pocket" pocket-f32.gguf --experts F32 --dense F32 -q

"$oracle" info
echo
row part file positions "rel. RMS" "mean KL" "max KL" top-1 itself gate
if [[ $short ]]; then
    f32 "split layout" --mtp
    f32 "fused layout, tied" --legacy-layout --tied
    layers IQ3_XXS 0 7
    unbroken "pocket.gguf as it is" "$pocket" text.0.ids
else
    f32 "split layout"
    f32 "split layout, tied" --tied
    f32 "split layout, MTP block" --mtp
    f32 "fused layout" --legacy-layout
    f32 "fused layout, tied" --legacy-layout --tied
    f32 "fused layout, tied, MTP block" --legacy-layout --tied --mtp
    unbroken "pocket.gguf as it is" "$pocket" text.ids
    for type in ${types//,/ }; do
        layers "$type" {0..7}
        quiet "$oracle" quantize pocket-f32.gguf typed.gguf --experts "$type" --dense F32
        unbroken "experts $type" typed.gguf text.ids
    done
    for recipe in iq2xxs f2 iq3xxs; do
        synth "recipe $recipe" --recipe "$recipe"
    done
    for type in Q8_0 Q4_K MXFP4; do
        synth "all $type" --type "$type"
    done
fi
echo
if ((failed)); then
    echo "a gate does not hold"
    exit 1
fi
echo "all gates hold"
