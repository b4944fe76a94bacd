# Everything sets itself up in .venv: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
EXTRAS ?= dev
BIN := .venv/bin

.PHONY: demo test lint format clean

demo: .venv/.ready-demo
	$(BIN)/ggufmill run recipes/demo.toml --force

test: .venv/.ready-test
	$(BIN)/python -m pytest

lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build out *.egg-info

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# The demo needs the program alone, the tests its extras. pyproject.toml decides when to install anew.
.venv/.ready-demo: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.ready-test: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $@
