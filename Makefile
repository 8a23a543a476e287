# The commands of this project; `make` lists the first ones, `make help-all` all. Needs Python 3.11 or newer and make, nothing else:
# everything is installed in .venv (from requirements.lock, with hashes) and .cache.

PYTHON ?=
# More than cores: much of a test of servers is waiting.
WORKERS ?= 5
ARGS ?=
export PYTHON
# Tests start hundreds of processes: what they import is compiled once, into .cache, also where the shell would keep
# nothing (half of a server's start, and ten seconds of each test process).
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode
# numpy starts a thread for each core, which nothing here uses: a quarter of what a test's server takes to start.
export OPENBLAS_NUM_THREADS ?= 1

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MAKEFLAGS += --no-print-directory
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What takes minutes, root or programs of the system's: each has a command of its own.
APART := not bench and not hosts and not crashes and not browser and not alerts and not deploy and not guide

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.* ##.*/\1/p' Makefile)
.DEFAULT_GOAL := help

help: ## these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2} /^# ====/{exit}' Makefile
	@echo "  PYTHON=... chooses the interpreter, WORKERS=$(WORKERS) the test processes, ARGS=... adds arguments"

help-all: ## all commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

$(READY): requirements.lock pyproject.toml .ci/build_native.py $(wildcard kvstore/native/*.[ch])
	@.ci/venv.sh

setup: $(READY) ## make .venv, which every other command does by itself
	@:

demo: $(READY) ## a small cluster on a temporary root, every byte verified, nothing left behind
	@$(BIN)/kvstore demo $(ARGS)

format: $(READY) ## format the code, fix what lint can fix
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

check: lint types contracts smoke ## format, lint, types, import contracts, a smoke test: two minutes

# Whole files go to one worker process, so that servers shared by a module are started once.
test: $(READY) ## the test suite
	@$(PYTEST) -q -m "$(APART)" $(ARGS)

nightly: $(READY) ## one part of the tests that take longer (PART=model); without PART, lists the parts
	@.ci/nightly.sh $(PART)

docs: $(READY) ## the documents as a site, with the API from docstrings (installs mkdocs)
	@.ci/docs.sh $(ARGS)

bench: $(READY) ## every table beside fio, memcpy and other stores, some minutes (ARGS="throughput --workers 1,32" for some)
	@$(BIN)/python -m benchmarks $(or $(ARGS),all --quick)

# ==== `make help` ends here

lint: $(READY) ## formatting, lint and dead code
	@echo "== format"
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . | head -40; echo "run: make format"; exit 1; }
	@echo "== lint"
	@$(BIN)/ruff check --quiet .
	@echo "== dead code"
	@$(BIN)/vulture >.cache/vulture.txt || [ $$? -eq 3 ]
	@! grep -E 'unused (function|method|class|property)|unreachable' .cache/vulture.txt | grep -v '^kvstore/connectors/'

types: $(READY) ## strict type checking
	@echo "== types"
	@$(BIN)/mypy

contracts: $(READY) ## which package may import which
	@echo "== import contracts"
	@$(BIN)/lint-imports --no-logo

smoke: $(READY) ## a test of each promise
	@echo "== smoke test"
	@$(BIN)/python -m pytest -q tests/test_smoke.py

proto: ## generate kvstore/v1 from proto/, with a pinned compiler
	@.ci/proto.sh

proto-check: ## kvstore/v1 is what proto/ generates
	@.ci/proto.sh --check

lock: ## resolve the dependencies anew (LOCK_FLAGS=--upgrade for newer versions)
	@.ci/lock.sh

clean: ## remove everything that make made, .venv included
	rm -rf $(VENV) .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What takes long, root or programs of the system. `make nightly` runs each, with limits of 25 minutes.

# ENGINES chooses some: make engines-test ENGINES="vllm sglang".
engines-test: $(READY) ## the connectors against real vLLM, LMCache, SGLang, transformers and Dynamo's indexer (installs them, without a GPU)
	@.ci/engines.sh $(ENGINES) -- $(ARGS)

events-test: $(READY) ## KV events beside etcd, collectors and killed publishers, then with real vLLM and Dynamo's indexer (installs them)
	@$(PYTEST) -q tests/events $(ARGS)
	@.ci/engines.sh --setup vllm events
	@KVSTORE_TEST_ENGINES=1 PYTHONPATH=.:gc $(BIN)/python -m pytest -q --timeout 600 \
		tests/engines/events tests/engines/vllm/test_kv_events.py $(ARGS)

# One after the other: they fill two cores by themselves.
chaos-test: $(READY) ## five minutes (KVSTORE_CHAOS_S=300) of killing, stopping and starting real processes, with figures
	@KVSTORE_CHAOS_S=$${KVSTORE_CHAOS_S:-300} $(BIN)/python -m pytest -q -s tests/chaos $(ARGS)

deploy-test: $(READY) ## chart, units and image against real tools (systemd; installs Helm's and Kubernetes' libraries)
	@.ci/deploy.sh $(ARGS)

guide-test: $(READY) ## three systems with systemd follow deploy/GUIDE.md word by word (root, debootstrap, systemd-container; 5 minutes)
	@$(BIN)/python -m pytest -q -s -m guide tests/deploy $(ARGS)

alerts-test: $(READY) ## a real Prometheus: every alert fires by its condition, no panel of a dashboard is empty (root, Debian's prometheus and bindfs; 5 minutes)
	@$(BIN)/python -m pytest -q -rs -m alerts tests/alerts $(ARGS)

hosts-test: $(READY) ## roots on NFS, with real kernels as server and clients (root, user-mode Linux, 15 minutes)
	@$(BIN)/python -m pytest -q -s -m hosts tests/hosts $(ARGS)

crash-test: $(READY) ## power cuts of hosts (ext4, XFS) and of NFS servers, with real kernels (root, user-mode Linux, KVSTORE_CRASH_CUTS=5 of each kind)
	@$(BIN)/python -m pytest -q -rP -n 2 -m crashes tests/hosts $(ARGS)

# KVSTORE_SCREENSHOTS=deploy/screenshots keeps its pictures.
browser-test: $(READY) ## every view of the dashboard in a headless Chromium, with its screenshots (apt install chromium-driver)
	@$(BIN)/python -m pytest -q -m browser tests/dashboard $(ARGS)

sanitizers-test: $(READY) ## the native library with the address and undefined behaviour sanitizers (gcc)
	@.ci/sanitizers.sh $(ARGS)

coverage: $(READY) ## lines that the test suite runs, as a report and in .cache/coverage/html (installs coverage)
	@.ci/coverage.sh $(ARGS)

compat: $(READY) ## the wheel works beside old and new numpy, protobuf, gRPC, and on each Python found
	@$(BIN)/python .ci/compat.py $(ARGS)

model: $(READY) ## every world and mutation of the protocol's model, on all cores: a quarter of an hour (ARGS=--quick: two minutes)
	@$(BIN)/python -m tests.model $(ARGS)

# ARGS chooses some: make mutants ARGS="native-*".
mutants: $(READY) ## every planted bug is caught by the test of its rule: about twenty minutes
	@$(BIN)/python -m tests.mutants $(ARGS)

sim: $(READY) ## simulates nodes and collectors with faults, 10,000 seeds on all cores, and 3,000 on one host without etcd
	@$(BIN)/python -m tests.sim --seeds 10000 $(ARGS)
	@$(BIN)/python -m tests.sim --seeds 3000 --profile one_host $(ARGS)

sim-mutants: $(READY) ## the first seed of the simulation that shows each mutant of a cluster's rules, of 300
	@$(BIN)/python -m tests.sim --seeds 300 --mutants $(ARGS)

bench-test: $(READY) ## the tests that run benchmarks, at tiny sizes
	@$(PYTEST) -q -m "bench" tests/benchmarks $(ARGS)

bench-check: $(READY) ## fails when a path has lost a third of its speed relative to a memory copy: about a minute
	@$(BIN)/python -m benchmarks.check $(ARGS)

results: $(READY) ## measures everything and writes benchmarks/RESULTS.md, draws plots (ARGS=--quick for some minutes)
	@$(BIN)/python -m benchmarks all --save benchmarks/results $(ARGS)
	@$(BIN)/python -m benchmarks.harness.report

performance: $(READY) ## measures and draws docs/performance.md and the picture of the README (needs vLLM's environment; an hour)
	@for name in serving throughput competitors steady; do \
		$(BIN)/python -m benchmarks $$name --save benchmarks/results $(ARGS) || exit 1; done
	@$(BIN)/python -m benchmarks.harness.report
