# Everything sets itself up in .venv: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
EXTRAS ?= dev
VENV ?= .venv
BIN := $(VENV)/bin
comma := ,
# One stamp per choice of extras: `make test EXTRAS=dev,oracle` after a plain `make test` installs what is missing.
READY := $(VENV)/.ready-test-$(subst $(comma),-,$(EXTRAS))
ALL := $(VENV)/.ready-test-$(subst $(comma),-,$(if $(filter dev,$(EXTRAS)),dev$(comma)oracle,$(EXTRAS)))

.PHONY: demo test test-all test-levels test-arm torture lint lint-platforms format docs release clean

demo: $(VENV)/.ready-demo
	$(BIN)/ggufmill run recipes/demo.toml --force

# As many processes as processors. PYTEST is for the command's further options.
PYTEST ?=
PARALLEL := -n auto --dist worksteal

# Every op, type and verb, without the oracles (torch, transformers), clusters and whatever is slow: in five minutes on two cores.
test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "not (oracle or process or slow or torture)" $(PYTEST)

# Everything, with the oracles (large).
test-all: $(ALL)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST)

# Codecs and kernels at every lesser level of this processor (GGUFMILL_CPU), and on aarch64 in emulation (Debian, no root needed).
test-levels: $(READY)
	$(BIN)/python tests/levels.py

test-arm: $(READY)
	$(BIN)/python tests/arm/environment.py
	$(BIN)/python tests/levels.py --arm

# What docs/reliability.md promises: its tests, with the slow faults of a cluster, then EXAMPLES damaged inputs per parser, TRIALS
# of each kind of disturbance per job (kills, signals, failed system calls, power cuts; they need strace), and REQUESTS to a server
# from 64 clients at once. Ends with a table.
EXAMPLES ?= 1000
TRIALS ?= 4
REQUESTS ?= 3000
torture: $(READY)
	$(BIN)/python -m pytest -m "" tests/torture tests/fuzz tests/jobs tests/cli/test_safety.py \
	    tests/cli/test_run_faults.py tests/pipeline/cluster/test_faults.py tests/runtime/serve/test_limits.py tests/runtime/serve/test_connections.py tests/simd/compile/test_kernel_cache.py
	$(BIN)/python tests/torture/run.py $(EXAMPLES) $(TRIALS) $(REQUESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# What the type checker says of the calls that macOS and Windows lack.
lint-platforms: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python --pythonplatform Darwin
	$(BIN)/pyright --pythonpath $(BIN)/python --pythonplatform Windows

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready-test-docs
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# Wheel, sdist, manual pages, bill of materials and site in build/release, tried in clean environments; VERSION=1.2.0 sets the version.
release: $(VENV)/.ready-test-release
	$(BIN)/python docs/release.py $(if $(VERSION),--version $(VERSION))

clean:
	rm -rf $(VENV) build out *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# The demo needs the program alone, the tests its extras. pyproject.toml decides when to install anew.
$(VENV)/.ready-demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.ready-test-release: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[release]"
	touch $@

$(VENV)/.ready-test-docs: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

$(READY) $(filter-out $(READY),$(ALL)): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(subst -,$(comma),$(patsubst $(VENV)/.ready-test-%,%,$@))]"
	touch $@
