# `make demo` and `make test` set up everything they need in .venv, and are quick the second time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    := out

# Build requirements are pinned like the rest; newer pips read the second variable for them.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Whatever a shell has on its path, the tests see the installed package.
unexport PYTHONPATH

SOURCES := $(shell find src -not -path '*/__pycache__*') $(wildcard CMakeLists.txt) README.md

# A few tests take as long as thousands of others: whoever is done first takes over from the rest.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal
INTERPRETED := $(wildcard tests/test_triton*.py)

.PHONY: demo test lint test-gpu sanitize bench-cpu bench-gpu clean help
.DEFAULT_GOAL := help

demo: $(VENV)/installed ## run the four operators, check them, show a table, save a picture
	$(BIN)/pliant demo --picture $(OUT)/sampling.png

test: lint ## ruff, mypy, and all tests of the installed package
	$(PYTEST) $(ARGS)
	@# The GPU kernels in Triton's interpreter: small problems. 5 is pytest's status when ARGS select none of them.
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) $(ARGS) $(INTERPRETED) || [ $$? -eq 5 ]

lint: $(VENV)/installed ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

test-gpu: ## all tests from the source tree, with this machine's own Python and torch
	PYTHONPATH=src $(PYTHON) -m pytest $$($(PYTHON) -c 'import xdist; print("-n 8 --dist worksteal")' 2>/dev/null) $(ARGS)

sanitize: ## the GPU kernels under compute-sanitizer, from the source tree
	PYTHONPATH=src $(PYTHON) tests/sanitize.py

bench-cpu: $(VENV)/installed ## CPU kernels against the plain PyTorch composites
	$(BIN)/python benchmarks/bench_cpu.py $(ARGS)

bench-gpu: ## GPU kernels, from the source tree, with this machine's own Python and torch
	PYTHONPATH=src $(PYTHON) benchmarks/bench_gpu.py $(ARGS)

clean: ## remove everything that the other targets made
	rm -rf $(VENV) build dist $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14) and "Python 3.10 to 3.14 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	@# torch's CPU build comes without Triton, and the interpreter tests of the GPU kernels need it.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --no-deps triton==3.6.0
	@touch $@

# First as everybody installs it; when sources alone have changed, with the tools that are there by now, so that only
# what changed is compiled.
FULL  := '.[test,demo]'
QUICK := --no-deps --no-build-isolation --config-settings=build-dir=build/quick .
$(VENV)/installed: $(VENV)/torch pyproject.toml constraints.txt $(SOURCES)
	@echo "Building and installing pliant (a minute at first)"
	@$(BIN)/python -m pip install --quiet $(if $(filter-out $(SOURCES),$?),$(FULL),$(QUICK))
	@touch $@
