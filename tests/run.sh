#!/bin/sh
# `make test`: everything that can be checked on this machine. Each step's whole output is in target/test-logs; here come
# its headline, its time, its counts, and the end of its log where it fails. A step that fails does not stop
# the others, but the run. The last lines say what was skipped, and why.
#
# HOTSET_SKIP_LLAMA=1    leaves out llama.cpp (its first build takes 9 minutes on two cores)
# HOTSET_SHARED          reference data that is not in the repository; tests that want it say "skipped:" without it
# HOTSET_LLAMA_RUSTFLAGS (-C target-cpu=native)
set -u
cd "$(dirname "$0")/.." || exit 1

root=$PWD
logs=$root/target/test-logs
rm -rf "$logs"
mkdir -p "$logs"
failed=
number=0
begun=$(date +%s)
llama_flags=${HOTSET_LLAMA_RUSTFLAGS:--C target-cpu=native}
export RUST_BACKTRACE="${RUST_BACKTRACE:-0}" CARGO_TERM_COLOR=never

minutes() { awk -v s="$1" 'BEGIN { if (s < 60) printf "%d s", s; else printf "%d min %02d s", s / 60, s % 60 }'; }

# step NAME HEADLINE COMMAND...: its status is the command's
step() {
    name=$1
    headline=$2
    shift 2
    number=$((number + 1))
    log=$logs/$(printf '%02d' $number)-$name.log
    printf '%2d. %s ... ' $number "$headline"
    from=$(date +%s)
    "$@" >"$log" 2>&1 </dev/null
    status=$?
    took=$(minutes $(($(date +%s) - from)))
    if [ $status = 0 ]; then
        echo "ok, $took"
        awk '/^test result:/ { passed += $4; ignored += $8; n++ }
             END { if (n) printf "    %d tests passed%s\n", passed, ignored ? ", " ignored " ignored" : "" }' "$log"
    else
        echo "FAILED ($status), $took"
        failed="$failed $name"
        # what the failed tests said; for anything else the end of the log
        sed -n 's/^test \(.*\) \.\.\. FAILED$/    failed: \1/p' "$log"
        if grep -q '^failures:$' "$log"; then
            awk '/^failures:$/ { on = 1 } /^test result:/ { on = 0 } on && NF' "$log" | head -n 80
        else
            tail -n 50 "$log"
        fi | sed 's/^/    | /'
        echo "    all of it: ${log#"$root"/}"
    fi
    return $status
}

# ---- steps of more than one command ----

# what an engine links depends on these crates and on what they need themselves, here and on Apple silicon
lean_dependencies() {
    for target in "" aarch64-apple-darwin; do
        # shellcheck disable=SC2086
        cargo tree --package hotset --no-default-features --edges normal --depth 1 --prefix none --format '{p}' ${target:+--target $target} >"$logs/tree" || return 1
        extra=$(awk 'NR > 1 && $1 !~ /^(crossbeam(-.*)?|half|libc|memmap2|parking_lot(_core)?|serde_json)$/ { print $1 }' "$logs/tree")
        if [ -n "$extra" ]; then
            # shellcheck disable=SC2086
            echo "the library without features depends on more than it may${target:+ for $target}:" $extra
            return 1
        fi
    done
    cargo tree --package hotset --no-default-features --edges normal
}

lean_library() {
    cargo build --release --lib --no-default-features || return 1
    archive=${CARGO_TARGET_DIR:-target}/release/libhotset.a
    [ -s "$archive" ] || { echo "no $archive"; return 1; }
    ls -l "$archive"
}

docs() { RUSTDOCFLAGS="-D warnings" cargo doc --no-deps; }

# one folder, profile and set of flags for all that has llama.cpp in it, so that it is built once
llama() {
    command=$1
    shift
    RUSTFLAGS=$llama_flags cargo "$command" --release --package hotset-llama --target-dir target/llama "$@"
}

# ---- the run ----

step setup "what the build needs" sh tests/setup.sh || exit 1
step fmt "cargo fmt" cargo fmt --all --check
step clippy "clippy" cargo clippy --all-features --all-targets -- -D warnings
step clippy-lean "clippy, library only" cargo clippy --no-default-features --lib -- -D warnings
step test "tests of the library, the C ABI and the command line" cargo test --all-features --no-fail-fast -- --show-output
step lean "the library without features: libhotset.a" lean_library
step dependencies "its dependencies" lean_dependencies
step doc "cargo doc" docs
if [ "${HOTSET_SKIP_LLAMA:-}" = 1 ]; then
    echo "skipped: everything with llama.cpp in it: HOTSET_SKIP_LLAMA=1" >"$logs/llama-skipped.log"
else
    if step llama "llama.cpp, and hotset-llama" llama build; then
        step llama-clippy "clippy of hotset-llama" llama clippy --all-targets -- -D warnings
        step llama-test "tests with llama.cpp" llama test --no-fail-fast -- --show-output
    fi
    # the same tests, each with the waits inside of the patched engine's matmuls
    if step fork "llama.cpp with our patch" vendor/llama.cpp/fork.sh build; then
        step fork-test "the same tests with the patched engine" vendor/llama.cpp/fork.sh test --no-fail-fast -- --show-output
    fi
fi

echo
# a test's own word, and those marked #[ignore]
skipped=$(cat "$logs"/*.log | sed -n -e 's/^.*\(skipped: .*\)$/\1/p' -e 's/^test \(.*\) \.\.\. ignored\(, \)\{0,1\}\(.*\)$/skipped: \1: ignored \3/p' | sort -u)
if [ -n "$skipped" ]; then echo "$skipped"; else echo "nothing was skipped"; fi
echo
took=$(minutes $(($(date +%s) - begun)))
if [ -n "$failed" ]; then
    echo "FAILED after $took:$failed (logs: target/test-logs)"
    exit 1
fi
echo "all passed, $took (logs: target/test-logs)"
