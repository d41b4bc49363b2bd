# The two commands of the README: `make demo` and `make test`. VENV names another environment.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: demo test faults fuzz bench canary flwr docs pictures install lint clean

demo: install
	$(BIN)/suture demo

# A file of tests at a time, those that start FLARE first, with a worker more than there are cores: see tests/conftest.py.
# Threads of OpenBLAS wait by spinning: with one for each core a fit of two numbers takes eleven times the CPU.
test: install
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Kills processes of a federation on this machine; goes on where it stopped. Up to 90 minutes.
REPEATS ?= 3
faults: install
	SUTURE_FAULTS=faults.json SUTURE_FAULT_REPEATS=$(REPEATS) $(BIN)/python -m pytest tests/faults -m ""; \
	code=$$?; $(BIN)/python tests/faults/page.py faults.json && exit $$code

# A million mutated inputs of each reader: hours. `make test` runs twenty seconds of it; START goes on at a later seed.
CASES ?= 1000000
START ?= 0
fuzz: install
	$(BIN)/python tests/fuzz --cases $(CASES) --start $(START)

# The figures of speed: half an hour on two idle cores. ARGS="--quick" tries it, "--only PART" and "--against FILE" choose.
bench: install flwr
	$(BIN)/python benchmarks/speed.py $(ARGS)

# The tests of FLARE with another version of it, in an environment of its own; prints a table.
canary: install
	$(BIN)/python benchmarks/canary.py $(FLARE)

# An anchor of `bench`, in an environment of its own.
flwr: .venv-flwr/.installed

.venv-flwr/.installed: benchmarks/anchors/requirements.txt
	$(PYTHON) -m venv .venv-flwr
	.venv-flwr/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy

# The documentation as a site in site/; a broken link is an error. `suture reference` writes the generated pages.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# All that README and docs show of runs: pictures (needs chromium), the tutorial's recording, the notebook's outputs.
pictures: install
	$(BIN)/python benchmarks/pictures.py && $(BIN)/python benchmarks/first_ten_minutes.py && \
	$(BIN)/python benchmarks/notebook_outputs.py

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-flwr .canary site .mypy_cache .ruff_cache .pytest_cache
