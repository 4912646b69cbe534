# Two commands: `make demo` shows the whole flow on a real model, `make test` runs the tests. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
WORKERS ?= 2
# The tests start hundreds of Python processes. Without bytecode files each would compile the package again, which doubles its start-up time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tensorflow test-long test-oldest test-kernels test-scrambled check lint types mutants soak fuzz bench results-check docs package-test clean help

help:
	@echo "make demo    engine, pruning, recovery and the table they give, on a model trained on real data"
	@echo "make test    the tests (GPU and data tests skip where there is none)"
	@echo "make test-long  the tests that take longest: larger networks, all samples of the real data, whole tutorials"
	@echo "make tensorflow  an environment with TensorFlow in .venv-tensorflow, with which the tests read its models (1.5 GB)"
	@echo "make test-kernels  a selection of the tests with the BLAS and oneDNN kernels of other CPUs that this one can run"
	@echo "make test-scrambled  a selection of the tests in which random tactics are the fastest; SEED=N draws others"
	@echo "make test-oldest  a selection of the tests with the oldest release of each dependency that is supported"
	@echo "make check   ruff, types, all tests"
	@echo "make soak    faults and concurrency for SECONDS (3600): kills, threads, growth of memory"
	@echo "make fuzz    mutated engines, models and data files for SECONDS (3600) each; FUZZ='--files N --seed N --workers N'"
	@echo "make mutants how many small breaks of the source the tests notice; an hour"
	@echo "make results-check  which published results are older than the code they measure"
	@echo "make docs    the documentation as a site in build/site, with warnings as errors"
	@echo "make package-test  the sdist and the wheel, installed into a clean environment"
	@echo "make bench   ONNX Runtime and OpenVINO beside whet on this CPU; writes benchmarks/results/cpu"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; a changed pyproject installs again.
$(VENV)/.core: $(BIN)/python pyproject.toml
	$(PIP) -e .
	@touch $@

# An environment of its own with the lowest release of each dependency that pyproject.toml allows; $(VENV) has the newest.
OLDEST := .venv-oldest
$(OLDEST)/.test: pyproject.toml tests/support/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tests/support/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt -e '.[test,search]'
	@touch $@

# TensorFlow requires another protobuf than onnx: an environment of its own, which the tests of its models find.
TENSORFLOW := .venv-tensorflow
$(TENSORFLOW)/.installed:
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0 tf2onnx==1.17.0 tf_keras==2.21.0
	@touch $@

tensorflow: $(TENSORFLOW)/.installed

ifneq ($(wildcard $(TENSORFLOW)/.installed),)
export WHET_TENSORFLOW_PYTHON ?= $(CURDIR)/$(TENSORFLOW)/bin/python
endif

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

$(VENV)/.mutants: $(VENV)/.test
	$(PIP) -e '.[mutants]'
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.test  # the reference has whet.training, which needs torch
	$(PIP) -e '.[docs]'
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/python examples/digits/demo.py

test: $(VENV)/.test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"  # NumPy threads of two workers would fight for two cores

test-long: $(VENV)/.test
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

# References must not depend on the BLAS kernels of a CPU, nor oneDNN's tactics on AVX-512. Kernels that this CPU cannot run are left out.
AVX512 := $(shell grep -qs avx512bw /proc/cpuinfo && echo yes)
BLAS_KERNELS := Haswell Zen $(if $(AVX512),SkylakeX)
test-kernels: $(VENV)/.test
	for kernel in $(BLAS_KERNELS); do echo "BLAS kernels of $$kernel"; \
	  OPENBLAS_CORETYPE=$$kernel OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) \
	    tests/ops/test_reference.py tests/ops/test_couples.py tests/passes/test_pass_golden.py || exit 1; done
	$(if $(AVX512),WHET_MAX_CPU_ISA=avx2 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/tactics)

# No test may assume which tactic is the fastest: another machine selects others. Every measured time is multiplied by a random factor.
SEED ?= 1
SCRAMBLED ?= tests/test_api.py tests/runtime tests/inspector tests/e2e tests/plugins tests/builder/test_build.py tests/builder/test_lock.py \
  tests/builder/test_sample_modes.py tests/builder/test_growth.py tests/cli/test_exec.py tests/cli/test_run.py
test-scrambled: $(VENV)/.test
	WHET_SCRAMBLED_TIMES=$(SEED) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(SCRAMBLED)

# Without PyTorch and CUDA packages. onnx.reference of the oldest onnx is wrong for some ops, so tests/ops judges with the newest alone.
test-oldest: $(OLDEST)/.test
	OPENBLAS_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" tests/test_*.py \
	  tests/network tests/engine/test_file.py tests/frontends/test_onnx_reader.py tests/frontends/test_onnx_writer.py tests/runtime tests/cli/test_run.py \
	  tests/search/test_recipe.py

check: lint types test test-long

lint: $(VENV)/.check
	$(BIN)/ruff check .

types: $(VENV)/.check
	$(BIN)/mypy

# Kills, terminations, threads and growth of memory; writes benchmarks/results/cpu/soak.json.
SECONDS ?= 3600
soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS)

# Outcomes are kept in build/fuzz, so that the next call continues; files of bad outcomes are in build/fuzz/crashes.
FUZZ ?= --files 1000000
fuzz: $(VENV)/.test
	@mkdir -p build/fuzz
	$(BIN)/python benchmarks/fuzz_files.py --seconds $(SECONDS) --resume build/fuzz/files.jsonl $(FUZZ)
	$(BIN)/python benchmarks/fuzz_engine.py --seconds $(SECONDS) --resume build/fuzz/engines.jsonl $(FUZZ)

# About an hour on two idle cores. MUTANTS holds options, such as --packages pruning --sample 10.
mutants: $(VENV)/.mutants
	$(BIN)/python tests/mutation/run.py $(MUTANTS)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu_peers.py

results-check:
	python3 benchmarks/check_results.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet

# The sdist must hold licence, tests, docs and examples; the wheel is built from it and must run outside the repository.
PACKAGE := build/package
package-test: $(BIN)/python
	rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)
	$(PYTHON) -m venv $(PACKAGE)/env
	$(PACKAGE)/env/bin/pip install --quiet --disable-pip-version-check build
	$(PACKAGE)/env/bin/python -m build --outdir $(PACKAGE)/dist . >$(PACKAGE)/log 2>&1 || { tail -20 $(PACKAGE)/log; exit 1; }
	$(PACKAGE)/env/bin/python tests/support/package.py $(PACKAGE)/dist
	$(PACKAGE)/env/bin/pip install --quiet --disable-pip-version-check "$$(ls $(PACKAGE)/dist/*.whl)[report]"
	cd $(PACKAGE) && env/bin/python -m whet --version && env/bin/whet zoo lenet5 -o lenet5.onnx && \
	  env/bin/whet exec --onnx=lenet5.onnx --builderOptimizationLevel=1 --duration=0.1 --saveEngine=l.engine >exec.log && \
	  env/bin/whet report l.engine

clean:
	rm -rf $(VENV) $(OLDEST) build dist src/*.egg-info
