# `make suite`: the bundled tests on every backend, on this machine's best device. `make test`: the tests of the plugin.
# `make docs`: the pages of docs/ as a site, in docs/_build/html.
# SUITE: further arguments of the first, as SUITE=--attn-workloads=smoke.
# Each sets up .venv first. On a GPU machine, say TORCH=torch to take torch's default build, or point VENV at an environment
# that has one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
WORKERS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || printf -- '-n 2')

.PHONY: suite test test-all docs test-oldest lint docs check clean

# not compiled: most of what is installed is never imported, and a module that is gets compiled then, once if it may be kept
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --group dev --editable .
	touch $@

suite: $(VENV)/ready
	$(BIN)/pytest pytest_attn/suite --attn-backends=all $(WORKERS) $(SUITE)

test: $(VENV)/ready
	$(BIN)/pytest tests -n auto --dist worksteal

# with every story of tests/plugin through an xdist worker as well, which takes twice as long
test-all: $(VENV)/ready
	ATTN_TESTS=all $(BIN)/pytest tests -n auto --dist worksteal

# the oldest pytest that is supported, laid over the environment: what touches pytest most
OLDEST = tests/plugin/test_stories.py tests/plugin/test_options.py tests/plugin/test_outputs.py
test-oldest: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/oldest pytest==8.4.0
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest $(OLDEST) -n auto -k 'not xdist and not workers1'

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose

docs: $(VENV)/ready
	$(BIN)/python -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html

check: lint suite test-oldest test

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .mypy_cache .ruff_cache
