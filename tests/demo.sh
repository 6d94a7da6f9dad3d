#!/bin/sh
# `make demo`: the trained model of tests/data/model, decoded by stock llama.cpp three times: with everything resident and without hotset, through
# a quarter of the slots, and once more with the two policies that trade exactness for reads. Fails where the first two
# do not agree in every bit of every logit.
#
# HOTSET_DEMO_TOKENS (100), HOTSET_DEMO_SLOTS (16 of 64), HOTSET_DEMO_PROMPT (a file; default: the first of the model's prompts)
set -eu
cd "$(dirname "$0")/.."
export LC_ALL=C

tokens=${HOTSET_DEMO_TOKENS:-100}
slots=${HOTSET_DEMO_SLOTS:-16}
data=tests/data/model
[ -e $data/tiny-moe-q2_0.gguf ] || data=${HOTSET_SHARED:-../shared}/model
model=$data/tiny-moe-q2_0.gguf
[ -e "$model" ] || { echo "demo: no model at tests/data/model/tiny-moe-q2_0.gguf" >&2; exit 1; }
out=target/demo
llama=target/llama/release/hotset-llama

sh tests/setup.sh
mkdir -p $out
echo "building hotset, and llama.cpp with it (the first time takes minutes: 9 on two cores) ..."
for target in build llama; do
    # cargo's progress for who watches; otherwise quiet where it works, everything where it does not
    if [ -t 2 ]; then
        make $target >/dev/null
    elif ! make $target >$out/build.log 2>&1; then
        cat $out/build.log >&2
        exit 1
    fi
done

if [ -n "${HOTSET_DEMO_PROMPT:-}" ]; then
    cp "$HOTSET_DEMO_PROMPT" $out/prompt.txt
else
    # up to the first line of %%, without the newline before it
    printf '%s' "$(sed '/^%%$/,$d' "$data/prompts.txt")" >$out/prompt.txt
fi

# run NAME ARGUMENTS: a run, whose JSON object goes to $out/NAME.json in one line
run() {
    name=$1
    shift
    if ! "$llama" decode -m "$model" -f $out/prompt.txt -n "$tokens" --threads 1 --json "$@" >$out/raw.json 2>$out/$name.log; then
        echo "demo: hotset-llama decode $* failed:" >&2
        tail -n 20 $out/$name.log >&2
        exit 1
    fi
    tr -d '\n' <$out/raw.json >$out/$name.json
    echo >>$out/$name.json
    rm $out/raw.json
}

# get NAME KEY: a number or a string of the run's object. Inside of a string a quote is \", so "key": is found nowhere else
get() {
    value=$(sed -nE 's/.*"'"$2"'" *: *("(([^"\\]|\\.)*)"|[^][{},"]*).*/\1/p' $out/"$1".json | sed -E 's/^"(.*)"$/\1/; s/ +$//')
    printf '%s' "${value:-0}"
}

# how many tokens were decoded: the object has a number, or the list of them
decoded() {
    sed -nE 's/.*"tokens" *: *(\[[^]]*\]|[0-9]+).*/\1/p' $out/"$1".json | awk '/^\[/ { print gsub(/[0-9]+/, ""); next } { print }'
}

run resident --no-hook
run slots --slots "$slots" --trace $out/demo.q4rt --metrics $out/demo.jsonl
run policies --slots "$slots" --lambda .12 --drop .75

# row TITLE NAME
row() {
    text=equal
    [ "$(get "$2" text)" = "$(get resident text)" ] || text=other
    logits=equal
    [ "$(get "$2" logits_fnv)" = "$(get resident logits_fnv)" ] || logits=other
    awk -v title="$1" -v text=$text -v logits=$logits -v hook="$([ "$2" = resident ] || echo 1)" -v speed="$(get "$2" tok_s)" -v n="$(decoded "$2")" \
        -v hits="$(get "$2" hits)" -v misses="$(get "$2" misses)" -v bytes="$(get "$2" bytes_read)" \
        -v dropped="$(get "$2" dropped)" -v swapped="$(get "$2" swapped)" 'BEGIN {
            all = hits + misses + dropped
            if (!hook) printf "%-30s %6s %7s %8.1f %8s %9s %8s %8s\n", title, "-", "-", speed, "-", "-", "-", "-"
            else printf "%-30s %6s %7s %8.1f %7.1f%% %9.3f %8d %8d\n", title, text, logits, speed, all ? 100 * hits / all : 0, n ? bytes / n / 1e6 : 0, dropped, swapped
        }'
}

echo
echo "prompt: $(cat $out/prompt.txt)"
echo "decoded, $(decoded slots) tokens through $slots slots for 64 experts:"
printf '%b\n' "$(get slots text | sed 's/\\"/"/g; s/\\u[0-9a-f]\{4\}/?/g')" | sed 's/^/    /'
echo
printf '%-30s %6s %7s %8s %8s %9s %8s %8s\n' run text logits tok/s hits MB/token dropped swapped
row "resident, without hotset" resident
row "$slots slots" slots
row "$slots slots, lambda .12, F .75" policies
echo
echo "io: $(get slots io_mode), backing: $(get slots backing). hits: of the experts that were routed to. MB/token: read from the file."
echo "lambda and F read less and decode another text: .12 and .75 are not recommendations, see README.md"
echo "trace of the second run:   $out/demo.q4rt ($(get slots recorded_tokens) tokens), its sidecar $out/demo.q4rt.json"
echo "metrics, a line a token:   $out/demo.jsonl"

if [ "$(get slots logits_fnv)" = 0 ] || [ "$(get slots logits_fnv)" != "$(get resident logits_fnv)" ]; then
    echo "demo: FAILED: the logits through slots ($(get slots logits_fnv)) are not those of the resident run ($(get resident logits_fnv))" >&2
    exit 1
fi
[ -s $out/demo.q4rt ] || { echo "demo: FAILED: no trace was written" >&2; exit 1; }
