# Two commands for a newcomer: serve and test. Both make .venv first, once. `make` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := common kvtransfer prefill_node decode_node router
SOURCES := pdserve.py $(PACKAGES) bench tests

.PHONY: help serve test check lint model bench compare vllm clean

help:
	@sed -n 's/^# \(make [a-z]*:.*\)/\1/p' $(MAKEFILE_LIST)

# make serve: starts router, one prefill and one decode node on this machine; ARGS are more flags of `pdserve up`
serve: $(VENV)/serve.stamp
	@exec $(BIN)/pdserve up $(ARGS)

# make test: lint, types, layers, then the tests; ARGS are more arguments of pytest
test: $(VENV)/test.stamp lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(ARGS)

# make lint: ruff, mypy, import-linter
lint: $(VENV)/test.stamp
	@echo "ruff"; $(BIN)/ruff check --quiet $(SOURCES)
	@echo "mypy"; $(BIN)/mypy --no-error-summary
	@echo "import-linter"; $(BIN)/lint-imports > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }

# make model: the transfer protocol's model test on EXAMPLES random interleavings; `make test` runs a fixed 2000
EXAMPLES := 20000
model: $(VENV)/test.stamp
	@MODEL_EXAMPLES=$(EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/kvtransfer/test_model.py $(ARGS)

# make bench: a pair beside one node and the bare linears, attention, transfer; takes minutes and wants an idle machine
bench: $(VENV)/test.stamp
	@OMP_NUM_THREADS=1 $(BIN)/python bench/pd.py $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/attention_cpu.py
	@OMP_NUM_THREADS=1 $(BIN)/python bench/transfer.py
	@echo "load on a running cluster (make serve): $(BIN)/python bench/serve.py --url http://127.0.0.1:8000 --num-prompts 32"

# make compare: pdserve beside vLLM, a core a node; PEER_PYTHON is the python of vLLM's environment (bench/README.md), ARGS are more flags
compare: $(VENV)/test.stamp
	@$(BIN)/python bench/compare.py --peer-python "$(or $(PEER_PYTHON),$(error make compare needs PEER_PYTHON=PATH: see 'Beside vLLM' in bench/README.md))" $(ARGS)

# make vllm: our router in front of two real vLLM nodes; VLLM_PYTHON is the python of vLLM's environment (bench/README.md); takes minutes
vllm: $(VENV)/test.stamp
	@VLLM_PYTHON="$(or $(VLLM_PYTHON),$(error make vllm needs VLLM_PYTHON=PATH: see 'Beside vLLM' in bench/README.md))" \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/peers/test_vllm.py $(ARGS)

# make clean: removes .venv, caches and build output; the model cache stays
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf __pycache__; find $(PACKAGES) tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/serve.stamp: pyproject.toml constraints.txt deploy/venv.sh
	@bash deploy/venv.sh $(VENV) .
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt deploy/venv.sh
	@bash deploy/venv.sh $(VENV) '.[test]'
	@touch $@ $(VENV)/serve.stamp
