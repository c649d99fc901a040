# make demo | test | lint | clean; each creates .venv on first use.
#
#   PYTHON=python3.12    the interpreter that .venv is made with (3.11 or newer)
#   PIP_ARGS=...         more options for pip install, such as another package index
#   PYTEST_ARGS=...      more options for pytest, such as -k name or --slow

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
SHELL := bash

BIN := .venv/bin
STAMP := .venv/installed.stamp
TRITON := .venv/triton.stamp
ENGINE := build/smollm2.w4a8.engine
PROMPT := Write one paragraph about the sea.

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("Ingot needs Python 3.11 or newer, $(PYTHON) is " + v + ". Choose another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) --disable-pip-version-check -c constraints.txt -e '.[build,cuda,serve,store,bench,test]'
	@touch $@

# What compiles the kernels of GPU targets (extra gpu). CUDA builds of torch ask for a Triton of another version, for
# torch.compile, which nothing here uses: hence on its own.
$(TRITON): $(STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) --disable-pip-version-check --no-deps triton==3.9.0
	@touch $@

demo: $(STAMP)
	@mkdir -p build && rm -f $(ENGINE)
	$(BIN)/python tools/demo_models.py smollm2
	@ln -sfn "$$($(BIN)/python tools/demo_models.py smollm2 --path)" build/smollm2
	$(BIN)/ingot build build/smollm2 --target cpu --precision w4a8 -o $(ENGINE)
	$(BIN)/ingot inspect $(ENGINE)
	$(BIN)/ingot generate $(ENGINE) "$(PROMPT)"
	$(BIN)/ingot compare $(ENGINE) build/smollm2

# Two processes take half of the tests each, in order, so that few fixtures are made by both; who is done first takes
# from the other. The tests start many processes, which are to find modules compiled.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TRITON)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# The links give mypy the names that the folders are imported by (ingot.compiler, ...).
lint: $(STAMP)
	$(BIN)/ruff check .
	@mkdir -p build/mypy/ingot
	@for folder in compiler plugins runtime; do ln -sfn ../../../$$folder build/mypy/ingot/$$folder; done
	@set -o pipefail; $(BIN)/mypy build/mypy/ingot tools tests | sed 's#^build/mypy/ingot/##'

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find compiler plugins runtime tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
