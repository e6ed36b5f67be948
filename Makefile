# The two commands are `make serve` and `make test`. Both create .venv and install Raydix on their first run.

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
# On Linux, PyPI's torch comes with CUDA. On a machine without a GPU, PyTorch's index of CPU wheels saves gigabytes
# (see pytorch.org, "Get Started"):  make serve TORCH_INDEX=<url of the CPU wheels>
TORCH_INDEX ?=
# The model that `make serve` serves; by default the one in deployments.yaml. A name without a slash is downloaded
# first, if no file has that name:  make serve MODEL=smollm2-135m
MODEL  ?=

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The publisher to Grafana needs another urllib3 than Ray does, so it has a virtual environment of its own.
PUBLISHER := .venv-grafana
# Third-party clients, which are run against the application, have another one.
CLIENTS   := .venv-clients
INDEX     := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PACKAGES  := cache deployments engine monitoring router

.PHONY: serve pulled dist test units e2e quick lint install bytecode clients clients-installed native native-asan native-tsan clean

serve: $(INSTALLED) pulled
	@exec $(BIN)/raydix serve deployments.yaml --port $(PORT) $(if $(MODEL),--model '$(MODEL)')

pulled: $(INSTALLED)
	@case '$(MODEL)' in ''|*/*|demo) ;; *) test -e '$(MODEL)' || $(BIN)/raydix pull '$(MODEL)' >/dev/null ;; esac

# In turn, or in parallel: make -j3 --output-sync=target test
test: lint units e2e

# Unit tests yield to the end-to-end tests that run in parallel, which mostly wait for their own processes. Many unit
# tests wait, too: three at a time keep two cores busy.
units: $(INSTALLED) $(PUBLISHER)/.installed
	nice -n 19 $(BIN)/python -m pytest -n 3 --dist worksteal -m 'not e2e'

e2e: $(INSTALLED)
	$(BIN)/python -m pytest tests/e2e tests/cluster -m e2e

# The tests that a change can break, up to three minutes on two cores: see tests/house/support/quick.py.
# make quick ARGS=--list
quick: $(INSTALLED)
	@$(BIN)/python -m tests.house.support.quick $(ARGS)

# Not part of `make test`, because it installs third-party clients.
clients: $(INSTALLED) $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest --disable-warnings --confcutdir=tests/clients tests/clients \
		$(if $(CLIENTS_TABLE),--table $(CLIENTS_TABLE))

clients-installed: $(CLIENTS)/.installed

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice -n 10 $(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt setup.py engine/kernels/build.py $(wildcard engine/kernels/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(INDEX) -e '.[test]' -c constraints.txt
	@test ! -e engine/kernels/libraydix.log || { echo "The native kernels:"; cat engine/kernels/libraydix.log; } >&2
	@$(MAKE) --no-print-directory bytecode
	@touch $@

# Where Python may write no bytecode (PYTHONDONTWRITEBYTECODE, a read-only directory), each process of each start would
# compile torch, Ray and transformers again, which takes longer than the rest of the start. pip would compile with one
# core, so it does not compile. Some files of packages are for a newer Python and fail; a failure in our own packages is
# an error. Python notices changed sources by their time.
bytecode:
	@echo "Compiling Python's bytecode on all cores, so that no start has to: half a minute on two"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || \
		echo "A few files of packages were left out: they are not for this Python"
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES)

# Builds the CPU kernels again. The two targets below test them under sanitizers. `make test` does not run these,
# because they take minutes.
native: $(INSTALLED)
	$(BIN)/python -m engine.kernels.build

# Tests that build kernels are omitted, because a compiler does not run under a preloaded sanitizer.
NATIVE_TESTS ?= tests/engine/kernels tests/engine/attention/test_attention.py tests/engine/sampling/test_native_sampler.py \
	--ignore=tests/engine/kernels/triton --ignore=tests/engine/kernels/test_build.py
# Python itself leaks memory, and torch's OpenMP is not instrumented, so only the kernels' own threads are checked.
native-asan: $(INSTALLED)
	$(BIN)/python -m engine.kernels.build --sanitizer address -o build/asan/libraydix.so
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
		RAYDIX_NATIVE_LIBRARY=$(CURDIR)/build/asan/libraydix.so $(BIN)/python -m pytest $(NATIVE_TESTS)

native-tsan: $(INSTALLED)
	$(BIN)/python -m engine.kernels.build --sanitizer thread --also tests/engine/kernels/openmp.c -o build/tsan/libraydix.so
	LD_PRELOAD=$$(gcc -print-file-name=libtsan.so) TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
		RAYDIX_NATIVE_LIBRARY=$(CURDIR)/build/tsan/libraydix.so $(BIN)/python -m pytest $(NATIVE_TESTS)

# A source distribution, and the wheel of it for machines like this one. Wheels of releases: .github/workflows/wheels.yml
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python setup.py -q sdist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz

$(PUBLISHER)/.installed: monitoring/grafana/requirements.txt
	test -x $(PUBLISHER)/bin/python || $(PYTHON) -m venv $(PUBLISHER)
	$(PUBLISHER)/bin/python -m pip install --quiet -r $<
	@touch $@

# The requirements name every package with its version, so pip resolves nothing. Without npm, clients of Node.js are
# omitted.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/node/package-lock.json
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --no-compile -r $<
	command -v npm >/dev/null || exit 0; npm ci --prefix tests/clients/node --no-audit --no-fund --silent
	@touch $@

clean:
	rm -rf $(VENV) $(PUBLISHER) $(CLIENTS) tests/clients/node/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
