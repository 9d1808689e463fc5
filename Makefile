# make demo    fine-tune SmolLM2-135M with every state on NVMe (installs and fetches what it needs)
# make test    everything that continuous integration runs
# make check   linters and types only
# make bench   benchmarks
#
# Needs Python 3.11 or newer and git. PYTHON=python3.12 chooses another interpreter; PIP_ARGS is
# handed to pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small
# CPU build of torch.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test check bench clean

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2
BIN := .venv/bin
STAMP := .venv/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PACKAGES := zinf_core zinf_storage zinf_torch
# kvikio's host path is tested without a GPU; with its dependencies it would bring all of CUDA.
KVIKIO := kvikio-cu13 libkvikio-cu13 rapids-logger nvidia-cufile cuda-pathfinder packaging
SAY := @printf '==> %s\n'

demo: $(STAMP)
	$(SAY) "fetching SmolLM2-135M into demo-data/"
	@mkdir -p demo-data
	@if $(BIN)/python examples/fetch_demo_model.py demo-data; then \
	  config=examples/demo.toml; \
	else \
	  printf '==> %s\n' "SmolLM2-135M is not to be had: training a small random-init model instead"; \
	  config=examples/demo-offline.toml; \
	fi; \
	printf '==> zinf train %s\n' "$$config"; \
	$(BIN)/zinf train "$$config" --json demo-data/summary.json

test: check
	$(SAY) "pytest"
	@HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)
	$(SAY) "ruff check"
	@$(BIN)/ruff check .
	$(SAY) "ruff format --check"
	@$(BIN)/ruff format --check .
	$(SAY) "mypy --strict"
	@$(BIN)/mypy
	$(SAY) "import-linter"
	@$(BIN)/lint-imports
	$(SAY) "codespell"
	@$(BIN)/codespell $(PACKAGES) benchmarks docs examples tests *.md Makefile pyproject.toml

bench: $(STAMP)
	$(SAY) "benchmarks/step.py: training steps against plain PyTorch"
	@$(BIN)/python benchmarks/step.py
	$(SAY) "benchmarks/nvme_engine.py: the NVMe tier against fio, kvikio and DeepSpeed, where installed"
	@mkdir -p demo-data/bench
	@$(BIN)/python benchmarks/nvme_engine.py demo-data/bench
	$(SAY) "benchmarks/striped.py: two tiers as one against one"
	@$(BIN)/python benchmarks/striped.py
	$(SAY) "benchmarks/compress.py: codecs on weights and Adam moments"
	@$(BIN)/python benchmarks/compress.py

clean:
	rm -rf .venv build dist demo-data .mypy_cache .pytest_cache .ruff_cache

$(STAMP):
	$(SAY) "checking $(PYTHON)"
	@command -v $(PYTHON) >/dev/null || { echo "zinf needs Python 3.11 or newer; there is no $(PYTHON) here" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "zinf needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	$(SAY) "creating .venv"
	@$(PYTHON) -m venv .venv || { \
	  echo "could not create .venv: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
	$(SAY) "installing zinf and what it needs, once (torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -e '.[torch,hf,object,compress,bench,testing,dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -c constraints.txt $(KVIKIO) || echo "kvikio is not to be had: its tests will be skipped" >&2
	@rm -f .venv/installed-*
	@touch $@
