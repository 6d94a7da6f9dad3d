# hotset. `make` lists the targets. Plain make: no GNU extensions.

CARGO = cargo
LLAMA = --release -p hotset-llama --target-dir target/llama
# llama.cpp takes its vector instructions from Rust's target features. Its own folder, so that these flags rebuild nothing else
LLAMA_RUSTFLAGS = -C target-cpu=native

.PHONY: help setup build lib llama llama-fork demo test bench fmt lint cross clean

help:
	@echo 'make demo    install what is missing, build, decode a small MoE model with a cache smaller than its experts,'
	@echo '             and compare with the resident run'
	@echo 'make test    everything that can be checked on this machine, and what was skipped'
	@echo 'make build   the library and the command line: target/release'
	@echo 'make lib     only what an engine links: libhotset.a (FEATURES=io-uring: with reads by an io_uring)'
	@echo 'make llama   stock llama.cpp with hotset in it: target/llama/release/hotset-llama'
	@echo 'make llama-fork   the same with the patched engine: target/llama-fork/release/hotset-llama'
	@echo 'make setup   only install what is missing (cmake, a C++ compiler, libclang)'
	@echo 'make bench   measurements (criterion)'
	@echo 'make fmt     format;  make lint: format check and clippy'
	@echo 'make cross   type-check for macOS, run the tests for aarch64 Linux'
	@echo 'make clean   remove what was built'

setup:
	@sh tests/setup.sh

build:
	$(CARGO) build --release

# FEATURES=io-uring: reads by an io_uring too, on Linux
lib:
	$(CARGO) build --release --lib --no-default-features $(if $(FEATURES),--features $(FEATURES))
	@echo "$${CARGO_TARGET_DIR:-target}/release/libhotset.a, to be included with -Iinclude"

llama:
	RUSTFLAGS='$(LLAMA_RUSTFLAGS)' $(CARGO) build $(LLAMA)

llama-fork:
	@vendor/llama.cpp/fork.sh build

demo:
	@sh tests/demo.sh

test:
	@sh tests/run.sh

bench:
	$(CARGO) bench

fmt:
	$(CARGO) fmt --all

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets -- -D warnings
	RUSTFLAGS='$(LLAMA_RUSTFLAGS)' $(CARGO) clippy $(LLAMA) --all-targets -- -D warnings

cross:
	tests/cross.sh mac
	tests/cross.sh arm

clean:
	$(CARGO) clean
	rm -rf target
