# One command per intent; `make help` lists them. The continuous integration calls `make test`, people too.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# With vLLM for CUDA, which has no place beside vLLM for the CPU.
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
BENCH_VENV := $(if $(findstring cpu,$(BENCH)),$(VENV),$(if $(shell command -v nvidia-smi),$(GPU_VENV),$(VENV)))
# Where tools/cluster puts helm and kubectl.
CLUSTER_BIN := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/ppojob/bin
# Dozens of processes load torch and vLLM in turn: what Python compiles once is kept (30 s a process otherwise).
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(VENV)/bin:$(CLUSTER_BIN):$(PATH)
# A machine without uv gets it from pip, in an environment of its own.
UV := $(or $(shell command -v uv),.build/uv/bin/uv)
PYTEST := $(PYTHON) -m pytest
# A file's tests stay in one process, so that what they share is made once; more threads than processes would only wait.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) --numprocesses=logical --maxprocesses=4 --dist=loadfile

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environment ---

.PHONY: install
install: $(STAMP) ## Make .venv with the pinned development requirements and the project itself (editable).

.build/uv/bin/uv:
	python3 -m venv .build/uv
	.build/uv/bin/python -m pip install --quiet uv

.PHONY: install-gpu
install-gpu: $(GPU_STAMP) ## Make .venv-gpu, for `ppojob run` on this machine's own NVIDIA GPUs.

$(STAMP): requirements/dev.txt
$(GPU_STAMP): requirements/trainer.txt
$(STAMP) $(GPU_STAMP): pyproject.toml | $(filter .build/%,$(UV))
	test -x $(@D)/bin/python || $(UV) venv --quiet --python 3.11 $(@D)
	@# In another folder, because pyproject.toml keeps triton away, also from requirements that name it.
	cd / && $(abspath $(UV)) pip install --quiet --python $(CURDIR)/$(@D)/bin/python --require-hashes --no-deps \
	  --requirement $(CURDIR)/$(filter requirements/%,$^)
	$(UV) pip install --quiet --python $(@D)/bin/python --no-deps --editable .
	touch $@

COMPILE = $(UV) pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 pyproject.toml
.PHONY: requirements
requirements: | $(filter .build/%,$(UV)) ## Pin the requirements anew, with hashes, from pyproject.toml.
	$(COMPILE) --extra dev --extra trainer-cpu --output-file requirements/dev.txt
	$(COMPILE) --extra operator --constraint requirements/dev.txt --output-file requirements/operator.txt
	$(COMPILE) --extra trainer-cpu --constraint requirements/dev.txt --output-file requirements/trainer-cpu.txt
	@# pyproject.toml keeps triton away from machines without a GPU; the CUDA image needs the one that torch 2.13 names.
	$(COMPILE) --extra trainer --override <(echo 'triton==3.7.1') --output-file requirements/trainer.txt

# --- quick checks ---

.PHONY: lint
lint: install ## Lint and check the format (ruff).
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

.PHONY: format
format: install ## Format the code and fix what ruff can fix.
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: types
types: install ## Check the types (mypy, strict), those of the tests' fakes too.
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --package tools.cluster --package tools.release
	$(VENV)/bin/mypy --explicit-package-bases tests/unit

.PHONY: contracts
contracts: install ## Check who imports whom (import-linter).
	$(VENV)/bin/lint-imports

.PHONY: generate
generate: install ## Write the CRD, the chart's copy of it, the field reference and the chart's table of values.
	$(PYTHON) -m ppojob_api.v1alpha1.generate
	$(PYTHON) charts/readme.py

.PHONY: generate-check
generate-check: install ## Fail if a generated file is not what `make generate` would write.
	$(PYTHON) -m ppojob_api.v1alpha1.generate --check
	$(PYTHON) charts/readme.py --check

.PHONY: tools
tools: install ## Build helm, which some checks call.
	@$(PYTHON) -m tools.cluster build helm

.PHONY: unit
unit: tools ## Run the unit tests, but for those marked slow (`make trainer` has them).
	$(PYTEST_PARALLEL) tests/unit -m "not slow"

.PHONY: golden
golden: install ## Compare the examples' manifests with those that were reviewed; UPDATE=1 writes them anew.
	$(if $(UPDATE),$(PYTHON) -m tests.golden.golden_manifests --update)
	$(PYTEST) tests/golden

.PHONY: bench
bench: $(BENCH_VENV)/.installed ## Measure a step in all placements and schedules on the GPUs of this machine (BENCH="--gpus 2 --shape 0.5B").
	PATH="$(CURDIR)/$(BENCH_VENV)/bin:$$PATH" $(BENCH_VENV)/bin/python -m tests.bench.bench_split --output output/bench-$$(date +%s) $(BENCH)

.PHONY: bench-operator
bench-operator: install ## Measure the operator with many jobs on the running cluster (BENCH="--jobs 200 --pods 3").
	$(PYTHON) -m tests.bench.bench_operator --output output/bench-operator-$$(date +%s) $(BENCH)

.PHONY: oracles
oracles: install ## Compare the formulas with verl's and TRL's, each in an environment of its own.
	$(PYTEST) tests/oracles

.PHONY: architecture
architecture: install ## Check the tree's own rules (sizes, layers, words).
	$(PYTEST) tests/architecture

.PHONY: check
check: lint types contracts generate-check unit golden architecture ## The quick part, before every commit: one to three minutes on two cores.

# --- the one-node cluster ---

.PHONY: cluster-up
cluster-up: install ## Start the one-node Kubernetes with KubeRay (the first time builds it: about 15 minutes).
	$(PYTHON) -m tools.cluster up

.PHONY: cluster-down
cluster-down: install ## End it and remove all that it left on the machine.
	$(PYTHON) -m tools.cluster down

.PHONY: images
images: install ## Build the operator's and the trainer's image into the running cluster.
	$(PYTHON) -m tools.cluster image operator trainer

.PHONY: trainer
trainer: install ## Run the trainer's parts together on a real Ray (about 30 minutes), and the slow unit tests.
	$(PYTEST) tests/unit -m slow
	$(PYTEST) tests/integration/trainer -m "not long"

.PHONY: integration
integration: install ## Run operator, chart and CRD against the cluster.
	$(PYTEST) tests/integration --ignore=tests/integration/trainer -m "not long"

.PHONY: e2e
e2e: install ## Run whole jobs on the cluster.
	$(PYTEST) tests/e2e -m "not long"

.PHONY: long
long: install ## Run the tests that take many minutes each: five Ray nodes, a job that is stopped and moved, real queues.
	$(PYTEST) tests/integration tests/e2e -m long

# --- a release ---

.PHONY: release
release: tools | $(filter .build/%,$(UV)) ## Write sdist, wheel, chart package, image names and checksums into dist/.
	@$(PYTHON) -m tools.release

PYTHON_VERSIONS := 3.12 3.13
.PHONY: python-versions
python-versions: install | $(filter .build/%,$(UV)) ## Install, import and test the project on other versions of Python (PYTHON_VERSIONS="3.13").
	UV=$(abspath $(UV)) $(PYTHON) -m tools.release.pythons $(PYTHON_VERSIONS)

.PHONY: test
test: install ## Everything, with the cluster and the images built meanwhile; a table at the end.
	$(PYTHON) -m tools.cluster test

.PHONY: demo
demo: install ## From nothing to a trained model on the one-node cluster (or on yours: KUBECONFIG, IMAGE, OPERATOR_IMAGE).
	$(PYTHON) -m tools.cluster demo

