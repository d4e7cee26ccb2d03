# Two commands set everything up: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check pages docs clean

$(VENV)/installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints-dev.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/dash-attn demo

check: $(VENV)/installed
	$(BIN)/ruff check src tests examples tools docs
	$(BIN)/ruff format --check src tests examples tools docs
	$(BIN)/mypy

pages: $(VENV)/installed
	$(BIN)/python tools/write_pages.py

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: check
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) site demo-output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
