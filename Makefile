# Every target does its own set-up: `make decode` and `make test` work in a fresh clone.
#
#   make decode                        a real model answers about a real document, cache compressed
#   make decode ARGS="--rate 16"       with options of kvjax decode
#   make test                          the test suite (without tests marked slow)
#   make check                         lint, types and tests
#   make PYTHON=/path/to/python test   with a Python of your choice (>= 3.12)

ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
COMMITS := $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
# A fortieth of the mutations, another one with every commit.
PARTS ?= 40
SLICE ?= $(shell echo $$(($(COMMITS) % $(PARTS) + 1)))/$(PARTS)
# A quarter of the slow tests, another one with every commit; SLOW_PART=1/1 for all.
SLOW_PART ?= $(shell echo $$(($(COMMITS) % 4 + 1)))/4
# Tests start Python many times, which would compile the package each time.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
LATEST := .venv-latest
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup decode model test test-slow test-latest mutants lint types format check clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile
	@echo "other targets: setup model test-slow test-latest mutants lint types format clean"

setup: $(VENV)/.installed

# The stamp is written last, so an interrupted installation is not taken for a finished one.
$(VENV)/.installed: pyproject.toml constraints.txt scripts/venv.sh
	@rm -f $@
	@PYTHON='$(PYTHON)' scripts/venv.sh $(VENV) -c constraints.txt -e '.[dev]'
	@touch $@

decode: setup
	@$(BIN)/python scripts/decode.py $(ARGS)

# The small model that the tests use. Tests that need it are skipped where it cannot be had, but not
# in continuous integration (CI=true): tests/conftest.py refuses skips there.
model: setup
	@$(BIN)/python -m kvjax fetch smollm2-135m || for set in "$$CI" "$$KVJAX_NO_SKIPS"; do \
		case "$$set" in ""|0|false) ;; \
		*) echo "error: no small model, and no test may be skipped" >&2; exit 1 ;; esac; done && \
		echo "note: without the small model, tests that need it are skipped" >&2

test: setup model
	@$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

# pytest exits with 5 where no test is marked slow: nothing to do then.
test-slow: setup model
	@$(BIN)/python -m pytest -n $(JOBS) -m slow --part $(SLOW_PART) $(PYTEST_ARGS) || \
		{ status=$$?; [ $$status -eq 5 ] && echo "no test is marked slow" || exit $$status; }

# The suite with the newest releases that pyproject.toml allows, instead of the pinned ones.
test-latest: model
	@PYTHON='$(PYTHON)' scripts/venv.sh $(LATEST) --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(LATEST)/bin/python -c 'import jax; print("jax", jax.__version__)'
	@$(LATEST)/bin/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

# Mutations of the code, each with the tests that have to notice it; `make mutants SLICE=1/1` for all.
mutants: setup
	@$(BIN)/python scripts/mutants.py --jobs $(JOBS) --slice $(SLICE)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: lint types test

clean:
	rm -rf $(VENV) $(LATEST) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
