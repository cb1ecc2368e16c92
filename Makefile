# Three commands do all the set-up: `make tour` shows it in five minutes, `make demo` trains on real text, `make test` runs the tests.
PYTHON ?= python3
# Which torch to install; everything else is pinned by constraints.txt. For example: make demo TORCH=torch==2.12.1
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIBRARIES := $(VENV)/.integrations
TRITON := $(VENV)/.gpu-dev
SITE := $(VENV)/.docs
RELEASE := $(VENV)/.release
PINS := $(VENV)/constraints.txt

.PHONY: demo tour test test-long test-integrations test-kernels reproduce docs dist lint clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Four commands and their charts, in five minutes: tour-out/index.html.
tour: $(STAMP)
	$(BIN)/python examples/tour.py

# Byte code is kept, whatever the shell says: the tests start hundreds of processes, each of which would compile the sources again.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal -m "not long and not integrations"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 7200

test-integrations: $(LIBRARIES)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m integrations tests/integrations tests/torch/test_auto_cases.py

# GPU kernels on CPU tensors, under Triton's interpreter.
test-kernels: $(TRITON)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/cuda

# The claims of four papers, beside what this project finds: docs/results/*.md.
reproduce: $(STAMP)
	$(BIN)/python -m psgc.reproduce all --out docs/results

# The documentation site: build/site/index.html. Links are checked, and that a newcomer's questions are answered within three clicks.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/site/clicks.py build/site

# The sdist and the wheel, checked, and the bill of materials. Both have the same bytes whenever they are built from a commit.
dist: $(RELEASE)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist .
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python .ci/sdist.py dist/*.tar.gz
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/sbom.py --extra encrypt --extra watch --extra plan --out dist/psgc.cdx.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p psgc

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	grep -v '^torch==' constraints.txt > $(PINS)
	$(BIN)/python -m pip install --quiet -c $(PINS) "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e ".[demo,plan,encrypt,watch,dev]"
	touch $@

$(LIBRARIES): $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e ".[integrations]"
	touch $@

$(TRITON): $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e ".[gpu-dev]"
	touch $@

$(RELEASE): $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e ".[release]"
	touch $@

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo-out
