# `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: env demo test check bench clean

env: $(VENV)/.installed

# torch comes first and by its exact pin, so that no range pulls another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lab,dev]'
	touch $@

demo: env
	$(BIN)/autoopt demo

test: env
	$(BIN)/python -m pytest --numprocesses 2

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: env
	$(BIN)/python benchmarks/step_time.py

clean:
	rm -rf $(VENV)
