# Two commands for everybody: `make demo` and `make test`. Both create .venv from requirements.lock first.
# Without a GPU, PyTorch's CPU wheels are much smaller:
#   make demo TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
# PIP_ARGS: of every pip install. TORCH_ARGS: of PyTorch's alone; everything else is checked by its hashes.
PIP_ARGS ?=
TORCH_ARGS ?=
# A file stays in one process, so that what its tests share is made once; long files come first.
PYTEST_ARGS ?= --numprocesses auto --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
# Tests start dozens of processes: none of them should compile the package again.
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.installed
TESSERACT := $(wildcard scripts/install_tesseract.sh)

.DEFAULT_GOAL := help
.PHONY: help env demo demo-text demo-video test test-long check format bench simulate-faults soak docs lock clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## Create the environment from the lock file (nothing to do when it is up to date)

PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))

# uv takes less than half the time, but knows neither PIP_ARGS nor pip's own settings: where it cannot, pip installs.
install = $(if $(PIP_ARGS)$(PIP_INDEX_URL),false,$(BIN)/uv pip install --python $(BIN)/python $(1)) || \
	$(BIN)/pip install --no-compile $(PIP_ARGS) $(1)
SELDOM := /(tests|testing|data|dialects|physics|pipelines|modular_pipelines|transformers/models|rllib|serve|debugpy|moto|mypy|onnxruntime|pip|plotly|pygments|setuptools)/

$(STAMP): requirements.lock requirements-torch.lock pyproject.toml $(PACKAGES:=/pyproject.toml) $(TESSERACT)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Spotlight needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11 or the like.")'
	$(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock >$(VENV)/uv.lock
	$(BIN)/pip install --no-compile $(PIP_ARGS) --no-deps --require-hashes -r $(VENV)/uv.lock
	$(call install,--no-deps --require-hashes -r requirements.lock)
	$(BIN)/pip install --no-compile $(PIP_ARGS) $(TORCH_ARGS) -r requirements-torch.lock
	$(call install,--no-build-isolation --no-deps -e . $(PACKAGES:%=-e %))
	@# pip compiles on one core. Left out: what is mostly not imported. A template that is no Python may fail.
	cd $(VENV) && bin/python -m compileall -qq -j 0 -x '$(SELDOM)' lib || true
	$(if $(TESSERACT),sh $(TESSERACT) || true)
	@touch $@

# Trains 8 of each group of 32 pictures: of the settings compared, the quickest to the score that 16 of 16 reach.
demo: env ## Train the tiny Qwen-Image on emulated spot nodes that vanish; leaves runs/demo with pictures and LoRA
	$(BIN)/spotlight train iterations=20 rollout.group_size=32 algorithm.train_samples=8 \
		learner.micro_batch_size=48 fleet.driver=ray fleet.spot.trace=minute fleet.drain_margin_s=2

demo-text: env ## The same with a tiny Qwen-Image that writes and must spell as asked, read by PP-OCR; leaves runs/testbed-text
	$(BIN)/spotlight train examples/testbed-text.yaml fleet.driver=ray fleet.spot.trace=minute fleet.drain_margin_s=2

demo-video: env ## The same with the tiny Wan, whose shapes must move as asked; leaves runs/testbed-video with videos
	$(BIN)/spotlight train examples/testbed-video.yaml fleet.driver=ray fleet.spot.trace=minute fleet.drain_margin_s=2

test: env ## Run the tests
	$(BIN)/pytest $(PYTEST_ARGS)

test-long: env ## Run the tests, the long tier included, on newly drawn examples
	HYPOTHESIS_PROFILE=new $(BIN)/pytest -m "" $(PYTEST_ARGS)

check: env ## Lint, formatting, types, and a strict build of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/spotlight $(patsubst %/__init__.py,%,$(wildcard packages/*/src/*/__init__.py)) scripts benchmarks tools tests/simulation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: env ## Repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env ## Compare rollouts with the pipeline, training steps with a plain loop, timesteps per pass, regroups with restarts
	$(BIN)/python -m benchmarks.rollout_loop --json build/rollout_loop.json
	$(BIN)/python -m benchmarks.training_step --json build/training_step.json
	$(BIN)/python -m benchmarks.timesteps_per_pass --json build/timesteps_per_pass.json
	$(BIN)/python -m benchmarks.regroup --json build/regroup.json
	$(BIN)/python -m benchmarks.new_worker --json build/new_worker.json
	$(BIN)/python -m benchmarks.model_fetch --json build/model_fetch.json
	$(BIN)/python -m benchmarks.commit_overhead --json build/commit.json
	$(BIN)/python -m benchmarks.cheap_previews --json build/cheap_previews.json
	$(BIN)/python -m benchmarks.publish --json build/publish.json

SEEDS ?= 300
simulate-faults: env ## Run the controller through SEEDS simulated faulty runs (300), e.g. SEEDS=10000
	$(BIN)/python -m tests.simulation.check --seeds $(SEEDS) --jobs $$(nproc)

soak: env ## Half an hour of training under SIGKILL and SIGSTOP on a local cluster, then the audit
	$(BIN)/python -m benchmarks.soak --json build/soak.json

docs: env ## Serve the documentation on http://127.0.0.1:8000, built again at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lock: ## Resolve requirements.lock again
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" scripts/lock.sh

clean: ## Remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site src/*.egg-info packages/*/src/*.egg-info
	find src packages tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
