# `make suite`: the bundled tests on every backend, on this machine's best device. `make test`: the tests of the plugin.
# `make docs`: the pages of docs/ as a site, in docs/_build/html.
# SUITE: further arguments of the first, as SUITE=--attn-workloads=smoke.
# Each sets up .venv first. On a GPU machine, say TORCH=torch to take torch's default build, or point VENV at an environment
# that has one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
# MODELS= leaves out timm, transformers and diffusers, and the suite skips their models
MODELS ?= $(VENV)/models
# that share a GPU, too: then nothing is timed. WORKERS= times, one case after the other
CORES = $(shell cores=$$(nproc 2>/dev/null || echo 8); [ $$cores -gt 16 ] && echo 16 || echo $$cores)
WORKERS ?= -n $(if $(shell command -v nvidia-smi),$(CORES),2) --dist loadgroup --no-loadscope-reorder

.PHONY: suite test test-all docs test-oldest neighbors lint docs check clean

# not compiled: most of what is installed is never imported, and a module that is gets compiled then, once if it may be kept
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV): about two minutes, most of them for torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt "$(TORCH)" --group dev --editable .
	touch $@

# what the suite's models are of, beside torch's own; only the suite needs it
$(VENV)/models: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt "$(TORCH)" --group models
	@# a torchvision for another build of torch, as for CUDA beside torch for CPUs, keeps transformers from being imported
	@$(BIN)/python -c "import torchvision" 2>/dev/null || [ "$(origin VENV)" != file ] || \
	$(BIN)/python -m pip uninstall --quiet --yes torchvision
	touch $@

suite: $(VENV)/ready $(MODELS)
	@echo "suite: every backend, forward and backward; a minute or two on two CPU cores, several on a GPU (SUITE=--attn-list counts)"
	@if $(BIN)/pytest pytest_attn/suite --attn-backends=all $(WORKERS) $(SUITE); then \
	echo "suite: every backend that ran here is right. Skipped is what this machine or a backend cannot do: SUITE=-rs lists why."; \
	echo "next: test a kernel of your own, docs/tutorial.md"; \
	else code=$$?; \
	if [ $$code -ne 1 ]; then echo "suite: interrupted, or not run: the last lines above say why (exit $$code)"; exit $$code; fi; \
	echo "suite: something above is wrong, slower than recorded, or raised: its message says which, and how to repeat it."; \
	echo "next: SUITE='--lf --attn-save-failures=failures' runs what failed again and keeps its tensors, docs/howto/failures.md"; \
	exit $$code; fi

test: $(VENV)/ready
	@echo "test: the tests of the plugin itself; two to nine minutes on two cores, longer beside other work"
	@if $(BIN)/pytest tests -n auto --dist worksteal $(TESTS); then \
	echo "test: the plugin does what its documentation says. next: make lint, then commit (CONTRIBUTING.md)"; \
	else code=$$?; \
	if [ $$code -ne 1 ]; then echo "test: interrupted, or not run: the last lines above say why (exit $$code)"; exit $$code; fi; \
	echo "test: something failed. next: $(BIN)/pytest tests --lf -x repeats the first failure"; exit $$code; fi

# with every story of tests/plugin through an xdist worker as well, which takes twice as long, and on each pytest that others pin
test-all: $(VENV)/ready
	@echo "test-all: the slow stories too, then stories and suite on other pytests; some forty minutes on two cores"
	ATTN_TESTS=all $(BIN)/pytest tests -n auto --dist worksteal
	$(MAKE) $(PYTESTS:%=test-on-%)

# the oldest pytest that is supported: what touches pytest most
test-oldest: $(VENV)/ready
	@echo "test-oldest: what touches pytest most, on pytest $(OLDEST); about half a minute"
	@$(MAKE) test-on-$(OLDEST) STORIES="tests/plugin/test_stories.py tests/plugin/test_outputs.py"

# the releases that PyTorch's CI, NATTEN, Transformer Engine, vLLM and transformers pin, laid over the environment
PYTESTS = 7.3.2 7.4.4 8.2.1 8.3.5 8.4.2
OLDEST = $(firstword $(PYTESTS))
STORIES = tests/plugin
test-on-%: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/pytest-$* pytest==$* \
	$(if $(filter 7.%,$*),pytest-benchmark==4.0.0 py-cpuinfo pytest-xdist==3.3.1)
	PYTHONPATH=$(abspath $(VENV)/pytest-$*) $(BIN)/python -m pytest $(STORIES) -n auto --dist worksteal
	PYTHONPATH=$(abspath $(VENV)/pytest-$*) $(BIN)/python -m pytest pytest_attn/suite \
	--attn-workloads=smoke --attn-backends=math,sdpa -n auto -k "not test_models"

# other plugins of pytest, laid beside the environment's packages in one of their own, and public suites, as their sources
NEIGHBORS = allure-pytest anyio flaky pytest-asyncio pytest-cov pytest-html pytest-json-report pytest-mock pytest-order \
pytest-randomly pytest-repeat pytest-rerunfailures pytest-run-parallel pytest-split pytest-subtests pytest-sugar \
pytest-timeout syrupy
SUITES = click==8.5.1 more-itertools==11.2.1 packaging==26.4
PURELIB = -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(VENV)/neighbors/ready: $(VENV)/ready
	$(BIN)/python -m venv --without-pip $(VENV)/neighbors
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$($(VENV)/neighbors/bin/python $(PURELIB))/beside.pth
	$(VENV)/neighbors/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $(NEIGHBORS) pretend tomli-w
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(VENV)/neighbors/sources $(SUITES)
	touch $@

# first what may share the cores, then what is timed
neighbors: $(VENV)/neighbors/ready
	@echo "neighbors: beside other plugins, profilers and public suites; some ten minutes on two cores"
	$(BIN)/pytest tests/withstood/neighbors.py -n 2 -k "not suite"
	$(BIN)/pytest tests/withstood/neighbors.py -k suite

lint: $(VENV)/ready
	@echo "lint: style and types; about half a minute"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose

docs: $(VENV)/ready
	@echo "docs: the site; about a minute"
	$(BIN)/python -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "next: open docs/_build/html/index.html"

check: lint suite test-oldest test

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .mypy_cache .ruff_cache
