#!/bin/sh
# Builds, tests or checks hotset-llama with the patched engine: gets llama.cpp's sources from the crate that pins them, applies
# expert-rows.patch to a copy, and has cargo take that copy in the crate's place (a `paths` override, which leaves Cargo.lock as it is).
#
#     vendor/llama.cpp/fork.sh [build|test|clippy|run] [CARGO ARGS]     (build)
#
# The copy is in target/fork, what is built of it in target/llama-fork: the stock build in target/llama is not touched.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
command=${1:-build}
[ $# = 0 ] || shift
patch=$root/vendor/llama.cpp/expert-rows.patch
copy=$root/target/fork/llama-cpp-sys-2

crate=$(cargo metadata --format-version 1 --locked | tr ',' '\n' | sed -nE 's/^ *"manifest_path" *: *"(.*llama-cpp-sys-2-[^/"]*)\/Cargo\.toml".*/\1/p' | head -n 1)
[ -n "$crate" ] || { echo "fork.sh: cargo does not say where llama-cpp-sys-2 is" >&2; exit 1; }

# What the copy was made of; a cut-off or older copy is made anew.
made_of=$(basename "$crate" && cksum <"$patch")
if [ "$(cat "$copy/.made-of" 2>/dev/null || true)" != "$made_of" ]; then
    rm -rf "$copy"
    mkdir -p "$copy"
    cp -R "$crate/." "$copy"
    chmod -R u+w "$copy"
    patch --quiet --batch -p1 -d "$copy/llama.cpp" <"$patch" ||
        { echo "fork.sh: $patch does not fit $(basename "$crate"): see vendor/llama.cpp/README.md, 'Another version'" >&2; exit 1; }
    printf '%s\n' "$made_of" >"$copy/.made-of"
fi

RUSTFLAGS=${HOTSET_LLAMA_RUSTFLAGS:--C target-cpu=native} exec cargo "$command" --release --package hotset-llama --features fork \
    --config "paths=['$copy']" --target-dir target/llama-fork "$@"
