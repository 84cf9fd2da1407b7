# Every verb sets up what it needs: a .venv with torch and the project in it, made once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
# Two workers, each with one thread and no pool of compile processes: tests compile in their own.
JOBS ?= 2
QUIET_CORES := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.PHONY: help demo test lint pytest fuzz slow fix clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## a sentence encoder and a digits classifier in bf16 beside fp32 (minutes)
	$(BIN)/python -m ampgraph.demo

test: lint pytest ## what continuous integration runs: lint, types, tests

lint: $(VENV)/all ## ruff, mypy and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/all ## the tests alone
	$(QUIET_CORES) $(BIN)/pytest -n $(JOBS) --dist=worksteal

fuzz: $(VENV)/all ## 10,000 random programs against eager autocast
	$(QUIET_CORES) $(BIN)/pytest -n $(JOBS) --dist=worksteal -m fuzz

slow: $(VENV)/all ## the tests that take minutes each
	$(QUIET_CORES) $(BIN)/pytest -n $(JOBS) --dist=worksteal -m slow

fix: $(VENV)/all ## format, and mend what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what the other verbs made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: pip then takes a CPU build where the machine offers one, and the
# project's own requirement is already met when its turn comes.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[demo]' torch==$(TORCH)
	touch $@

$(VENV)/all: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[demo,test,dev]' torch==$(TORCH)
	touch $@ $(VENV)/demo
