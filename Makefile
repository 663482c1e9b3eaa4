# Every target makes the virtual environment and installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DATA ?= storyworld
ARGS ?=
# a process for each core, up to four, with one thread each: `make test ARGS='-n 0'` runs in one process
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: help setup demo test test-survival test-wheel test-all check docs golden bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train three methods on generated stories and compare them (DATA=file.txt for your text)"
	@echo "make test      run the tests, with coverage"
	@echo "make check     formatting, lint, types, import rules, links of the docs"
	@echo "make docs      the site of the docs, in build/site"
	@echo "make setup     the environment that test and check use"
	@echo "make test-all  the tests, slow ones too"
	@echo "make test-survival  the slow tests of kills, full disks, damage and several processes"
	@echo "make test-wheel the built wheel in a new environment, without and with extras"
	@echo "make golden    write the golden losses anew (a change of maths: say why)"
	@echo "make bench     time a training step of each method against PreNorm (ARGS='--layers 24')"
	@echo "make clean     remove caches and build outputs; data, runs and the environment stay"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "resroute needs Python 3.11 or newer, $(PYTHON) is %d.%d; name another with PYTHON=" % v)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade --constraint constraints.txt pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[report]'
	@command -v c++ >/dev/null || echo "no C++ compiler found: depth routing runs in plain torch, and torch.compile is not available"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --group docs
	@touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.installed
	$(BIN)/resroute demo --data '$(DATA)' $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) -m 'not slow' --cov --cov-report=term $(ARGS)

test-survival: $(VENV)/.dev
	$(PYTEST) -m slow tests/reliability tests/training tests/residual tests/test_own_model.py $(ARGS)

# what pip gives people: the built wheel in an environment of its own, without and with extras
test-wheel: $(VENV)/.dev
	rm -rf build/wheel
	$(BIN)/python -m hatchling build -t wheel -d build/wheel
	$(PYTHON) -m venv build/wheel/venv
	wheel=$$(echo build/wheel/*.whl) && install="build/wheel/venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt" && \
	$$install $$wheel && build/wheel/venv/bin/python -I scripts/smoke.py && \
	$$install "$$wheel[hf,report]" && build/wheel/venv/bin/python -I scripts/smoke.py --extras
	rm -rf build/wheel

test-all: $(VENV)/.dev
	$(PYTEST) --cov --cov-report=term $(ARGS)

check: $(VENV)/.dev docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# strict: a link that leads nowhere, or a docstring that cannot be read, is an error
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

golden: $(VENV)/.dev
	$(BIN)/python scripts/golden.py

bench: $(VENV)/.installed
	$(BIN)/resroute bench step $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage coverage.xml
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
