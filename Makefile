# make example   set up a .venv, run two requests through the engine, replay their trace
# make test      set up what is missing, run the tests
# make test-slow the slow tests (three minutes): processes of several ranks and how they end, the wheel in a clean environment,
#                and in Chromium (apt-get install chromium) the built docs and an export to Perfetto
# make check     lint + test + test-slow: what CI runs
# make lint      format, rules, types, import contracts
# make fuzz      10,000 random workloads, each step of each checked (minutes); FUZZ_ARGS="--seed 7"
# make fuzz-reader  broken traces for every command that reads one; FUZZ_ARGS="--count 5000 --seed 7"
# make floors    the tests of trace and tools with the lowest versions of all dependencies, in a second venv
# make bench     time the engine beside transformers on this machine (minutes)
# make gpu       the tests that need an NVIDIA GPU (make gpu-pair: two)
# make reference after a change, make all that is made from the code (a minute): lists, traces, outputs
# make golden    a part of it: record the golden trace of the tests anew
# make exercises a part of it: record the broken traces of docs/exercises anew
# make docs-output  a part of it: run the docs' commands, and put what they print into the pages
# make docs      build the docs as a site, in build/site
# make notebooks run the notebooks, and write them with their outputs
# make tiny-model  train the tiny Qwen3 anew (minutes on a GPU)
# make clean     remove what all of this made
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TRACE  ?= trace.jsonl
# worksteal: the tests of a file stay in one process, and share their fixtures.
PYTEST_ARGS ?= -n auto --dist worksteal
# A CPU-only torch is enough here; PIP_ARGS lets you add an index of your own.
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: example test test-slow lint check fuzz fuzz-reader bench gpu gpu-pair golden exercises reference docs docs-output notebooks tiny-model clean help floors
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "This needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch and the rest into $(VENV): minutes, most of it the download of torch."
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

example: $(VENV)/.run
	$(BIN)/nvtrace run example --out $(TRACE)
	$(BIN)/nvtrace replay $(TRACE)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/mypy notebooks/*.py
	$(BIN)/lint-imports --no-logo

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m slow

check: lint test test-slow

# anyio's own plugin for pytest does not load with this pytest. Left out: the tests that compare outputs with those of today's versions (docs, notebooks, golden, types).
FLOORS := test_at test_analyses test_analysis test_check test_cli_events test_cli_main test_cli_run test_compressed_traces test_config \
	test_events test_explain test_export test_llm test_loader test_logprobs test_oracle test_pipeline test_reader test_recorder \
	test_stop test_tail test_tiny_model test_tokenizer test_validate test_whatif
floors: constraints-lowest.txt
	$(PYTHON) -m venv build/floors
	build/floors/bin/python -m pip install -q $(PIP_ARGS) -c constraints-lowest.txt -e '.[engine,parquet,otlp]' pytest pytest-xdist hypothesis hatchling hatch-fancy-pypi-readme
	build/floors/bin/python -m pytest -q $(PYTEST_ARGS) -p no:anyio $(FLOORS:%=tests/%.py)

fuzz-reader: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.fuzz_reader $(FUZZ_ARGS)

fuzz: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.fuzz $(FUZZ_ARGS)

bench: $(VENV)/.run
	$(BIN)/nvtrace bench $(BENCH_ARGS)

gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m gpu

gpu-pair: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m gpu_pair

# Record the golden trace again, after looking at the difference that the tests show.
golden: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.golden

# docs/exercises/*.jsonl.zst, each by an engine with a fault put in.
exercises: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.faults

# All that is made from the code: words that the catalogs lack, docs/{en,zh}/{events,columns}.md,
# docs/trace.schema.json, the traces, the outputs, the pictures. Look at the difference.
reference: $(VENV)/.dev
	$(BIN)/python -m nvtrace.reference docs trace/nvtrace/catalog
	$(MAKE) golden
	$(MAKE) exercises
	$(MAKE) docs-output
	$(BIN)/python docs/images/draw.py

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml

# What stands below the commands in docs/en and docs/zh. Look at the difference.
docs-output: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.docs --write

# notebooks/*.ipynb, from the .py beside them; NOTEBOOKS="03 05" for some of them.
notebooks: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m support.notebooks $(NOTEBOOKS)

# Train the tiny Qwen3 that ships, anew (minutes on a GPU, under an hour on two CPU cores).
tiny-model: $(VENV)/.run
	PYTHONPATH=docs/tiny-qwen3 $(BIN)/python -m recipe --out nanovllm/assets/tiny-qwen3

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
