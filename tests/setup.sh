#!/bin/sh
# Looks for what the build needs besides Rust, and installs what is missing with apt-get (Debian, Ubuntu) or brew
# (macOS). Silent where nothing is missing. Where it cannot install, it says what to install and fails.
#
# For: cc, c++   the C host of the tests, llama.cpp
#      cmake     llama.cpp
#      libclang  bindings made from C headers: llama.cpp's, and the test that compares hotset's own
#      chromium  the tests that look at reports in a browser. Only Debian has it as a plain package: elsewhere, and where none
#                is found, those tests say that they are skipped
set -u

have() { command -v "$1" >/dev/null 2>&1; }

# bindgen's own search, in short: LIBCLANG_PATH, llvm-config, the usual folders
have_libclang() {
    for folder in "${LIBCLANG_PATH:-}" /usr/lib/llvm-*/lib /usr/lib /usr/lib64 /usr/lib/*-linux-gnu /usr/local/lib /usr/local/llvm*/lib \
        /opt/homebrew/opt/llvm/lib /usr/local/opt/llvm/lib /Library/Developer/CommandLineTools/usr/lib \
        /Applications/Xcode.app/Contents/Developer/Toolchains/XcodeDefault.xctoolchain/usr/lib; do
        [ -n "$folder" ] || continue
        for file in "$folder"/libclang.so "$folder"/libclang.so.* "$folder"/libclang-[0-9]*.so "$folder"/libclang-[0-9]*.so.* "$folder"/libclang.dylib; do
            if [ -e "$file" ]; then return 0; fi
        done
    done
    if have llvm-config; then
        folder=$(llvm-config --libdir 2>/dev/null)
        for file in "$folder"/libclang.so* "$folder"/libclang.dylib; do
            if [ -e "$file" ]; then return 0; fi
        done
    fi
    return 1
}

# libclang finds stddef.h in the folder of the compiler's own headers, which Debian's libclang alone does not bring
have_clang_headers() {
    if [ "$(uname -s)" = Darwin ]; then return 0; fi
    for file in /usr/lib/llvm-*/lib/clang/*/include/stddef.h /usr/lib/clang/*/include/stddef.h /usr/lib64/clang/*/include/stddef.h /usr/local/lib/clang/*/include/stddef.h; do
        if [ -e "$file" ]; then return 0; fi
    done
    have clang
}

have_browser() {
    [ -n "${HOTSET_CHROMIUM:-}" ] || have chromium || have chromium-browser || have google-chrome || have google-chrome-stable
}

is_debian() { [ -r /etc/os-release ] && grep -qx 'ID=debian' /etc/os-release; }

# the gaps, as words that each package manager translates
gaps() {
    # on macOS cc is there without Apple's tools too, and then only offers to install them
    if [ "$(uname -s)" = Darwin ]; then xcode-select -p >/dev/null 2>&1 || echo compiler; fi
    have cc && have c++ || echo compiler
    have cmake || echo cmake
    have_libclang && have_clang_headers || echo libclang
    have python3 || echo python3
    if is_debian; then have_browser || echo chromium; fi
}

if ! have cargo; then
    if [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
        echo "cargo is in ${CARGO_HOME:-$HOME/.cargo}/bin, which is not in PATH: add it" >&2
    else
        echo "cargo is missing: install Rust 1.85 or newer with rustup, https://rustup.rs" >&2
    fi
    exit 1
fi

missing=$(gaps | sort -u)
[ -n "$missing" ] || exit 0

packages=
if [ "$(uname -s)" = Darwin ]; then
    manager=brew
    for gap in $missing; do
        case $gap in
        compiler)
            # Apple's own tools: their installer opens a window, so it is for the user to start
            echo "no C and C++ compiler: run 'xcode-select --install', then this again" >&2
            exit 1
            ;;
        libclang) packages="$packages llvm" ;;
        *) packages="$packages $gap" ;;
        esac
    done
    command="brew install$packages"
elif have apt-get; then
    manager=apt-get
    for gap in $missing; do
        case $gap in
        compiler) packages="$packages build-essential" ;;
        libclang) packages="$packages clang libclang-dev" ;;
        *) packages="$packages $gap" ;;
        esac
    done
    command="sudo apt-get install$packages"
else
    # shellcheck disable=SC2086
    echo "missing: $(echo $missing). Install a C and C++ compiler, cmake, libclang (with clang's headers) and python3 with this system's package manager" >&2
    exit 1
fi

cannot() {
    echo "$1. Run: $command" >&2
    exit 1
}

log=${TMPDIR:-/tmp}/hotset-setup.$$.log
trap 'rm -f "$log"' EXIT
echo "installing:$packages"
# shellcheck disable=SC2086
if [ $manager = brew ]; then
    have brew || cannot "Homebrew is missing, so nothing can be installed from here"
    brew install $packages >"$log" 2>&1 </dev/null || { tail -n 5 "$log" >&2; cannot "brew failed"; }
else
    root=
    if [ "$(id -u)" != 0 ]; then
        if have sudo && sudo -n true 2>/dev/null; then root="sudo -n"; else cannot "root is needed to install$packages"; fi
    fi
    # a fresh machine's lists are old or absent
    $root apt-get update -qq >"$log" 2>&1 </dev/null || echo "apt-get update failed, trying with the lists that are there: $(tail -n 1 "$log")" >&2
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >"$log" 2>&1 </dev/null || { tail -n 5 "$log" >&2; cannot "apt-get failed"; }
fi

missing=$(gaps | sort -u)
# shellcheck disable=SC2086
[ -z "$missing" ] || { echo "still missing after the installation: $(echo $missing)" >&2; exit 1; }
