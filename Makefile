PYTHON ?= python3
# A change of EXTRAS alone does not rebuild .venv: make -B setup EXTRAS=train,plot,dev
EXTRAS ?= train,eval,serve,plot,fla,docs,dev
PYTEST_FLAGS ?= -q

BIN := .venv/bin
CHECK_PYTHON := import sys; v = sys.version_info; v >= (3, 11) or sys.exit("headmax needs Python 3.11 or newer, $(PYTHON) is %d.%d" % v[:2] + "; name another: make PYTHON=python3.12")

.PHONY: help setup environment demo test test-faults test-browser pictures lint types test-gpu docs docs-serve wheel clean
.NOTPARALLEL:

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.stamp ## build .venv, again whenever pyproject.toml or constraints.txt change

.venv/.stamp: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory environment
	@touch $@

# Only what the demo needs, where there is no environment yet; the full one has all of it and stays as it is.
.venv/.demo: pyproject.toml constraints.txt $(wildcard .venv/.stamp)
	@test -e .venv/.stamp || $(MAKE) --no-print-directory environment EXTRAS=train,plot
	@touch $@

# setuptools first, so that nothing is built with a version that constraints.txt does not name.
environment:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'

demo: .venv/.demo ## train a small language model with plain, uniform and softmax heads on Python's own source, in runs/demo
	$(BIN)/headmax demo

test: lint types ## lint, types and every test that needs no GPU, no browser and no long wait
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_FLAGS)

test-faults: setup ## bad inputs, kills, full disks and two processes at once, over all commands; FAULTS_FLAGS="--seed 1"
	$(BIN)/python -m tests.faults $(FAULTS_FLAGS)

test-browser: setup ## open the report of headmax inspect in a headless Chromium
	$(BIN)/python -m pytest -m browser $(PYTEST_FLAGS)

pictures: setup runs/demo-recall/report.html ## docs/images anew: the theory's experiments, and the recall demo's report in a headless Chromium
	$(BIN)/python -m lab theory
	cp runs/theory/*.svg docs/images
	$(BIN)/python -m tests.analysis.browser runs/demo-recall/report.html docs/images/report.png

runs/demo-recall/report.html:
	$(BIN)/headmax demo recall

lint: setup ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## mypy
	$(BIN)/mypy

# On the machine's own Python, not in .venv: that one holds torch for the CPU, while a CUDA machine comes with a torch that fits its driver.
test-gpu: ## the tests that need a GPU, on the Python named by PYTHON, as it is installed
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(PYTEST_FLAGS)

docs: setup ## build the documentation site in build/site
	$(BIN)/python -m mkdocs build

docs-serve: setup ## show the documentation site on 127.0.0.1:8001, anew after every change
	$(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8001 --watch README.md --watch CHANGELOG.md --watch src

wheel: setup ## build dist/*.whl with the setuptools of .venv, so that nothing is downloaded
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src lab tests -name __pycache__ -prune -exec rm -rf {} +
