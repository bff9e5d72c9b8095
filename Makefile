# `make suite`: the bundled tests on every backend, on this machine's best device. `make test`: the tests of the plugin.
# Both set up .venv first. On a GPU machine, say TORCH=torch to take torch's default build, or point VENV at an environment
# that has one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
WORKERS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -n 2)

.PHONY: suite test lint check clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

suite: $(VENV)/ready
	$(BIN)/pytest pytest_attn/suite --attn-backends=all $(WORKERS)

test: $(VENV)/ready
	$(BIN)/pytest tests

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test suite

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
