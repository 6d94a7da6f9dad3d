#!/bin/bash
# What this machine is not: Apple silicon, and aarch64 Linux.
#
#   tests/cross.sh mac   type-checks the library, the command line and their tests for aarch64-apple-darwin
#   tests/cross.sh arm   builds the root package's tests for aarch64 Linux and runs them under qemu
#   tests/cross.sh setup only fetches what the two need
#
# rustup's own targets are not needed: Debian's packages hold a compiler with std as source (built here for macOS, where nothing
# is ever linked) and with a ready std for arm64. They are unpacked into $CROSS_DIR; neither the Rust that is installed
# nor the system's package lists change. Where they cannot be had, this says "skipped: ..." and succeeds.
#
# CROSS_DIR         where the compiler is unpacked (default: ~/.cache/hotset-cross; about 1 GB)
# CARGO_TARGET_DIR  parent of the build folder "cross" (default: target)
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${CROSS_DIR:-$HOME/.cache/hotset-cross}
usr=$dir/root/usr
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/cross

skip() {
    echo "skipped: cross.sh $what: $*"
    exit 0
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# apt with a state of its own: package lists of both architectures in $dir, no `dpkg --add-architecture`
apt_here() {
    local tool=$1
    shift
    "$tool" -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Architecture=amd64 -o APT::Sandbox::User="$(id -un)" \
        -o Dir::State::Lists="$dir/lists" -o Dir::Cache="$dir/cache" -qq "$@"
}

newest() {
    apt_here apt-cache show --no-all-versions "$1"
}

compiler() {
    if [ -e "$dir/compiler-ready" ]; then return; fi
    [ "$(uname -sm)" = "Linux x86_64" ] || skip "made for x86_64 Linux, this is $(uname -sm)"
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || skip "no apt-get here; Debian's rustc-web is what it works with"
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/debs" "$dir/root"
    apt_here apt-get update >"$dir/log" 2>&1 || skip "apt-get update failed: $(tail -n 1 "$dir/log")"
    apt_here apt-cache show rustc-web >"$dir/log" 2>&1 || skip "this system's packages have no rustc-web"
    local std llvm # named after versions
    std=$(newest libstd-rust-web-dev:amd64 | sed -n 's/^Depends:.*\(libstd-rust-web-[0-9.]*[0-9]\).*/\1/p')
    llvm=$(newest "$std:amd64" | sed -n 's/^Depends:.*\(libllvm[0-9.]*[0-9]\).*/\1/p')
    [ -n "$std" ] && [ -n "$llvm" ] || skip "rustc-web's libraries have other names here ('$std', '$llvm')"
    (cd "$dir/debs" && rm -f ./*.deb && apt_here apt-get download rustc-web:amd64 "$llvm:amd64" "$std:amd64" \
        libstd-rust-web-dev:amd64 libstd-rust-web-dev:arm64 rust-web-src:all) >"$dir/log" 2>&1 ||
        skip "the compiler's packages could not be fetched: $(tail -n 1 "$dir/log")"
    local deb
    for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$dir/root"; done
    rm -rf "$dir/debs"
    touch "$dir/compiler-ready"
}

# the C side of arm: cross compiler, libc and emulator, ordinary packages of this machine
emulator() {
    if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null && [ -d /usr/aarch64-linux-gnu/lib ]; then return; fi
    as_root true 2>/dev/null || skip "gcc-aarch64-linux-gnu and qemu-user-static are not installed, and this user cannot install them"
    { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static; } >"$dir/log" 2>&1 ||
        skip "gcc-aarch64-linux-gnu and qemu-user-static could not be installed: $(tail -n 1 "$dir/log")"
}

# the unpacked compiler for the cargo that is installed
web() {
    unset RUSTC_WRAPPER RUSTFLAGS CARGO_ENCODED_RUSTFLAGS
    export RUSTC=$usr/bin/rustc RUSTDOC=$usr/bin/rustdoc LD_LIBRARY_PATH=$usr/lib/x86_64-linux-gnu
    echo "$("$RUSTC" --version), $(cargo --version)"
}

# cargo check links nothing, so a build script's C needs no Apple SDK: its objects and archives may be empty
no_c() {
    cat >"$dir/no-c" <<'CC'
#!/bin/sh
# a C compiler, and an ar, that make empty files
last=
for argument; do
    case $last:$argument in -o:* | *:*.a) : >"$argument" ;; esac
    last=$argument
done
CC
    chmod +x "$dir/no-c"
    export CC_aarch64_apple_darwin=$dir/no-c CXX_aarch64_apple_darwin=$dir/no-c AR_aarch64_apple_darwin=$dir/no-c SDKROOT=/nonexistent
}

mac() {
    if [ "$(uname -sm)" = "Darwin arm64" ]; then skip "this is Apple silicon: the build itself is the check"; fi
    compiler
    web
    no_c
    # RUSTC_BOOTSTRAP: -Zbuild-std in a stable cargo
    RUSTC_BOOTSTRAP=1 cargo check --quiet --package hotset --all-targets -Zbuild-std=std,test --target aarch64-apple-darwin
    RUSTC_BOOTSTRAP=1 cargo check --quiet --package hotset --lib --no-default-features -Zbuild-std=std,test --target aarch64-apple-darwin
    echo "cross.sh mac: library, command line and tests type-check for aarch64-apple-darwin"
}

arm() {
    if [ "$(uname -sm)" = "Linux aarch64" ]; then skip "this is aarch64 Linux: the tests themselves are the check"; fi
    compiler
    emulator
    web
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
    # a program that a test starts would be run by the kernel, not by the emulator: the tests put this before it
    export HOTSET_TEST_RUNNER=$CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER
    cargo test --quiet --no-fail-fast --package hotset --target aarch64-unknown-linux-gnu -- "$@"
    echo "cross.sh arm: the root package's tests ran for aarch64-unknown-linux-gnu under qemu"
}

what=${1:-}
shift || true
case $what in
mac | arm) "$what" "$@" ;;
setup) compiler && emulator ;;
*)
    echo "usage: tests/cross.sh mac | arm [test arguments] | setup" >&2
    exit 2
    ;;
esac
