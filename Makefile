# What a newcomer and CI run; .ci/run calls these same targets. Every target brings along what it
# needs, says what it installs, and is quick when nothing has changed: stamp files record what is
# done. All that is made lies in build/, dist/ and .venv/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
OPS ?= 20000000
SEED ?= 1
PYTEST ?=
JOBS ?= 2
export PYTHON

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check
stamps := build/stamps
native_sources := native/CMakeLists.txt $(wildcard native/*.cpp native/io/* native/pipeline/*)
format_sources = $(shell git ls-files --cached --others --exclude-standard \
	'native/*.cpp' 'native/*.hpp' 'native/*.cu')

# Paths are written into an environment, so one that was copied or moved is made anew.
ifneq ($(wildcard $(VENV)/made-in),)
ifneq ($(shell cat $(VENV)/made-in),$(CURDIR))
$(shell rm -rf $(VENV))
endif
endif

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- Setting up ---------------------------------------------------------------------------------

.PHONY: setup build
setup: $(VENV)/stamp-requirements $(VENV)/stamp-package  ## Install what is missing, make .venv, build the package into it
build: setup  ## The same: the package is part of the environment

$(stamps)/packages: tools/packages.txt tools/install-packages tools/find-python
	@tools/install-packages
	@mkdir -p $(@D) && touch $@

$(python): | $(stamps)/packages
	$$(tools/find-python) -m venv $(VENV)
	@echo '$(CURDIR)' >$(VENV)/made-in

$(VENV)/stamp-requirements: requirements-dev.txt $(python)
	$(pip) install --quiet --requirement requirements-dev.txt
	@touch $@

# Editable: Python files are used from the tree; native ones are built anew here when they change.
$(VENV)/stamp-package: pyproject.toml $(native_sources) $(VENV)/stamp-requirements
	$(pip) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# --- Showing it ---------------------------------------------------------------------------------

.PHONY: demo bench
demo: setup  ## Check this machine and measure stores and loads on a real file (CPU only)
	@mkdir -p build/demo
	$(python) -m kvdisk doctor build/demo
	$(python) -m kvdisk bench build/demo --rw write --size 512MiB --runtime 3s
	$(python) -m kvdisk bench build/demo --rw randread --size 512MiB --runtime 2s --rounds 3 --compare fio

bench: setup  ## Run the whole bench matrix beside fio
	$(python) bench/run.py

.PHONY: gpu
gpu: setup  ## On a machine with a GPU: run the tests that need one, then measure (build/gpu.json)
	$(python) bench/gpu.py --output build/gpu.json

# --- Checking it --------------------------------------------------------------------------------

# Tests marked root or cost run one at a time, however many processes there are: they take a lock on
# build/tests-in-turn (tests/conftest.py).
.PHONY: test faults native-test lint format sanitize soak tier-soak canaries
test: setup build/native-tests/stamp-configured  ## Run all tests, the native ones included, JOBS at once (PYTEST="-k name" selects)
	cmake --build build/native-tests --target native_tests
	$(python) -m pytest --numprocesses $(JOBS) --dist worksteal $(PYTEST)

faults: setup  ## Run the tests that break disks and processes
	$(python) -m pytest tests/faults $(PYTEST)

# vLLM has an environment of its own, with the CPU build; it takes some minutes and gigabytes.
vllm_python := .venv-vllm/bin/python

.PHONY: setup-vllm test-vllm test-vllm-quick test-vllm-own test-vllm-next
setup-vllm: .venv-vllm/stamp-package  ## Make .venv-vllm: vLLM for the CPU, and this package in it

.venv-vllm/stamp-requirements: requirements-vllm.txt | $(stamps)/packages
	$$(tools/find-python) -m venv .venv-vllm
	$(vllm_python) -m pip --disable-pip-version-check install --quiet --requirement $<
	$(vllm_python) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

.venv-vllm/stamp-package: pyproject.toml $(native_sources) .venv-vllm/stamp-requirements
	$(vllm_python) -m pip --disable-pip-version-check install --quiet --no-deps \
		--no-build-isolation --config-settings=build-dir=build/vllm --editable .
	@touch $@

test-vllm: setup-vllm  ## Run the tests on a real vLLM engine (CPU; PYTEST="-k name" selects)
	$(vllm_python) -m pytest tests/serving/vllm $(PYTEST)

test-vllm-quick: setup-vllm  ## The same, trimmed to three minutes
	$(vllm_python) -m pytest tests/serving/vllm -m quick $(PYTEST)

# Both download vLLM packages into build/ the first time.
test-vllm-own: setup-vllm  ## Run vLLM's own tests against kvdisk's classes
	tests/serving/vllm/conformance/run $(PYTEST)

test-vllm-next: setup-vllm  ## Run the adapters' tests over the Python of the next vLLM
	tests/serving/vllm/conformance/run-next $(PYTEST)

native-test: build/native-tests/stamp-configured  ## Build and run the C++ tests alone
	cmake --build build/native-tests --target native_tests
	build/native-tests/native_tests

# The same tree, with the same options, as the tests' own fixture in tests/conftest.py. Warnings are
# errors in CI from the start, and elsewhere once `make lint` has said so: a compiler that we have
# not seen may warn of more, which must not stop a newcomer.
build/native-tests/stamp-configured: native/CMakeLists.txt | $(stamps)/packages
	cmake -S native -B $(@D) -G Ninja --log-level=WARNING -DKVDISK_TESTS=ON \
		-DKVDISK_PYTHON=OFF -DCMAKE_BUILD_TYPE=Release $(if $(CI),-DKVDISK_WERROR=ON)
	@touch $@

lint: setup build/native-tests/stamp-configured  ## Check style, types and compiler warnings
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(format_sources)
	cmake -DKVDISK_WERROR=ON --log-level=WARNING build/native-tests
	cmake --build build/native-tests
	cmake -S native -B build/lint -G Ninja --log-level=WARNING -DKVDISK_WERROR=ON \
		-DPython_EXECUTABLE=$(abspath $(python)) -Dnanobind_DIR=$$($(python) -m nanobind --cmake_dir)
	cmake --build build/lint --target CMakeFiles/_native.dir/bind.cpp.o

format: setup  ## Rewrite the sources in the project's style
	$(python) -m ruff check --fix
	$(python) -m ruff format
	$(VENV)/bin/clang-format -i $(format_sources)

sanitize: setup  ## Run tests under the address, undefined behaviour and thread sanitizers
	tools/sanitize

soak: build/native-tests/stamp-configured  ## Run OPS operations of the pipeline on the simulated disk from SEED
	cmake --build build/native-tests --target soak
	build/native-tests/soak --ops $(OPS) --seed $(SEED)

tier-soak: setup  ## Run OPS operations of the whole tier on simulated disks from SEED
	$(python) -m tests.model.tier_soak --ops $(OPS) --seed $(SEED)

.PHONY: crash powercut flips storm cuts
crash: setup  ## Kill a storing process N times (default 300) and verify every byte after each
	$(python) -m tests.tier.crash --crashes $(or $(N),300) --seed $(SEED)

powercut: setup  ## Cut the power of ext4 and of xfs N times (default 20) and verify (needs root)
	$(python) -m tests.tier.powercut --cuts $(or $(N),20) --seed $(SEED)

flips: setup  ## Flip N bits (default 100000) and damage slots in every other way: all become misses
	$(python) -m tests.tier.flips --flips $(or $(N),100000) --seed $(SEED)

storm: setup  ## Take N random steps (default 20000) on two disks that fail, hang and lie (needs root)
	$(python) -m tests.tier.storm --steps $(or $(N),20000) --seed $(SEED)

cuts: setup  ## Cut a record file at every byte of its last page, and open it each time
	KVDISK_CUTS=all $(python) -m pytest tests/tier/test_scenarios_restart.py -k cut_in_its_last_page

canaries: $(stamps)/packages  ## Prove that the soak finds each planted bug
	native/tests/run_canaries.sh

# --- Shipping it --------------------------------------------------------------------------------

.PHONY: wheel wheel-check
wheel: $(VENV)/stamp-requirements  ## Build a wheel that carries liburing inside
	rm -rf dist/*.whl
	$(pip) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist \
		--config-settings=build-dir=build/wheel \
		--config-settings=cmake.define.KVDISK_STATIC_LIBURING=ON .

wheel-check: wheel  ## Install that wheel into an empty environment and use it there
	tools/check-wheel dist/kvdisk-*.whl

.PHONY: clean
clean:  ## Remove all that was made, except .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvdisk tests bench -name __pycache__ -prune -exec rm -rf {} +
