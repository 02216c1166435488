# `make` lists the targets. Everything runs in .venv, made on first use; MGRAPH_PYTHON=/path/to/python uses that
# interpreter instead and installs nothing.

ifdef MGRAPH_PYTHON
PYTHON := $(MGRAPH_PYTHON)
STAMP :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(CURDIR)/.venv/bin/python
STAMP := .venv/.installed
endif
export PATH := $(dir $(PYTHON)):$(PATH)

PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 -q

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full check lint bench docs

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv with everything the other targets need (CPU only, about 1 minute)

# torch is named, and named first, so that pip takes the small CPU build where the index has one; triton 3.7.1 is its pair.
.venv/.installed: pyproject.toml
	python3 -m venv .venv
	$(PYTHON) -m pip install -q --upgrade pip
	$(PYTHON) -m pip install -q torch==2.13.0 'numpy<2.6' triton==3.7.1 -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## compile the mixture-of-experts model, train it on real text with 2 processes, show the result
	PYTHON=$(PYTHON) bash examples/demo.sh

test: $(STAMP)  ## the fast suite (at most 15 minutes on 2 cores)
	$(PYTEST)

test-full: $(STAMP)  ## every test that needs no GPU; writes docs/test-results.md
	$(PYTEST) -m "not gpu and not multi_gpu" --table docs/test-results.md

lint: $(STAMP)  ## ruff, format check, mypy --strict
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

check: lint test  ## lint, then the fast suite: what has to pass before a commit

bench: $(STAMP)  ## run the benchmarks this machine can run and write their table
	$(PYTHON) -m benchmarks

docs: $(STAMP)  ## write the generated tables of docs/ir.md and docs/cli.md
	$(PYTHON) -m mgraph.ir.docs
	$(PYTHON) -m mgraph.cli.docs
