# Two commands matter: `make reproduce` and `make test`. Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: help reproduce test test-slurm lint lock bench-engine bench-peers verify-reproduction clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or 3.12; set PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

reproduce: $(READY) ## the main job: tables, figures and report in results/ (ARGS="--config experiment=main")
	$(BIN)/snakemake --cores all $(ARGS)

test: $(READY) lint ## everything that CI runs
	$(BIN)/python -m pytest $(ARGS)

SLURM := slurmctld slurmd slurm-client munge

test-slurm: $(READY) ## the smoke DAG and sweeps on a real Slurm of one node (Debian; as root it installs what is missing)
	@export PATH="$$PATH:/usr/sbin"; which slurmctld slurmd sbatch munged > /dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $(SLURM) > /dev/null; }
	$(BIN)/python -m pytest -v tests/slurm/suite.py $(ARGS)

lint: $(READY) ## format checks, ruff, snakemake --lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint --config experiment=smoke

lock: $(READY) ## rewrite requirements.lock from what is installed
	@{ head -1 requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed 's/^torch==\([0-9.]*\)+cpu/torch==\1/' | sort -f; } > requirements.lock.partial
	@mv requirements.lock.partial requirements.lock

bench-engine: $(READY) ## how far the forwards are from the machine's limits (an otherwise idle machine)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m entmtp.engine_bench $(ARGS)

bench-peers: $(READY) ## our decoding beside transformers' on a finished run's prompts (ARGS="experiment=main"; an idle machine)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m entmtp.peers.bench $(ARGS)

verify-reproduction: $(READY) ## token-level results of a finished run against the committed hashes (ARGS="experiment=smoke")
	$(BIN)/python -m entmtp.reproduction $(ARGS)

clean: ## remove what can be made again, but for downloads, heads and .venv
	rm -rf results logs benchmarks outputs multirun .snakemake
