# For people and CI alike. Needs make and Python 3.11 or 3.12; everything else is installed into .venv.

# The first that runs and is of a version we support: a name on the PATH alone may be a version manager's stub.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
# Pinned, so that a wheel of this version that pip is pointed at (a CPU build, say) wins over others; README shows how.
TORCH ?= torch==2.13.0
GPU_EXTRA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo ,gpu)
CONFIG ?=
# A room whose tests `quick` runs, such as kernels/lookup; without one it runs the fast tests of all rooms.
ROOM ?=
# Of the tests. Each takes up to 2 GB; two start Ray's clusters and wait for them most of the time, two compute meanwhile. Those of
# a GPU want it alone.
WORKERS ?= $(if $(GPU_EXTRA),1,4)

BIN := .venv/bin
READY := .venv/.installed
PEERS := .venv/.peers
VENV := .venv/pyvenv.cfg
# Python compiles what it imports, once; pip would compile all, for 45 seconds of a core.
INSTALL := $(BIN)/python -m pip install --progress-bar on --no-compile
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Else each of the hundreds of processes that tests and services start would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL: # `test` installs all, and `lint` then finds its part there
.PHONY: help demo serve test test-slow quick lint docs clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(READY) ## Build the demo model if absent, serve it, score its example over HTTP, stop.
	$(BIN)/dpiframe demo

serve: $(READY) ## As demo, and keep serving until Ctrl-C; or serve CONFIG=configs/x.yaml.
	$(BIN)/dpiframe $(if $(CONFIG),serve --config $(CONFIG),demo --stay)

# In a fresh clone to collect is to compile all that the tests import, for half a minute. It is done once, on a core that mypy leaves
# idle, and not by each worker for itself. What goes wrong there pytest tells again.
test: $(PEERS) ## Linters, types, the docs' links and every test that this machine can run.
	@$(BIN)/pytest -qq --collect-only >/dev/null 2>&1 & trap "kill $$! 2>/dev/null" EXIT; $(MAKE) lint docs && wait
	$(BIN)/pytest $(IN_PARALLEL)

test-slow: $(PEERS) ## All tests in every combination of their parameters, where `test` leaves out what takes long and adds least; more examples.
	$(BIN)/pytest --whole $(IN_PARALLEL)

quick: lint ## For who changes one room, in two minutes: lint, and its tests but for Ray's: quick ROOM=kernels/lookup; or all fast ones.
	$(BIN)/pytest -q $(IN_PARALLEL) $(if $(ROOM),-m 'not ray' tests/$(ROOM) tests/test_layering.py tests/test_line_budget.py,\
		-m 'not slow and not ray and not bulk')

lint: $(READY) ## ruff and mypy only.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not --quiet: it drops the warnings before --strict counts them.
docs: $(READY) ## Build the site from docs/ into build/site; a broken link fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove what the other targets made, the demo model included.
	rm -rf .venv build/site models/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The libraries that imported models are compared with; only the tests need them. RecBole wants a Ray of 2023, so it comes without what it
# asks for: its models and these do. All in one call: each takes pip twenty seconds of thought.
$(PEERS): pyproject.toml Makefile | $(VENV)
	$(INSTALL) '$(TORCH)' -e '.[test,docs,test-peers$(GPU_EXTRA)]'
	$(INSTALL) --no-deps recbole==1.2.1 colorlog colorama texttable tensorboard absl-py
	@touch $(READY) $@

$(READY): pyproject.toml Makefile | $(VENV)
	$(INSTALL) '$(TORCH)' -e '.[test,docs$(GPU_EXTRA)]'
	@touch $@

# Python 3.11 brings a pip of 2023, which takes twice as long to install all this, half a minute of a core.
$(VENV):
	@test -n "$(PYTHON)" || { echo "python: got no Python 3.11 or 3.12 on the PATH, expected one; or set PYTHON=" >&2; exit 1; }
	@echo "Installing into .venv; the first time this downloads a lot."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip
