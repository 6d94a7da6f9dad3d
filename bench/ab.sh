#!/bin/sh
# A whole experiment on the trained model, with slots few enough to matter: F 0, .5, .75, 1 with lambda 0 and .12, planned, run, analysed; what each
# of the eight costs in quality; and both on one page. The engine steps through a text, so every token meets its cell.
#
#     bench/ab.sh [TOKENS]     (24000, at least 5120)     HOTSET_AB_SLOTS (12 of 64), HOTSET_AB_BYTES of text for the quality (6000),
#                                          HOTSET_AB_DIR: where everything goes (target/bench/ab), made anew
# The machine is to do nothing else meanwhile. bench/llama/tests/experiment.rs is the short form, as a test.
set -eu
cd "$(dirname "$0")/.."
tokens=${1:-24000}
slots=${HOTSET_AB_SLOTS:-12}
bytes=${HOTSET_AB_BYTES:-6000}
dir=${HOTSET_AB_DIR:-target/bench/ab}
model=tests/data/model/tiny-moe-q2_0.gguf
text=tests/data/model/heldout.txt
llama=target/llama/release/hotset-llama
hotset=${CARGO_TARGET_DIR:-target}/release/hotset
make build llama >/dev/null
rm -rf "$dir"
mkdir -p "$dir"

# the model's tokens are bytes: as many times the text as the plan has tokens
while [ "$(cat "$dir/text" 2>/dev/null | wc -c)" -le "$tokens" ]; do cat "$text" >>"$dir/text"; done
"$hotset" ab plan --drop 0,0.5,0.75,1 --lambda 0,0.12 --tokens "$tokens" -o "$dir/plan.json"
"$hotset" ab run --plan "$dir/plan.json" --out "$dir/run" -- \
    "$llama" perplexity -m "$model" -f "$dir/text" --bytes "$((tokens + 1))" --slots "$slots" --threads 1
echo
"$llama" quality -m "$model" -f "$text" --bytes "$bytes" --slots "$slots" --plan "$dir/plan.json" --threads 1 --json >"$dir/quality.json"
"$hotset" ab report "$dir/run/run-1.csv" --plan "$dir/run/plan.json" --quality "$dir/quality.json" -o "$dir/report.html"
echo "the page: $dir/report.html; the log: $dir/run/run-1.csv"
