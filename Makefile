# Two commands matter: `make reproduce` and `make test`. Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
TOOLS := .tools/coverage
MEASURED := $(CURDIR)/.measured/data
ARGS ?=
# requirements-hashes.lock installs the same and checks every file's SHA-256 (LOCK=requirements-hashes.lock)
LOCK ?= requirements.lock

.PHONY: help reproduce test test-slurm test-faults lint lock lock-docs lock-hashes docs coverage test-wheel \
	bench-engine bench-peers bench-long bench-replay tables verify-reproduction archive clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or 3.12; set PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r $(LOCK)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "torch is a GPU build here: installing its libraries"; \
		$(BIN)/python -m pip install --quiet --constraint requirements.lock torch; }
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

reproduce: $(READY) ## the main job: tables, figures and report in results/ (ARGS="--config experiment=main")
	$(BIN)/snakemake --cores all $(ARGS)

# as many processes as there are cores; threads that wait for one another sleep, since another process wants the core
TESTS := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses logical --no-loadscope-reorder

test: $(READY) lint ## everything that CI runs
	$(TESTS) $(ARGS)

SLURM := slurmctld slurmd slurm-client munge

test-slurm: $(READY) ## the smoke DAG and sweeps on a real Slurm of one node (Debian; as root it installs what is missing)
	@export PATH="$$PATH:/usr/sbin"; which slurmctld slurmd sbatch munged > /dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $(SLURM) > /dev/null; }
	$(BIN)/python -m pytest -v tests/slurm/suite.py $(ARGS)

test-faults: $(READY) ## kills in every rule, a disk that is really full, a gigabyte of prompts (as root; some twenty minutes)
	ENTMTP_LARGE_MB=1000 $(BIN)/python -m pytest -v -s tests/faults/suite.py \
		tests/unit/test_robustness.py::test_a_large_file_is_streamed $(ARGS)

lint: $(READY) ## format checks, ruff, snakemake --lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint --config experiment=smoke

lock: $(READY) ## rewrite requirements.lock from what is installed
	@{ head -1 requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed 's/^torch==\([0-9.]*\)+cpu/torch==\1/' | sort -f; } > requirements.lock.partial
	@mv requirements.lock.partial requirements.lock

lock-hashes: $(READY) ## rewrite requirements-hashes.lock: requirements.lock with the SHA-256 of this platform's files
	$(BIN)/python tools/lock_hashes.py

bench-engine: $(READY) ## how far the forwards are from the machine's limits (an otherwise idle machine)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m entmtp.engine_bench $(ARGS)

# the value of an override in ARGS, or what it is without
said = $(or $(patsubst $(1)=%,%,$(filter $(1)=%,$(ARGS))),$(2))

bench-peers: $(READY) ## our decoding beside transformers' on a run's prompts, which is made first (ARGS="experiment=main"; an idle machine)
	@test -f $(call said,results,results)/$(call said,experiment,quick)/summary.json || $(BIN)/snakemake --cores all \
		--config experiment=$(call said,experiment,quick) overrides="$(filter results=%,$(ARGS))"
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m entmtp.peers.bench $(ARGS)

bench-long: $(READY) ## memory and speed over 10,000 tokens in one process (ARGS="texts=100")
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m entmtp.long_run $(ARGS)

bench-replay: $(READY) ## steps a second, 400 threshold pairs and the three offline stages by replay of a run (ARGS="experiment=main")
	$(BIN)/python -m entmtp.replay_bench $(ARGS)

verify-reproduction: $(READY) ## token-level results of a finished run against the committed hashes (ARGS="experiment=quick")
	$(BIN)/python -m entmtp.reproduction $(ARGS)

archive: $(READY) ## a finished run as one folder with a manifest in archives/ (ARGS="experiment=main")
	$(BIN)/python -m entmtp.archive $(ARGS)

docs: $(DOCS)/.ready ## the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean $(ARGS)

$(DOCS)/.ready: requirements-docs.lock
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps -r requirements-docs.lock
	touch $(DOCS)/.ready

lock-docs: ## rewrite requirements-docs.lock from the extra `docs` of pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["docs"], sep="\n")' | $(DOCS)/bin/python -m pip install --quiet -r /dev/stdin
	@{ head -1 requirements-docs.lock; $(DOCS)/bin/python -m pip freeze | sort -f; } > requirements-docs.lock.partial
	@mv requirements-docs.lock.partial requirements-docs.lock

coverage: $(READY) $(TOOLS)/.ready ## line coverage of src/entmtp by all tests, jobs of the DAG included; below 90% is an error
	rm -rf $(dir $(MEASURED))
	mkdir -p $(dir $(MEASURED))
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/measured:$(CURDIR)/$(TOOLS) COVERAGE_FILE=$(MEASURED) \
		COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(TESTS) $(ARGS)
	export PYTHONPATH=$(CURDIR)/$(TOOLS) COVERAGE_FILE=$(MEASURED); $(BIN)/python -m coverage combine --quiet && \
		$(BIN)/python -m coverage html --quiet --directory $(dir $(MEASURED))html --fail-under 0 && \
		$(BIN)/python -m coverage report

$(TOOLS)/.ready: requirements-coverage.lock | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TOOLS) -r requirements-coverage.lock
	touch $(TOOLS)/.ready

test-wheel: $(READY) ## build the wheel, install it into an empty environment and use it there (downloads the dependencies)
	$(BIN)/python tests/install_wheel.py $(ARGS)

tables: $(READY) ## every table and figure again, from a finished run's W&B runs alone (ARGS="experiment=main")
	$(BIN)/python -m entmtp.from_logs $(ARGS)

# What was trained follows from the run's prompts, so these stay, and what Snakemake knows of both.
clean: ## remove what can be made again, but for downloads, .venv, W&B's folders, and what was trained (results/*/heads, distill)
	@[ ! -d results ] || find results -type f ! -path '*/heads/*' ! -path '*/distill/*' ! -path '*/prompts/*' -delete
	@[ ! -d results ] || find results -type d -empty -delete
	@[ ! -d logs ] || find logs -mindepth 1 -maxdepth 1 ! -name wandb -exec rm -rf {} +
	rm -rf benchmarks outputs multirun .snakemake/log
