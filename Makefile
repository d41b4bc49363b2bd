# The two commands of the README are `make demo` and `make test`. VENV names another environment.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: demo test test-rest test-all nightly faults year fuzz bench canary flwr docs pictures install lint clean
.PHONY: cpu lowest dist requirements sbom publish lint-files

demo: $(VENV)/.demo
	$(BIN)/suture demo

# Threads of OpenBLAS wait by spinning: with one for each core a fit of two numbers takes eleven times the CPU.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# The fast tests: those that a change should pass before it is committed.
test: $(VENV)/.test
	$(PYTEST) --dist worksteal

# All others: FLARE's federations and simulator, whole runs, libraries of `dev`.
test-rest: install
	HYPOTHESIS_PROFILE=complete $(PYTEST) --dist loadgroup -m "complete and not faults"

test-all:
	$(MAKE) test
	$(MAKE) test-rest

# What takes too long for each change: see the script.
nightly: install
	.ci/nightly

# Kills processes of a federation on this machine; goes on where it stopped. Up to 90 minutes.
REPEATS ?= 3
faults: install
	SUTURE_FAULTS=faults.json SUTURE_FAULT_REPEATS=$(REPEATS) $(BIN)/python -m pytest tests/faults -m ""; \
	code=$$?; $(BIN)/python tests/faults/page.py faults.json && exit $$code

# The administration of a network on this machine: joins, backups, renewals and more. Ten minutes.
year: install
	$(BIN)/python benchmarks/year.py

# A million mutated inputs of each reader: hours. START goes on at a later seed.
CASES ?= 1000000
START ?= 0
fuzz: install
	$(BIN)/python tests/fuzz --cases $(CASES) --start $(START)

# The figures of speed: half an hour on two idle cores. ARGS="--quick" tries it, "--only PART" chooses.
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
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/python .ci/prose.py && $(BIN)/mypy

# The documentation as a site in site/; a broken link is an error. `python benchmarks/reference.py` writes the generated pages.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# All that README and docs show of runs: pictures (needs chromium), the tutorial's recording, the notebook's outputs.
pictures: install
	$(BIN)/python benchmarks/pictures.py && $(BIN)/python benchmarks/first_ten_minutes.py && \
	$(BIN)/python benchmarks/notebook_outputs.py

# Sdist and wheel, in dist/. The wheel is built from the sdist.
dist: .venv-tools/.installed
	rm -f dist/suture-*
	$(TOOLS)/python -m build && $(TOOLS)/twine check --strict dist/*.whl dist/*.tar.gz

# All that an installation takes, with hashes, for `pip install --require-hashes -r`. EXTRAS="--extra tables"
requirements: .venv-tools/.installed
	mkdir -p dist
	$(TOOLS)/uv pip compile --quiet --no-header --generate-hashes --python $(PYTHON) -c constraints.txt $(EXTRAS) \
	  pyproject.toml --output-file dist/requirements.txt

# The same as a bill of materials (CycloneDX), whose writer reads no version from a module.
VERSION = $(shell sed -n 's/^VERSION = //p' custom/suture/core/__init__.py)
sbom: requirements
	sed 's/^dynamic = .*/version = $(VERSION)/' pyproject.toml | PYTHONWARNINGS=ignore $(TOOLS)/cyclonedx-py requirements \
	  --pyproject /dev/stdin dist/requirements.txt --output-file dist/suture.cdx.json

# Uploads dist/; only the workflow of a release may.
publish: .venv-tools/.installed
	$(TOOLS)/uv publish --trusted-publishing always dist/*.whl dist/*.tar.gz

# What GitHub reads, and CITATION.cff.
CHECK = $(TOOLS)/check-jsonschema --quiet --builtin-schema
lint-files: .venv-tools/.installed
	$(TOOLS)/zizmor --offline --quiet .github
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) vendor.dependabot .github/dependabot.yml
	$(CHECK) vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(CHECK) vendor.citation-file-format CITATION.cff

# The fast tests with the lowest version of each requirement, in an environment of its own.
lowest: .venv-lowest/.test
	$(MAKE) test VENV=.venv-lowest

.venv-lowest/.test: pyproject.toml .venv-tools/.installed
	$(TOOLS)/uv venv --quiet --clear --python $(PYTHON) .venv-lowest
	$(TOOLS)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e ".[test]"
	touch $@

# PyTorch's CPU build, before any other target: a third of the download.
cpu: .venv-tools/.installed
	$(PYTHON) -m venv $(VENV)
	$(TOOLS)/uv pip install --quiet --python $(VENV) --torch-backend=cpu -c constraints.txt torch torchvision

TOOLS = .venv-tools/bin
.venv-tools/.installed: .ci/tools.txt
	$(PYTHON) -m venv .venv-tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

install: $(VENV)/.dev

# The demo needs no extra.
$(VENV)/.demo: PACKAGES = .
$(VENV)/.test: PACKAGES = .[test]
$(VENV)/.dev: PACKAGES = .[dev]
$(VENV)/.%: pyproject.toml constraints.txt
	@test -d $(VENV) || command -v nvidia-smi > /dev/null || echo "No NVIDIA driver was found: 4 of the 5.9 GB to be" \
	  "installed will not be used. Ctrl-C, and README.md says how to have PyTorch without them." >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$(PACKAGES)"
	touch $@

clean:
	rm -rf $(VENV) .venv-flwr .venv-tools .venv-lowest .canary dist site .mypy_cache .ruff_cache .pytest_cache
