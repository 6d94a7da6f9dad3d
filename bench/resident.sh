#!/bin/sh
# Both sides in one go: stock llama.cpp with everything resident, and the same through the hook with a slot for every expert, on a model
# with the target's expert size. Runs alternate, since the machine's mood changes; prints each and the ratio of medians.
#
#     bench/resident.sh [RUNS]      (5)     HOTSET_BENCH_DIR: where the 1.5 GB model is made and kept (target/bench)
set -eu
cd "$(dirname "$0")/.."
runs=${1:-5}
dir=${HOTSET_BENCH_DIR:-target/bench}
model=$dir/target-2l.gguf
llama=target/llama/release/hotset-llama
mkdir -p "$dir"
make build llama >/dev/null
[ -e "$model" ] || target/release/hotset tiny --preset target-2l -o "$model"

one() { # the median time of a token, in ms
    "$llama" decode -m "$model" -p "And God said" -n 400 --warmup 200 --ignore-eos --threads 1 --json "$@" |
        sed -nE 's/.*"token_ms_p50" *: *([0-9.]+).*/\1/p'
}
median() { sort -n | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

: >"$dir/stock.ms"
: >"$dir/hook.ms"
: >"$dir/recording.ms"
one --no-hook >/dev/null # the file into the page cache
i=0
while [ $i -lt "$runs" ]; do
    i=$((i + 1))
    stock=$(one --no-hook)
    hook=$(one --slots 512)
    recording=$(one --slots 512 --lambda 0.12 --trace "$dir/bench.q4rt")
    echo "$stock" >>"$dir/stock.ms"
    echo "$hook" >>"$dir/hook.ms"
    echo "$recording" >>"$dir/recording.ms"
    echo "run $i: stock $stock ms a token, hook $hook ms, hook recording at lambda .12 $recording ms"
done
s=$(median <"$dir/stock.ms")
h=$(median <"$dir/hook.ms")
r=$(median <"$dir/recording.ms")
echo "$s $h $r" | awk '{ printf "medians: stock %s ms, hook %s ms, recording %s ms; hook runs at %.1f %% of stock, recording at %.1f %%\n", $1, $2, $3, 100 * $1 / $2, 100 * $1 / $3 }'
