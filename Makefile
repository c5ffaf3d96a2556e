# Everything goes through one virtual environment, .venv, which `make setup` prepares (once; a second run
# takes a second). Arguments are passed on in ARGS: make test ARGS="tests/server -x".

PYTHON := .venv/bin/python
# `make setup` leaves compiling to the first import (scripts/setup.sh), which has to keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test check format ci clean

help:
	@echo "make setup    prepare .venv: vLLM (CPU, or CUDA where there is an NVIDIA GPU), the embedded model"
	@echo "make demo     run a real agent on a plain server and on ours, and compare"
	@echo "make test     run all tests"
	@echo "make check    ruff, mypy --strict, import boundaries"
	@echo "make format   let ruff rewrite what it can"
	@echo "make ci       what CI runs: setup, check, test"

setup:
	@bash scripts/setup.sh

demo: setup
	@$(PYTHON) -m agentspec_runtime demo $(ARGS)

test: setup
	@$(PYTHON) -m pytest $(ARGS)

check: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) scripts/typecheck.py
	@$(PYTHON) -m pytest -q tests/test_import_boundaries.py

format: setup
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

ci:
	@bash .ci/run

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
