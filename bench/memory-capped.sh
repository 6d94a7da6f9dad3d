#!/bin/sh
# What the whole is for: a model larger than the memory that it may have. One script, one run, all sides: stock llama.cpp on its mapped
# file, the mapped file with hotset's hints (page-cache backing: WILLNEED of the routed experts at each layer, dense weights locked), and
# experts in slots, waited for by the layer, by projection, and inside of the matmuls of a patched engine; with a pack, and reading ahead.
# Routing is that of a trace (fitted to the target's published figures), the same in every run. Runs alternate, each in a memory cgroup
# of its own, the model dropped from the page cache before.
#
#     bench/memory-capped.sh [ROUNDS] [LIMIT] [SLOTS]     (3, 512M, 113)
#
# HOTSET_BENCH_DIR: where the 1.5 GB model and its pack are made and kept (target/bench). HOTSET_BENCH_TOKENS: measured tokens a run (100)
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-3}
limit=${2:-512M}
slots=${3:-113}
dir=${HOTSET_BENCH_DIR:-target/bench}
tokens=${HOTSET_BENCH_TOKENS:-100}
model=$dir/target-2l.gguf
pack=$dir/target-2l.hotset
trace=$dir/route-2l.q4rt
stock=target/llama/release/hotset-llama
fork=target/llama-fork/release/hotset-llama

# ---- a memory limit, or the word that there is none ----
v1=/sys/fs/cgroup/memory
v2=/sys/fs/cgroup
group=
if [ -d $v1 ] && mkdir "$v1/hotset-$$" 2>/dev/null; then
    group=$v1/hotset-$$ file=memory.limit_in_bytes
elif [ -e $v2/cgroup.controllers ] && mkdir "$v2/hotset-$$" 2>/dev/null; then
    group=$v2/hotset-$$ file=memory.max
fi
if [ -z "$group" ] || ! echo "$limit" >"$group/$file" 2>/dev/null; then
    [ -z "$group" ] || rmdir "$group"
    echo "memory-capped.sh: no memory cgroup can be made here (it takes root, or a delegated group): nothing is measured" >&2
    exit 1
fi
rmdir "$group"
trap '[ ! -d "$group" ] || rmdir "$group" 2>/dev/null || true' EXIT

mkdir -p "$dir"
make build llama llama-fork >/dev/null
[ -e "$model" ] || target/release/hotset tiny --preset target-2l -o "$model"
[ -e "$pack" ] || target/release/hotset pack "$model" -o "$pack"
[ -e "$trace" ] || target/release/hotset trace synth --preset qwen4exp --layers 2 --tokens 1024 "$trace" >/dev/null

# one NAME PROGRAM FLAGS...: a line of NAME, ms a token, ms waited for reads a token, digest of the logits
one() {
    name=$1 program=$2
    shift 2
    for cached in "$model" "$pack"; do
        dd of="$cached" oflag=nocache conv=notrunc,fdatasync count=0 2>/dev/null
    done
    mkdir "$group"
    echo "$limit" >"$group/$file"
    sh -c 'echo $$ >"$1"; shift; exec "$@"' capped "$group/cgroup.procs" "$program" decode -m "$model" -p And --step -n "$((tokens + 40))" --warmup 40 \
        --ignore-eos --threads 1 --route "$trace" --json "$@" >"$dir/capped.json"
    rmdir "$group"
    number() { sed -nE "s/.*\"$1\" *: *\"?([0-9.a-f]+).*/\1/p" "$dir/capped.json"; }
    rate=$(number tok_s)
    # both of the measured tokens alone: the warm-up fills the cache, and waits longer
    echo "$name $(awk -v r="$rate" 'BEGIN { print 1000 / r }') $(number token_wait_ms) $(number logits_fnv)" |
        tee -a "$dir/capped.txt" | awk '{ printf "  %-12s %8.1f ms a token, %5.1f ms waited for reads, logits %s\n", $1, $2, $3, $4 }'
}

: >"$dir/capped.txt"
round=0
while [ $round -lt "$rounds" ]; do
    round=$((round + 1))
    echo "round $round of $rounds: $limit for $(wc -c <"$model") bytes of model, $slots slots a layer"
    one stock "$stock" --no-hook
    one mapped "$stock" --slots "$slots" --backing page-cache
    one layer "$stock" --slots "$slots" --wait layer
    one projection "$stock" --slots "$slots"
    one matmul "$fork" --slots "$slots" --fork
    one pack "$fork" --slots "$slots" --fork --pack "$pack"
    one ahead "$fork" --slots "$((slots - 8))" --fork --read-ahead 8
done

# ---- medians, and the two sides of each ratio ----
[ "$(awk '{ print $4 }' "$dir/capped.txt" | sort -u | wc -l)" = 1 ] || { echo "memory-capped.sh: the logits differ" >&2; exit 1; }
median() { awk -v n="$1" -v c="$2" '$1 == n { print $c }' "$dir/capped.txt" | sort -n | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }
base=$(median stock 2)
mapped=$(median mapped 2)
echo "medians of $rounds:"
for name in stock mapped layer projection matmul pack ahead; do
    echo "$name $(median $name 2) $(median $name 3)" | awk -v base="$base" -v mapped="$mapped" \
        '{ printf "  %-12s %8.1f ms a token = %5.2f tok/s: %.2f times stock, %.2f times mapped; %.1f ms a token waited for reads\n", $1, $2, 1000 / $2, base / $2, mapped / $2, $3 }'
done
echo "$(median layer 2) $(median layer 3) $(median projection 2) $(median projection 3) $(median matmul 2) $(median matmul 3)" | awk '{
    printf "hidden of the reads (waited by the layer: %.1f ms a token): by projection %.0f %%, in the matmuls %.0f %% (by what is waited); %.0f %% and %.0f %% (by the time of a token)\n",
        $2, 100 * ($2 - $4) / $2, 100 * ($2 - $6) / $2, 100 * ($1 - $3) / $2, 100 * ($1 - $5) / $2 }'
