# `make` prints the targets. CI runs .ci/run: `make check`, `make test`, `make test-faults`, `make test-sglang`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Further arguments of pip, for instance an index that has a CPU build of torch.
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
INSTALL := $(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt
CONFIGS := $(wildcard configs/*.yaml)
QUICKSTART := configs/quickstart.yaml
QUICKSTART_RUN := runs/quickstart
# SGLang has an environment of its own: its torchvision would break imports of transformers in ours.
SGLANG_VENV := .venv-sglang
SGLANG := $(SGLANG_VENV)/.installed
# On GPUs both have one torch (constraints-gpu.txt), else NCCL refuses to work between them.
GPU_VENV := .venv-gpu
SGLANG_GPU_VENV := .venv-sglang-gpu

# One thread per process: several processes share the cores.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help setup quickstart check fix docs test test-e2e test-faults sglang-env test-sglang gpu-envs simulate clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(BASE)

setup: $(DEV) ## make .venv with everything that development and tests need

quickstart: $(BASE) ## train a toy policy asynchronously on this machine, in minutes
	@if [ -d $(QUICKSTART_RUN) ]; then \
	  echo "removing the quickstart run before: $(QUICKSTART_RUN)"; rm -rf $(QUICKSTART_RUN); fi
	$(BIN)/async-grpo run $(QUICKSTART)
	$(BIN)/python tools/greedy_accuracy.py $(QUICKSTART)
	$(BIN)/async-grpo audit $(QUICKSTART_RUN)

check: $(DEV) ## lint, format, types, layers, configurations, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $(wildcard tools/*.py tools/sglang_cpu/*.py)
	$(BIN)/lint-imports
	@for config in $(CONFIGS); do \
	  echo "async-grpo check $$config"; $(BIN)/async-grpo check $$config > /dev/null || exit 1; done
	$(BIN)/python tools/gen_docs.py --check

fix: $(DEV) ## apply what ruff can repair, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV) ## write the generated pages in docs/
	$(BIN)/python tools/gen_docs.py

test: $(DEV) ## unit, contracts, integration, 5,000 simulated schedules, end to end
	$(BIN)/pytest -q -n 2
	$(BIN)/pytest -q -n 2 -m e2e tests/e2e

test-e2e: $(DEV) ## only the tests that train with real processes
	$(BIN)/pytest -q -n 2 -m e2e tests/e2e

test-faults: $(DEV) ## engines, rewards and networks that die, hang or lie, in real processes
	$(BIN)/pytest -q -n 2 -m faults tests/faults tests/e2e

$(SGLANG): tools/sglang_cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --requirement $<
	$(SGLANG_VENV)/bin/python tools/sglang_cpu/install_shims.py
	@touch $@

sglang-env: $(SGLANG) ## make .venv-sglang, in which a real SGLang serves on a CPU

test-sglang: $(DEV) ## the engine contract and a short run on real SGLang servers (`make sglang-env`)
	$(BIN)/pytest -q -m sglang tests/contracts/engine tests/sglang

$(GPU_VENV)/.installed: pyproject.toml constraints.txt constraints-gpu.txt
	$(PYTHON) -m venv $(GPU_VENV)
	grep -v '^torch==' constraints.txt > $(GPU_VENV)/constraints.txt
	$(GPU_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --constraint constraints-gpu.txt \
	  --constraint $(GPU_VENV)/constraints.txt --editable .
	@touch $@

$(SGLANG_GPU_VENV)/.installed: constraints-gpu.txt
	$(PYTHON) -m venv $(SGLANG_GPU_VENV)
	$(SGLANG_GPU_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) \
	  --constraint constraints-gpu.txt sglang
	@touch $@

gpu-envs: $(GPU_VENV)/.installed $(SGLANG_GPU_VENV)/.installed ## both environments of a machine with GPUs, with one torch

simulate: $(DEV) ## 100,000 simulated schedules of crashes, delays and losses
	$(BIN)/python -m tests.simulation.run --schedules 100000 --workers 2

clean: ## remove both environments, caches and the quickstart run
	rm -rf $(VENV) $(SGLANG_VENV) $(GPU_VENV) $(SGLANG_GPU_VENV) $(QUICKSTART_RUN) build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
