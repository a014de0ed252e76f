# One command each: `make run`, `make test`, `make check`, `make format`. Nothing needs to be installed before but Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := appa_flwr pluralllm server_app client_app experiments
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: run test check format

run: $(VENV)/installed
	$(BIN)/appa run $(ARGS)

# Files in their order: the few long tests of whole runs come first, not last on one core.
test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The stamps keep the install from being repeated until a requirement or a pin changes.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable ".[dev]"
	touch $@
