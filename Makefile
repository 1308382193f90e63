# Entry points. `make demo` first; the build proper is CMake's (CMakePresets.json), in build/.
JOBS ?= $(shell nproc)
BUILD := build
ACTDUMP := $(BUILD)/pipeline/actdump
DEMO := out/sample-mamba

.PHONY: all demo test test-gpu bench bench-vs bench-gpu format clean packages venv configure

all: configure
	@cmake --build $(BUILD) --target actdump -j $(JOBS)

# Installs what is missing, builds, runs the sample job, and shows what came out.
# Its threads sleep while they wait: it may well share the machine.
demo: export OMP_WAIT_POLICY ?= passive
demo: configure
	@cmake --build $(BUILD) --target actdump -j $(JOBS) >$(BUILD)/demo.log || { cat $(BUILD)/demo.log; exit 1; }
	rm -rf $(DEMO)
	$(ACTDUMP) run configs/sample-mamba.json
	$(ACTDUMP) info $(DEMO)

# Set-up, every test, and the sanitizers' builds. ONLY=release, asan or tsan runs one stage.
test: packages venv
	@tests/setup.sh slurm
	@tests/setup.sh browser
	@tests/run.sh $(ONLY)

# The tests that want a GPU, and no others.
test-gpu: venv configure
	@cmake --build $(BUILD) -j $(JOBS)
	@cd $(BUILD) && ctest -L gpu --output-on-failure --no-tests=error

bench bench-vs bench-gpu: venv configure
	@cmake --build $(BUILD) --target $@ -j $(JOBS)

packages:
	@tests/setup.sh packages

venv: packages
	@tests/setup.sh venv

configure: packages
	@cmake -S . -B $(BUILD) >/dev/null

format:
	@git ls-files -z '*.c' '*.h' '*.cu' '*.cuh' | xargs -0 -r clang-format -i

clean:
	rm -rf $(BUILD) out
