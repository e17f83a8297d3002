# make demo      build a real Horovod environment on this machine and prove that it works
# make test      what CI runs: lint, docs and pytest (tests that need root or a missing package are skipped)
# make lint      only ruff, mypy and the prose check
# make pure      only the tests that compile nothing and start no cluster (a minute)
# make docs      the documentation as a site in site/, without a network
# make standin   a cluster on this machine to try things on: hosts, ssh, Slurm, modules (root)
# make optin     tests that CI does not run, also the cases of tests/real marked optin
# make bench     the measurements and curves of docs/explanation/measurements.md (half an hour)
# make gpu-kit   one archive that proves the GPU path on a node without a network (docs/how-to/prove-the-gpu-path.md)
# make clean     remove .venv and all caches
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test lint pure docs standin optin install bench gpu-kit clean

VENV := .venv
BIN := $(VENV)/bin
HVDENV := $(BIN)/hvdenv
# Set to 1, a skipped test is a failure (CI).
NO_SKIP ?=
# How many tests of the pure layer run at a time.
WORKERS ?= $(shell nproc)
PURE := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# Three files of the real layer at a time, in the order of tests/real/conftest.py: builds use all cores, many tests wait.
REAL := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 40

# Why tests were skipped, for the last line of `make test`.
SKIPS := $(VENV)/skips

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# The first line that is printed says what is missing and how to get it.
need = command -v $(1) >/dev/null 2>&1 || { echo "missing: $(1). $(2)"; exit 1; }

$(BIN)/python:
	@$(call need,python3,Install Python 3.10 to 3.13 (Debian and Ubuntu: apt install python3 python3-venv python3-dev))
	@$(call need,gcc,Install a C compiler (Debian and Ubuntu: apt install gcc))
	@$(call need,g++,Install a C++ compiler (Debian and Ubuntu: apt install g++))
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "missing: Python 3.10 or newer, python3 is $$(python3 -V). Install one, or load a module that has it"; exit 1; }
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: Python's venv. Debian and Ubuntu: apt install python3-venv"; exit 1; }
	python3 -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml bin/hvdenv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed

demo: install
	options=$$(.ci/headers $(BIN)/python $(VENV)/headers) && $(HVDENV) build local $$options
	$(HVDENV) verify local

test: $(VENV)/.installed-dev
	$(MAKE) --jobs 2 --output-sync lint docs
	@rm -f $(SKIPS)
	$(PURE) --skips $(SKIPS) $(if $(NO_SKIP),--no-skip) tests/pure
	$(REAL) --skips $(SKIPS) $(if $(NO_SKIP),--no-skip) tests/real
	@$(BIN)/python -m tests.support.needs $(SKIPS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m docs.prose
	$(BIN)/mypy

pure: $(VENV)/.installed-dev
	$(PURE) tests/pure

docs: $(VENV)/.installed-dev
	COLUMNS=100 $(BIN)/python -m docs.reference
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --jobs auto -b html -d .doctrees docs site

# For instance ARGS='--tcl --hosts 3'.
standin: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.standin $(ARGS)

optin: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/optin
	$(BIN)/python -m pytest tests/real -m optin

bench: install
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/solve.py
	$(HVDENV) build local --quiet
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/bandwidth.py
	$(BIN)/python benchmarks/compile.py --frameworks torch
	$(BIN)/python benchmarks/compile.py --frameworks both
	$(BIN)/python benchmarks/again.py

# For instance TESTS=~/src/horovod, a checkout of Horovod 0.28.1.
gpu-kit: install
	$(BIN)/python gpukit/make.py dist/gpu-kit.tar.gz $(if $(TESTS),--tests $(TESTS))

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .doctrees docs/generated site dist
