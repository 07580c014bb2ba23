# Everything a newcomer or a build machine needs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CUDA := .venv-cuda
CUDA_READY := $(CUDA)/.ready

# Scripts are held to the types of what they call, not to annotations of their own.
RELAXED := --no-warn-unused-ignores $(addprefix --disable-error-code ,no-untyped-call no-untyped-def type-arg no-any-return)

.PHONY: help setup demo ui test test-all test-cuda setup-cuda check docs

help:
	@echo "make demo      set up, then walk the whole journey on a small real model (two minutes)"
	@echo "make ui        set up, then open a page in which the same model is planned for, trained and looked at"
	@echo "make test      set up, then run the tests"
	@echo "make test-all  the same with those that are slow"
	@echo "make test-cuda set up torch's CUDA build, then run the tests on a stand-in for a GPU"
	@echo "make docs      set up, then build the site into build/site"
	@echo "make check     set up, then lint, types and import contracts"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: pinned packages of 1.7 GB (with torch for CUDA 5.9 GB), some 6 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	@rm -rf demo
	@$(BIN)/autotune demo --output demo

ui: $(READY)
	@test -d demo-ui || $(BIN)/autotune demo --quick --output demo-ui
	@$(BIN)/autotune ui demo-ui

# A further process would pay half a minute for its imports.
test: $(READY)
	@$(BIN)/python -m pytest -n 2 --dist worksteal

# Properties are tried on examples that nobody has seen; a failure prints how to repeat it.
test-all: $(READY)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m '' --hypothesis-profile 'drawn anew'

setup-cuda: $(CUDA_READY)

# torch's CUDA build comes before the one of $(VENV), which lends all other packages.
$(CUDA_READY): $(READY)
	@echo "setting up $(CUDA) with torch's CUDA build (once; 5.5 GB, some four minutes)"
	@$(BIN)/python -m venv --without-pip $(CUDA)
	@PIP_EXTRA_INDEX_URL= $(BIN)/python -m pip --python $(CUDA) install --quiet --disable-pip-version-check torch==2.14.1
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(CUDA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth
	@touch $(CUDA_READY)

test-cuda: $(CUDA_READY)
	@tests/fakegpu/build $(CUDA) $(CUDA)/fakegpu
	@tests/fakegpu/run -m pytest tests/fakegpu -o addopts= -q -m 'not slow' -n 3
	@tests/fakegpu/run -m pytest tests/gpu -o addopts= -q -m 'not values'

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=.:benchmarks/gpu:benchmarks/gpu/parts $(BIN)/mypy benchmarks/gpu/*.py benchmarks/gpu/parts/*.py
	@MYPYPATH=.:benchmarks:benchmarks/world $(BIN)/mypy $(RELAXED) benchmarks/*.py benchmarks/world/*.py
	@$(BIN)/lint-imports

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
