#!/bin/sh
# Replays one trace by the reference (python3 replay_moe_cache.py) and by `hotset replay`, compares what they print, and prints both times
# and their ratio. The trace: the argument, or one that bench/replay.rs makes (48 layers x 512 experts, 64 candidates).
#
#   bench/replay_vs_reference.sh [TRACE]
#
# HOTSET_SHARED   where reference/replay_moe_cache.py is (../shared)
# HOTSET_BENCH_TOKENS (2048) tokens of the trace that is made; REPLAY_FLAGS: further flags for both, such as "--k-used 8 --cache-cap 24"
set -eu
cd "$(dirname "$0")/.."
script=${HOTSET_SHARED:-../shared}/reference/replay_moe_cache.py
if ! [ -f "$script" ] || ! command -v python3 >/dev/null; then
    echo "skipped: python3 and $script are needed"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release --quiet
hotset=${CARGO_TARGET_DIR:-target}/release/hotset
trace=${1:-}
if [ -z "$trace" ]; then
    trace=$work/made.q4rt
    HOTSET_BENCH_TOKENS=${HOTSET_BENCH_TOKENS:-2048} HOTSET_BENCH_WRITE=$trace cargo bench --quiet --bench replay
fi
now() { date +%s%N; }

# What the reference takes before it replays: starting, and unpacking the trace into Python's numbers.
begin=$(now)
python3 "$script" --trace "$trace" --policies "" ${REPLAY_FLAGS:-} >/dev/null
unpack=$(($(now) - begin))

# way NAME FLAGS...
way() {
    name=$1
    shift
    begin=$(now)
    # shellcheck disable=SC2086
    python3 "$script" --trace "$trace" "$@" ${REPLAY_FLAGS:-} >"$work/reference.json"
    slow=$(($(now) - begin))
    fast=
    for _ in 1 2 3; do
        begin=$(now)
        # shellcheck disable=SC2086
        "$hotset" replay "$trace" --json "$@" ${REPLAY_FLAGS:-} >"$work/hotset.json"
        took=$(($(now) - begin))
        if [ -z "$fast" ] || [ "$took" -lt "$fast" ]; then fast=$took; fi
    done
    python3 - "$work/reference.json" "$work/hotset.json" "$name" $slow $fast $unpack <<'END'
import json, sys
a, b = (json.load(open(p)) for p in sys.argv[1:3])
for policy in b["policies"].values():
    for extra in ("swapped_per_token", "substituted_slots_per_token"):
        policy.pop(extra, None)
slow, fast, unpack = (int(x) / 1e9 for x in sys.argv[4:7])
same = "same numbers" if a == b else "OTHER NUMBERS"
print(f"{sys.argv[3]:<22} reference {slow:8.2f} s ({slow - unpack:.2f} s without unpacking)   hotset {fast:7.3f} s   "
      f"{slow / fast:6.0f} x ({(slow - unpack) / fast:.0f} x)   {same}")
sys.exit(a != b)
END
}
echo "$(wc -c <"$trace" | tr -d ' ') bytes; whole runs, one thread each, hotset's best of 3"
way "lru" --policies lru
way "lru + lambda 0.12" --policies lru --lambda-moce 0.12
way "the six policies"
