# `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := lab,dev,docs,lightning,hf,tensorboard

TORCH  ?= 2.10.0
OTHER  := .venv-$(TORCH)

.PHONY: env demo test compat check bench docs trust lock release clean

env: $(VENV)/.installed

# torch comes first and by its exact pin, so that no range pulls another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: env
	$(BIN)/autoopt demo

test: env
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# The suite under another torch, by default the oldest that is supported: `make compat TORCH=2.11.0`. From the registry
# it comes with gigabytes of CUDA libraries, so this is for before a release, not for CI. (It chooses its setuptools
# and its Triton.)
compat:
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d; /^triton==/d' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt --editable '.[$(EXTRAS)]'
	$(OTHER)/bin/python -m pytest --numprocesses 3 --dist worksteal

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: env
	$(BIN)/python benchmarks/step_time.py

docs: env
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build

trust: env
	$(BIN)/python trust/run.py $(if $(TORCH_TEST_OPTIM),--torch-suite $(TORCH_TEST_OPTIM))

lock: env
	$(BIN)/python tools/lock.py --extras $(EXTRAS)

release: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build pip-audit
	$(BIN)/python tools/release.py --extras $(EXTRAS)

clean:
	rm -rf $(VENV) .venv-*
