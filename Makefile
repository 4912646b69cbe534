# Two commands: `make demo` shows the whole flow on a real model, `make test` runs the tests. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
WORKERS ?= 2

.PHONY: demo test check lint types bench clean help

help:
	@echo "make demo    engine, pruning, recovery and the table they give, on a model trained on real data"
	@echo "make test    the tests (GPU and data tests skip where there is none)"
	@echo "make check   ruff, types, tests: what CI runs"
	@echo "make bench   ONNX Runtime and OpenVINO beside whet on this CPU; writes benchmarks/results/cpu"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; a changed pyproject installs again.
$(VENV)/.core: $(BIN)/python pyproject.toml
	$(PIP) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) torch==2.13.0  # by itself and first: another release may be the CUDA build, gigabytes of it
	$(PIP) -e '.[test,search,torch-test,cuda-test]'
	@touch $@

$(VENV)/.check: $(VENV)/.test
	$(PIP) -e '.[check]'
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) -e '.[bench]'
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/python examples/digits/demo.py

test: $(VENV)/.test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile  # NumPy threads of two workers would fight for two cores

check: lint types test

lint: $(VENV)/.check
	$(BIN)/ruff check .

types: $(VENV)/.check
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu_peers.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
