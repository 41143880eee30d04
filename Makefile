# Every target sets up first; the set-up returns at once when nothing has changed.
PYTHON := .venv/bin/python
SOURCES := verl search_r1 retrieval_server scripts benchmarks tests infer.py setup.py
# What exists of it: a path that isn't there would stop the linter.
PRESENT = $(wildcard $(SOURCES))

.PHONY: setup format check test test-all

setup:
	@bash scripts/setup.sh

format: setup
	$(PYTHON) -m ruff format $(PRESENT)
	$(PYTHON) -m ruff check --fix $(PRESENT)

check: setup
	$(PYTHON) -m ruff format --check $(PRESENT)
	$(PYTHON) -m ruff check $(PRESENT)
	$(PYTHON) -m mypy

test: setup
	$(PYTHON) -m pytest -m "not slow and not gpu" --durations=10

test-all: setup
	$(PYTHON) -m pytest --durations=20
