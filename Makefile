# The commands that a person and CI run alike.

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
OUT ?= demo
# Most tests wait for processes and time limits, not for a core.
TEST_WORKERS ?= 4
SOURCES := $(shell find prorl_zmq brokers stages tools -name '*.py' -o -name '*.toml' -o -name py.typed) setup.cfg pyproject.toml
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint types bench clean help

help:
	@echo "make demo    train a small policy to use bash, through the whole service (about two minutes)"
	@echo "make test    run all tests that this machine allows"
	@echo "make lint    ruff: rules and format"
	@echo "make types   mypy --strict, over the installed wheel"
	@echo "make bench   all benchmarks in full; rewrites bench/README.md"
	@echo "make clean   remove what the others made"

demo: $(VENV)/.server
	@if bwrap --unshare-all --ro-bind / / true 2>/dev/null; then sandbox=bubblewrap; else \
	  echo "make demo: no working bubblewrap here, so sandboxes are plain processes"; sandbox=process; fi; \
	$(BIN)/prorl demo --out $(OUT) --sandbox $$sandbox

test: $(VENV)/.test
	$(BIN)/pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint $(VENV)/.test
	$(BIN)/python .ci/check_types.py

bench: $(VENV)/.bench
	$(BIN)/python bench/run_all.py

# Installed as a wheel, so that what is tested is what a user gets. build/ would carry deleted files into it.
$(VENV)/.server: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server]'
	touch $@

$(VENV)/.test: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server,test]'
	touch $@ $(VENV)/.server

$(VENV)/.lint: setup.cfg | $(VENV)/.test
	$(PIP) install '.[lint]'
	touch $@

$(VENV)/.bench: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server,test,bench]'
	touch $@ $(VENV)/.server $(VENV)/.test

$(BIN)/python:
	@echo "make: building $(VENV) (about a minute)"
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
