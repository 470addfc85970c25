# One command for each purpose; `make help` lists them. Developers and the continuous integration call `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The packages of tools/cluster, without torch and vLLM: the demo on your own cluster installs only these.
CLUSTER_VENV := .venv-cluster
CLUSTER_STAMP := $(CLUSTER_VENV)/.installed
CLUSTER := $(CLUSTER_VENV)/bin/python -m tools.cluster
# With vLLM for CUDA, which cannot be installed together with vLLM for the CPU.
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
# The packages that build the documentation's site.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
BENCH_VENV := $(if $(findstring CPU,$(BENCH)),$(VENV),$(if $(shell command -v nvidia-smi),$(GPU_VENV),$(VENV)))
# Where tools/cluster puts helm and kubectl.
CLUSTER_BIN := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/ppojob/bin
# Dozens of processes import torch and vLLM, so Python's compiled files are kept (otherwise an import takes 30 s more).
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(VENV)/bin:$(CLUSTER_BIN):$(PATH)
# A machine without uv gets it from pip, in a separate environment.
UV := $(or $(shell command -v uv),.build/uv/bin/uv)
PYTEST := $(PYTHON) -m pytest --durations=15
# A file's tests stay in one process, so that their fixtures are created once; more threads than processes would only wait.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) --numprocesses=logical --maxprocesses=4 --dist=loadfile

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environment ---

.PHONY: install
install: $(STAMP) ## Create .venv with the pinned development requirements and the project itself (editable).

.build/uv/bin/uv:
	python3 -m venv .build/uv
	.build/uv/bin/python -m pip install --quiet uv

.PHONY: install-gpu
install-gpu: $(GPU_STAMP) ## Create .venv-gpu, for `ppojob run` on this machine's NVIDIA GPUs.

$(STAMP): requirements/dev.txt
$(GPU_STAMP): requirements/trainer.txt
$(CLUSTER_STAMP): requirements/cluster.txt
$(DOCS_STAMP): requirements/docs.txt
$(STAMP) $(GPU_STAMP) $(CLUSTER_STAMP) $(DOCS_STAMP): pyproject.toml | $(filter .build/%,$(UV))
	test -x $(@D)/bin/python || $(UV) venv --quiet --python 3.11 $(@D)
	$(UV) pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps --requirement $(filter requirements/%,$^)
	$(UV) pip install --quiet --python $(@D)/bin/python --no-deps --editable .
	touch $@

COMPILE = $(UV) pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 pyproject.toml
COMPILE_CPU = $(COMPILE) --override requirements/overrides-cpu.txt --constraint
.PHONY: requirements
requirements: | $(filter .build/%,$(UV)) ## Pin the requirements again, with hashes, from pyproject.toml.
	$(COMPILE) --extra trainer --output-file requirements/trainer.txt
	@# The same versions as on GPUs: what is tested is what runs there.
	$(COMPILE_CPU) requirements/trainer.txt --extra dev --extra trainer-cpu --output-file requirements/dev.txt
	$(COMPILE_CPU) requirements/dev.txt --extra operator --output-file requirements/operator.txt
	$(COMPILE_CPU) requirements/dev.txt --extra trainer-cpu --output-file requirements/trainer-cpu.txt
	$(COMPILE_CPU) requirements/dev.txt --group cluster --output-file requirements/cluster.txt
	$(COMPILE_CPU) requirements/dev.txt --group docs --output-file requirements/docs.txt

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
types: install ## Check the types (mypy, strict), also those of the tests.
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --package tools.cluster --package tools.images --package tools.release --package tools.site --package tools.suite
	$(VENV)/bin/mypy --explicit-package-bases tests/unit tests/integration tests/e2e tests/gpu

.PHONY: contracts
contracts: install ## Check who imports whom (import-linter).
	$(VENV)/bin/lint-imports

.PHONY: generate
generate: install ## Write the CRD and its policy, the chart's copies, the references and diagrams of the documents, and the chart's table of values.
	$(PYTHON) -m ppojob_api.v1alpha1.generate
	$(PYTHON) charts/readme.py
	$(PYTHON) -m tools.site

.PHONY: plan-error
plan-error: install ## Compute the error of `ppojob plan` against measured runs again (some minutes), after a change of an engine or of the plan.
	OMP_NUM_THREADS=1 $(PYTHON) -m ppojob_trainer.planning.comparison > .build/comparison.json
	mv .build/comparison.json trainer_image/ppojob_trainer/planning/comparison.json

.PHONY: generate-check
generate-check: install ## Fail if a generated file is not what `make generate` would write.
	$(PYTHON) -m ppojob_api.v1alpha1.generate --check
	$(PYTHON) charts/readme.py --check
	$(PYTHON) -m tools.site --check

.PHONY: tools
tools: $(CLUSTER_STAMP) ## Build helm, which some checks call.
	@$(CLUSTER) build helm

.PHONY: unit
unit: tools ## Run the unit tests, except those marked slow.
	$(PYTEST_PARALLEL) tests/unit -m "not slow"

.PHONY: unit-slow
unit-slow: install ## Run the unit tests that take long: those that start several ranks or compile.
	$(PYTEST_PARALLEL) tests/unit -m "slow and not long"

.PHONY: golden
golden: install ## Compare the examples' manifests with the reviewed files; UPDATE=1 writes the files again.
	$(if $(UPDATE),$(PYTHON) -m tests.golden.golden_manifests --update)
	$(PYTEST) tests/golden

.PHONY: gpu
gpu: install-gpu ## Print the versions, and run the tests that need GPUs, as many files beside each other as there are GPUs for.
	$(UV) pip install --quiet --python $(GPU_VENV)/bin/python --constraint requirements/dev.txt pytest pytest-asyncio pytest-timeout
	$(GPU_VENV)/bin/python -m tools.suite.gpus $(GPU_TESTS)

.PHONY: bench
bench: $(BENCH_VENV)/.installed ## Measure a step in all placements and schedules on the GPUs of this machine (BENCH="--gpus 2 --shape 0.5B").
	PATH="$(CURDIR)/$(BENCH_VENV)/bin:$$PATH" $(BENCH_VENV)/bin/python -m tests.bench.bench_split --output output/bench-$$(date +%s) $(BENCH)

.PHONY: bench-operator
bench-operator: install ## Measure the operator with many jobs on the running cluster (BENCH="--jobs 200 --pods 3").
	$(PYTHON) -m tests.bench.bench_operator --output output/bench-operator-$$(date +%s) $(BENCH)

.PHONY: oracles
oracles: install ## Compare the formulas with verl's and TRL's, each in an environment of its own.
	$(PYTEST_PARALLEL) tests/oracles

# MKL and ATen choose their instructions by the processor, and each choice adds float32 numbers in another order.
NUMERICS := COMPATIBLE/default AVX2/avx2 AVX512/avx512
NUMERICS_MARKS ?= not long
NUMERIC_TESTS := $(addprefix tests/unit/trainer/,maths engines worker_groups/test_advantages_over_ranks.py) tests/oracles
.PHONY: numerics
# Each set has a cache: Inductor would compile code of another set from it.
numerics: install ## Run the tests that compare floats with each instruction set of this processor (an hour; less with NUMERICS_MARKS="not slow and not long").
	failed=; for set in $(NUMERICS); do \
	  grep -qi avx512f /proc/cpuinfo || [[ $$set != *512* ]] || continue; \
	  echo "MKL_CBWR=$${set%/*} ATEN_CPU_CAPABILITY=$${set#*/}"; \
	  TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.build/numerics/$${set%/*} \
	  MKL_CBWR=$${set%/*} ATEN_CPU_CAPABILITY=$${set#*/} $(PYTEST_PARALLEL) -q -m "$(NUMERICS_MARKS)" $(NUMERIC_TESTS) || failed+=" $$set"; \
	done; test -z "$$failed" || { echo "failed with$$failed"; exit 1; }

.PHONY: architecture
architecture: install ## Check the tree's own rules (sizes, layers, words).
	$(PYTEST) tests/architecture

.PHONY: check
check: lint types contracts generate-check unit golden architecture ## Run the quick checks, before every commit: one to three minutes on two cores.

# --- documentation ---

.PHONY: site
site: $(DOCS_STAMP) ## Build the documentation's site into .build/site; a broken link or a page outside the navigation fails.
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

.PHONY: site-serve
site-serve: $(DOCS_STAMP) ## Show the site at http://127.0.0.1:8000 and rebuild it when a page changes.
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs serve --strict --dev-addr 127.0.0.1:8000

# --- images, with docker, podman or buildah ---

# ENGINE, TAG, REGISTRY, BASE, UV_DEFAULT_INDEX, PIP_INDEX_URL, BUILD_OPTIONS and PUSH_OPTIONS: docs/install.md has them.
IMAGES := operator trainer trainer-cuda

.PHONY: image-operator
image-operator: ## Build the operator's image.
	python3 -m tools.images build operator

.PHONY: image-trainer
image-trainer: ## Build the trainer's image for CPU.
	python3 -m tools.images build trainer

.PHONY: image-trainer-cuda
image-trainer-cuda: ## Build the trainer's image for NVIDIA GPUs.
	python3 -m tools.images build trainer-cuda

.PHONY: image-check
image-check: ## Import in the images everything that their programs import, and add a package to the trainer's (IMAGES="operator").
	python3 -m tools.images check $(IMAGES)

.PHONY: push
push: ## Push the built images (REGISTRY=registry.example/team; IMAGES="operator trainer-cuda").
	python3 -m tools.images push $(IMAGES)

# --- the one-node cluster ---

.PHONY: cluster-up
cluster-up: $(CLUSTER_STAMP) ## Start the one-node Kubernetes with KubeRay; the first start builds it, which takes about 15 minutes.
	$(CLUSTER) up

.PHONY: cluster-down
cluster-down: $(CLUSTER_STAMP) ## Stop the one-node cluster, and remove everything that it left on the machine.
	$(CLUSTER) down

.PHONY: images
images: $(CLUSTER_STAMP) ## Build the operator's and the trainer's image into the running cluster.
	$(CLUSTER) image operator trainer

.PHONY: trainer
trainer: install ## Run the tests of the trainer's parts together, on a real Ray.
	$(PYTEST) tests/integration/trainer -m "not long"

.PHONY: integration
integration: install ## Run the tests of operator, chart and CRD on the cluster.
	$(PYTEST_PARALLEL) tests/integration/operator tests/integration/status_server -m "not long"
	@# They replace the definition of PPOJob, so no other test may have jobs at the same time.
	$(PYTEST) tests/integration/crd tests/integration/chart -m "not long"

FUZZ := 10000
.PHONY: fuzz
fuzz: install ## Send thousands of generated specs to the operator's code, and some of them to the cluster (FUZZ="10000"); kill runs at every moment.
	PPOJOB_FUZZ=$(FUZZ) $(PYTEST) --capture=no tests/unit/operator/test_fuzzed_specs.py tests/unit/operator/reconcile/test_states.py
	PPOJOB_FUZZ=$(FUZZ) $(PYTEST) tests/unit/trainer/controller/test_one_step_off.py tests/unit/trainer/controller/test_in_flight_updates.py
	PPOJOB_FUZZ=$$(($(FUZZ) / 10)) $(PYTEST) --capture=no --timeout=7200 tests/integration/operator/test_fuzzed_jobs.py tests/integration/operator/test_fuzzed_edits.py

.PHONY: e2e
e2e: install ## Run whole jobs on the cluster.
	$(PYTEST) tests/e2e -m "not long"

.PHONY: long
long: install ## Run the tests that take many minutes each: many ranks, a job that is stopped and moved, faults, real queues, enforced NetworkPolicies.
	$(PYTEST) tests/unit tests/integration tests/e2e -m long

.PHONY: soak
soak: install ## Run 24 jobs one after the other with a fault each minute: about two hours (SOAK_JOBS=24).
	SOAK_JOBS=$(or $(SOAK_JOBS),24) $(PYTEST) tests/e2e/test_soak.py -m long --capture=no

# --- a release ---

.PHONY: contract
contract: install ## Record what operator and trainer of this version send each other, into tests/contracts: at a release.
	$(PYTHON) -m tools.release.contract

.PHONY: release
release: tools | $(filter .build/%,$(UV)) ## Write sdist, wheel, chart package, image names and checksums into dist/.
	@$(PYTHON) -m tools.release

PYTHON_VERSIONS := 3.12 3.13
.PHONY: python-versions
python-versions: install | $(filter .build/%,$(UV)) ## Install, import and test the project on other versions of Python (PYTHON_VERSIONS="3.13").
	UV=$(abspath $(UV)) $(PYTHON) -m tools.release.pythons $(PYTHON_VERSIONS)

.PHONY: test
test: install ## Run all tests of the CI, two parts at a time, and print a table at the end.
	$(PYTHON) -m tools.suite

.PHONY: demo
demo: $(CLUSTER_STAMP) ## Start the one-node cluster and train a model on it; or train on your own (KUBECONFIG, IMAGE, OPERATOR_IMAGE).
	$(CLUSTER) demo

