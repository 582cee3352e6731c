# make lab    opens the workbench in JupyterLab          (ARGS=--no-browser only prints the address)
# make test   checks and all tests                       make check   lint, format, types, contract tests
# make bench  the benchmarks, with tables
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
PYTEST_ARGS ?=

.PHONY: lab test check bench docs chromium clean

lab: $(VENV)/.installed
	$(BIN)/workbench lab $(ARGS)

test: check chromium
	$(BIN)/python -m pytest tests --ignore=tests/contract $(PYTEST_ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/contract $(PYTEST_ARGS)

bench: $(VENV)/.installed-test chromium
	$(BIN)/python -m benchmarks

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Install Python 3.11, or name another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "No venv could be made. On Debian: apt-get install python3-venv"; exit 1; }

# torch first and by its exact version, so that no other package draws in a newer and larger one.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet -c constraints.txt -e '.[quantization]'
	@# One estimate now compiles the allocator's replay, so that the first one on the panel does not wait for it.
	$(BIN)/workbench estimate --model.name_or_path=tiny-llama --device="Tesla T4" >/dev/null
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[quantization,test]'
	@touch $@

# The browser tests drive the system's Chromium.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
	  else echo "The browser tests need Chromium. Install it, on Debian: sudo apt-get install chromium"; exit 1; fi; }

clean:
	rm -rf $(VENV) build dist *.egg-info

# Pages that are made from the code; a contract test holds them equal to it.
docs: $(VENV)/.installed-test
	$(BIN)/python -c "from pathlib import Path; from workbench.recipe.reference import render_reference; Path('docs/recipe.md').write_text(render_reference())"
