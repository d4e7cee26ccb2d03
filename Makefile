# Two commands set everything up: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

CHECKED := setup.py src tests examples tools docs benchmarks
KERNELS := $(wildcard src/dash_attn/backends/hopper/kernels/*/*.cuh)
# 1: `make check` also refuses a kernel that `make format-kernels` would change.
CHECK_KERNELS ?= 1

.PHONY: demo test test-all check check-kernels format format-kernels pages docs kernels clean

# PyTorch's CUDA builds ask for an older NVRTC than the wheel's, with which kernels are tested. Without a GPU PyTorch does not use it.
NVRTC_OF_WHEEL := $(shell sed -n 's/^NVRTC = "\([0-9.]*\)".*/\1/p' tools/build_with_kernels.py)

$(VENV)/installed: pyproject.toml constraints-dev.txt tools/build_with_kernels.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints-dev.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps nvidia-cuda-nvrtc==$(NVRTC_OF_WHEEL)
	touch $@

demo: $(VENV)/installed
	$(BIN)/dash-attn demo

check: $(VENV)/installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
ifeq ($(CHECK_KERNELS),1)
check: check-kernels
endif

check-kernels: $(VENV)/installed
	$(BIN)/clang-format --dry-run --Werror $(KERNELS)

format: $(VENV)/installed
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

format-kernels: $(VENV)/installed
	$(BIN)/clang-format -i $(KERNELS)

pages: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python tools/write_pages.py

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every kernel with another compiler: make kernels NVRTC=13.0.88
NVRTC ?= 13.0.88
kernels: $(VENV)/installed
	$(PYTHON) -m venv --clear .venv-nvrtc
	.venv-nvrtc/bin/pip install -q cuda-bindings nvidia-cuda-nvrtc==$(NVRTC)
	$(BIN)/python -c "import site; print(*site.getsitepackages(), sep='\n')" > .venv-nvrtc/others
	cp .venv-nvrtc/others $$(.venv-nvrtc/bin/python -c "import site; print(site.getsitepackages()[0])")/zz_others.pth
	PYTHONPATH=src .venv-nvrtc/bin/python -m benchmarks.kernels

# One thread in each process: on two cores more would wait for each other. `make test-all` has as many as PyTorch takes.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not exhaustive"

# Everything, also what takes minutes: every model of transformers, long searches. Before a release, or a change of the doors.
test-all: check
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) site demo-output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
