# make demo | test | lint | bench | clean   (each makes .venv and installs what it needs)
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

.PHONY: demo test lint bench clean

# One stamp for the environment: it is stale when the dependencies change, and half an install
# leaves no stamp.
$(VENV)/.installed: pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch alone can be some gigabytes"
	$(PIP) install --upgrade pip
	$(PIP) install "$(TORCH)"
	$(PIP) install --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/ppo-kernels demo sentiment --out runs/demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m alone tests
	$(BIN)/python -m pytest -m "not alone" -n 2 tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.installed
	$(PIP) install --editable ".[bench]"
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
