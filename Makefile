# Targets set everything up by themselves in .venv. To use a Python that is already set up: make PY=python3 <target>
.DEFAULT_GOAL := help
.PHONY: help demo test lint kernels test-cpu test-older gpu wheel clean

TRANSFORMERS := 5.24.0
OLDER_TRANSFORMERS := 4.57.6 5.17.0
PYTHON ?= python3
VENV ?= .venv
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Where no GPU is visible a torch is fixed; where one is, pip chooses the build that goes with it.
TORCH := $(if $(GPU),torch>=2.6,torch==2.13.0)

ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/ready
endif

# What depends on the version of transformers: the tests that make models of its families.
PATCH_TESTS := $(shell grep -l "^from families import" tests/test_*.py) tests/test_padding_layouts.py

# One thread a test process: two processes run at a time.
RUN := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
PYTEST := $(RUN) $(PY) -m pytest -q
WORKERS ?= 2
RESULTS ?= benchmarks/results

help:
	@echo "make demo     patch a model, fine-tune it, generate, compare with stock"
	@echo "make test     lint, build every kernel, run every test that needs no GPU"
	@echo "make kernels  compile csrc/ into hf_flash/libhf_flash.so"
	@echo "make gpu      GPU suite and benchmarks; writes $(RESULTS)/<gpu>.json and README's tables"
	@echo "make lint     ruff format --check and ruff check"
	@echo "make wheel    dist/hf_flash-*.whl for every supported architecture"

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q "$(TORCH)" "transformers==$(TRANSFORMERS)" "setuptools>=77" ninja
	HF_FLASH_BUILD=0 $(PY) -m pip install -q --no-build-isolation -e ".[test]"
	touch $@

demo: $(READY)
	$(if $(GPU),$(PY) setup.py -q build_ext --inplace)
	HF_HUB_OFFLINE=1 $(PY) examples/finetune.py --compare --generate

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

kernels: $(READY)
	$(PY) setup.py -q build_ext --inplace

test-cpu: $(READY)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not gpu"

# The patches again on the other supported transformers, each in an environment of its own.
test-older: $(OLDER_TRANSFORMERS:%=test-transformers-%)

test-transformers-%: $(VENV)-%/ready
	$(RUN) $(VENV)-$*/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu" $(PATCH_TESTS)

$(VENV)-%/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q "$(TORCH)" "transformers==$*" "setuptools>=77" ninja
	HF_FLASH_BUILD=0 $(VENV)-$*/bin/python -m pip install -q --no-build-isolation -e ".[test-patches]"
	touch $@
.PRECIOUS: $(VENV)-%/ready

test: lint kernels
	@$(MAKE) --no-print-directory test-older
	@$(MAKE) --no-print-directory test-cpu

gpu: kernels
	$(PY) benchmarks/record.py suite --output $(RESULTS)
	$(PY) benchmarks/attention.py --grid all --isolate --output $(RESULTS)
	$(PY) benchmarks/models.py --output $(RESULTS)
	$(PY) benchmarks/readme.py $(RESULTS)

wheel: $(READY)
	HF_FLASH_ARCHS="8.0;9.0a;10.0;12.0+PTX" $(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build dist *.egg-info hf_flash/libhf_flash.so
