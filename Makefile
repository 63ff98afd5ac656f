# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
# PIP_ARGS goes to every pip install, for example PIP_ARGS="--extra-index-url URL" for another package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
DEMO_ARGS ?=
LAB_ARGS ?=
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal

# nbdev-export without its rewriting of __init__.py and without llms.txt; the pages of a module in the order of their names
define EXPORT
from pathlib import Path
from nbdev.doclinks import _build_modidx
from nbdev.export import nb_export
for path in sorted(Path('nbs').rglob('*.ipynb')):
    if '.ipynb_checkpoints' not in path.parts: nb_export(path, 'trainkit')
_build_modidx()
endef
export EXPORT

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow deepspeed lab site index shape bench format lint export badges clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.created:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'trainkit needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.course: $(VENV)/.created pyproject.toml constraints.txt requirements-course.txt
	@echo "Installing trainkit and what the course reads (a few minutes the first time) ..."
	$(PIP) -e .
	$(PIP) --no-deps -r requirements-course.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.course
	@echo "Installing what the tests and the lab need ..."
	$(PIP) --no-warn-conflicts -e ".[dev]"
	@touch $@

demo: $(VENV)/.course ## From plain text to four models on one page; DEMO_ARGS="--full" for a GPU
	$(BIN)/python -m trainkit demo $(DEMO_ARGS)

test: $(VENV)/.dev ## Every unit test, every lesson, a browser smoke
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev ## Also the tests and cells marked slow (the real 135 M model; minutes each)
	TRAINKIT_SLOW=1 $(PYTEST)

deepspeed: $(VENV)/.dev ## Install DeepSpeed as well, without compiling anything, and run its tests (best effort)
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation -e ".[deepspeed]"
	TRAINKIT_SLOW=1 $(TEST_ENV) $(BIN)/python -m pytest -q -m deepspeed

lab: $(VENV)/.dev ## JupyterLab on the course, at its index; LAB_ARGS="--allow-root" where you are root
	JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
	$(BIN)/jupyter lab --notebook-dir nbs $(LAB_ARGS) nbs/README.md

site: $(VENV)/.dev ## The documentation as web pages: course, guides, API reference, search: site/index.html
	$(BIN)/python tools/docs.py site

index: $(VENV)/.dev ## Write the index of the course, the first page of each chapter, pictures, and links between lessons
	$(BIN)/python tools/course.py

shape: $(VENV)/.dev ## How long and dense the lines are, how many types are unknown, how long a run's road is
	$(BIN)/python tools/shape.py

bench: $(VENV)/.dev ## The comparisons with peers that benchmarks/README.md reports
	for script in benchmarks/*.py; do echo "== $$script"; $(TEST_ENV) $(BIN)/python $$script || exit 1; done

format: $(VENV)/.dev ## Format notebooks, tests, tools and benchmarks
	$(BIN)/ruff format nbs tests tools benchmarks

lint: $(VENV)/.dev ## ruff and pyright
	$(BIN)/ruff format --check nbs tests tools benchmarks
	$(BIN)/ruff check nbs trainkit tests benchmarks tools
	$(BIN)/pyright --pythonpath $(BIN)/python trainkit

export: $(VENV)/.dev ## Write trainkit/*.py and the index of the course from the notebooks, and clean the notebooks
	$(BIN)/python -c "$$EXPORT"
	$(BIN)/nbdev-clean
	cp settings.ini trainkit/settings.ini
	$(BIN)/python tools/course.py

badges: ## Write the badges for Colab and Kaggle into the notebooks, with the hidden cell that installs
	$(PYTHON) tools/badges.py

clean: ## Remove the environment and everything that was made
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
