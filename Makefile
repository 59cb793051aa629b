# make install | train | test | test-ci | test-all | test-time | storm | mutations | lint | format | docs | fuzz | fuzz-inputs | gpu-wheels | clean: each does everything it needs from nothing, and is quick the second time.

PYTHON ?= python3
CONFIG ?= configs/cdrmix-core-tiny.yaml
ARGS ?=
# Of fuzzing, for each target.
SECONDS ?= 300
# Address of a package index that has PyTorch's CPU or ROCm builds, where your own has only the CUDA ones.
TORCH_INDEX ?=
# Which build of PyTorch: cuda, rocm or cpu; by default what the machine's driver says.
GPU ?= $(shell if command -v nvidia-smi >/dev/null; then echo cuda; \
    elif command -v rocm-smi >/dev/null || command -v amd-smi >/dev/null || [ -d $(ROCM) ]; then echo rocm; else echo cpu; fi)
ROCM ?= /opt/rocm

BIN := .venv/bin
INSTALLED := .venv/.installed
UNFINISHED := .venv/.unfinished
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

# Of fuzz-inputs.
CASES ?= 20000

# Kills of running trainings, each followed by a resume.
STORMS ?= 60

.PHONY: help install train test test-ci test-all test-time gate storm mutations lint format docs fuzz fuzz-inputs \
    gpu-wheels clean

help:
	@echo 'make install   a virtual environment in .venv with PyTorch, the pinned dependencies and the C++ extension'
	@echo 'make train     prepare, train, evaluate and export CONFIG ($(CONFIG)); ARGS="key.path=value ..." overrides'
	@echo 'make test      lint, types and the quick tests, in five minutes on two cores;  make test-ci  also slow ones'
	@echo 'make test-all  every test, with other examples each time: SEED=... repeats those of a run'
	@echo 'make test-time  the CPU time of each quick test; fails above the budget'
	@echo 'make gate      of the tests what stage B stands on, in five minutes'
	@echo 'make storm     kills and resumes STORMS ($(STORMS)) small trainings; each must end with the files of an undisturbed one'
	@echo 'make mutations  puts errors into copies of the code, one at a time; the tests must find each'
	@echo 'make lint      ruff and mypy alone;  make format  rewrites what ruff can;  make clean  forgets .venv and builds'
	@echo 'make docs      the documentation as a web site in build/docs, which needs no network'
	@echo 'make gpu-wheels  what a bare GPU machine lacks for benchmarks/gpu.sh, in .whl: at most 64 MiB'
	@echo 'make fuzz-inputs  commands on CASES ($(CASES)) damaged inputs, from number SEED (0) on'
	@echo 'make fuzz      the C++ of csrc/ against any input, under sanitizers, SECONDS ($(SECONDS)) for each target'

install: $(INSTALLED)

# DeepSpeed is built without compiled operators, for training uses none: its setup would else look for nvcc where there is
# a driver, and stop without it.
# An installation that was killed may have left packages half copied, which pip takes for whole: it is begun again.
$(INSTALLED): pyproject.toml setup.py constraints.txt Makefile $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo 'cdrmix needs Python 3.11 or newer, found: '"$$($(PYTHON) --version 2>&1)"'. Name one: make install PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo '$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { \
	    echo 'A C++17 compiler is needed. On Debian and Ubuntu: apt install g++; or name one: make install CXX=clang++' >&2; exit 1; }
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then rm -rf .venv; $(PYTHON) -m venv .venv; fi
	@touch $(UNFINISHED); trap 'exit 130' INT TERM; set -e; \
	{ case $(GPU) in cuda) \
	    echo 'Installing PyTorch for the GPU ...' && $(PIP) torch==2.13.0;; \
	  rocm) \
	    echo 'Installing PyTorch for AMD GPUs ...' && [ -n '$(TORCH_INDEX)' ] && \
	    PIP_EXTRA_INDEX_URL='$(TORCH_INDEX)' $(PIP) --upgrade torch==2.13.0 && \
	    $(BIN)/python -c 'import sys, torch; sys.exit(not torch.version.hip)' || { \
	      echo 'This machine has an AMD GPU, but no ROCm build of PyTorch 2.13.0 was had: the default index has none. Name one' \
	           'that has them for your ROCm: make install TORCH_INDEX=... ; or do without the GPU: make install GPU=cpu' >&2; \
	      false; };; \
	  cpu) \
	    echo 'Installing PyTorch for the CPU ...' && \
	    PIP_EXTRA_INDEX_URL='$(TORCH_INDEX)' $(PIP) torch==2.13.0+cpu || { \
	      echo 'Not had: your index may lack CPU builds (make install TORCH_INDEX=... names one that has them).' \
	           'Installing the default build, which may bring several GB of CUDA.' >&2; $(PIP) torch==2.13.0; };; \
	  *) echo 'GPU=$(GPU): it is cuda, rocm or cpu' >&2; false;; \
	  esac && \
	  echo 'Installing the other dependencies and building the extension ...' && \
	  $(PIP) setuptools pybind11 && \
	  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation --editable '.[test,dev]' && \
	  $(BIN)/python -c 'import torch, cdrmix._dedup, cdrmix._text'; } || { status=$$?; rm -f $(UNFINISHED); exit $$status; }
	@rm -f $(UNFINISHED); touch $@

train: install
	$(BIN)/cdrmix-train --config $(CONFIG) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without the compiled files of modules every process of the tests would compile them anew, 9 s each.
unexport PYTHONDONTWRITEBYTECODE

# A process that has no test left takes half of what the other has left.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist worksteal

test: lint
	$(PYTEST) -m 'not slow'

# What .ci/run runs: also the tests that are marked slow, but for those that are marked long.
test-ci: lint
	$(PYTEST) -m 'not long'

# Also what takes minutes; and Hypothesis draws 300 examples where the others have 15 that are always the same.
test-all: lint
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "The seed of the examples: $$seed; make test-all SEED=$$seed repeats them"; \
	$(PYTEST) --hypothesis-profile=random --hypothesis-seed=$$seed

# The CPU time of each quick test, in units of a fixed calculation; fails above the budget in tests/costs.py.
test-time: install
	$(PYTEST) -m 'not slow' --costs

# Of these, in five minutes, what stage B stands on.
gate: install
	$(PYTEST) -m gate

storm: install
	CDRMIX_STORMS=$(STORMS) $(PYTEST) tests/cli/test_storm.py

fuzz-inputs: install
	CDRMIX_FUZZ_CASES=$(CASES) CDRMIX_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) tests/cli/test_mutated_inputs.py

mutations: install
	$(BIN)/python tests/mutations/run.py

format: install
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

# The extra's packages alone: cdrmix itself is installed already.
docs: install
	@$(PIP) 'cdrmix[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img|source|iframe)[^>]+(src|href)="?(https?:)?//' build/docs --include='*.html' || { \
	    echo 'These pages load something from a network' >&2; exit 1; }
	@echo 'build/docs/index.html'

# With clang by libFuzzer, which goes on from what it found before; else with g++ and a driver that knows no coverage.
CLANGS := clang++ clang++-22 clang++-20 clang++-19 clang++-18 clang++-16 clang++-14

fuzz:
	@set -e; clang=$$(for name in $(CLANGS); do command -v $$name && break; done || true); \
	flags='-O1 -g -std=c++17 -Icsrc -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all'; \
	for source in $(filter-out csrc/fuzz/driver.cpp,$(wildcard csrc/fuzz/*.cpp)); do \
	    program=build/fuzz/$$(basename $$source .cpp); mkdir -p $$program.inputs; \
	    if [ -n "$$clang" ]; then \
	        $$clang $$flags -fsanitize=fuzzer $$source -o $$program; \
	        $$program -max_total_time=$(SECONDS) -max_len=20000 -dict=csrc/fuzz/dictionary.txt -print_final_stats=1 \
	            -artifact_prefix=$$program. -print_funcs=0 $$program.inputs; \
	    else \
	        $${CXX:-g++} $$flags $$source csrc/fuzz/driver.cpp -o $$program; $$program $(SECONDS); \
	    fi; \
	    echo "$$source: no finding in $(SECONDS) s"; \
	done

# CDRMIX_PYTHON: an interpreter of the machine's version with headers, to build the C++ extension for it too.
gpu-wheels: install
	PYTHON=$(BIN)/python benchmarks/gpu_wheels.sh

clean:
	rm -rf .venv build *.egg-info cdrmix/_dedup*.so cdrmix/_text*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
