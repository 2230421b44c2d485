# Two commands: `make demo` shows the product, `make test` runs the suite. `make check` is what CI runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export HF_HUB_OFFLINE := 1

.PHONY: demo test check lint types demos docs wheel clean

demo: $(READY)
	$(BIN)/align-circuits localize --model planted --style standard --out runs/demo/planted
	$(BIN)/align-circuits localize --out runs/demo/toy-llama

test: $(READY)
	$(BIN)/python -m pytest

check: lint types test demos docs wheel

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/basedpyright

# Every demo is executed from top to bottom, as a reader would.
demos: $(READY)
	set -e; for demo in demos/*.py; do echo "== $$demo"; $(BIN)/python "$$demo"; done

docs: $(READY)
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

# The wheel is installed without its dependencies into an empty folder and imported from there, away from this checkout.
wheel: $(READY)
	sh tests/wheel_check.sh $(abspath $(BIN)/python)

# torch first and exactly: a range would fetch the newest build with its CUDA libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llama-models
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build runs
