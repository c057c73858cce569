# Two commands on a fresh machine with Python 3.11+ and make, without a compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread a process: more of them on few cores crawl, and their number changes float sums.
export OMP_NUM_THREADS ?= 1
# Bytecode once for all processes, also where the surroundings forbid it: each program starts in half the time or less.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX ?= $(abspath $(VENV))/bytecode
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

# Not deleted at the end as intermediate files.
.PRECIOUS: $(VENV)/flower-%
.PHONY: help install demo docs reference test test-network test-previous-release test-gpu test-oldest-flower test-newest-flower test-flower-without-grpc test-flower-matrix quick torture endurance fuzz lint format tables weights smoke lock lock-age bundle licences sbom audit bench clean form

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# The package itself runs on 3.14; one library of the tests, pyjpegls, has no wheel for it (29 November 2026).
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --editable '.[sim,dev,weights,export]'
	touch $@

install: $(VENV)/installed  ## the environment alone, with all that the tests need: 7 GB

demo: $(VENV)/installed  ## install, then train surgical aggregation and vanilla FL on synthetic phantoms, offline
	$(BIN)/flwr-sim demo

# mypy beside the rest; its findings come last. All modules are compiled once before the three workers start, for each
# would do it at the same time. Three, since tests wait a part of their time; four are slower.
test: $(VENV)/installed form  ## all tests but the long ones (those on real data skip where ../shared/data is absent)
	$(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; $(BIN)/pytest --collect-only -qq > /dev/null; \
	$(BIN)/pytest -n 3 -m "not torture and not network and not long"; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests | types))

test-network: $(VENV)/installed  ## every method, and what becomes of a run when programs die, over real processes; other long tests
	$(BIN)/pytest -n 2 -m "network or long"
	$(BIN)/pytest -n 2 tests/server/test_claims.py tests/studies/test_claims.py --hypothesis-profile=thorough

test-previous-release: $(VENV)/installed  ## coordinator and hospitals one release apart, by a wheel of the previous release from git history
	$(BIN)/pytest -n 2 tests/network/test_previous_release.py

test-gpu: $(VENV)/installed  ## what a GPU does; skipped on a machine without one
	$(BIN)/pytest -n 12 --dist worksteal tests/gpu

FLOWER_TESTS := tests/test_flower_names.py tests/studies/test_grid.py tests/common/test_message_objects.py tests/common/test_fleet_protocol.py tests/common/test_flower_bytes.py tests/network tests/polyclinic \
  $(addprefix tests/server/test_,$(addsuffix .py,admission backends coordinator fleet hospital_port object_store present storage)) \
  $(addprefix tests/strategies/test_,$(addsuffix .py,exchange masking roll_call rounds secure_aggregation stock_call))
# From 1.43 on Flower has no gRPC services for Fleet and Control. A copy of a release that has them, without them.
REMOVE_GRPC = find $@/flwr \( -name 'fleet_pb2_grpc.py*' -o -name 'control_pb2_grpc.py*' -o -name 'control_grpc*' \) -prune -exec rm -r {} +
$(VENV)/flower-%: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --target $@ --upgrade flwr$(if $(filter newest%,$*),,==$*)
	$(if $(filter newest-without-grpc,$*),$(REMOVE_GRPC))

test-oldest-flower: flower-1.39.0  ## all tests that depend on Flower, and the model hashes, with the oldest Flower we allow
test-newest-flower: flower-newest  ## the same with the newest Flower, installed without its dependencies
test-flower-without-grpc: flower-newest-without-grpc  ## the same with a copy of it that has no gRPC services, as 1.43
flower-%: $(VENV)/flower-%
	PYTHONPATH=$(abspath $<) $(BIN)/pytest -n 2 -m "not torture and not network and not long" $(FLOWER_TESTS)
	PYTHONPATH=$(abspath $<) $(BIN)/pytest -n 2 -m network tests/network/test_same_model.py
	PYTHONPATH=$(abspath $<):. $(BIN)/python benchmarks/model_hashes.py --only surgical

# Other interpreters need the dependencies and pytest: `python3.13 -m venv OTHER; OTHER/bin/pip install '.[sim]' pytest`.
PYTHONS ?= $(BIN)/python
test-flower-matrix: $(VENV)/flower-1.39.0 $(VENV)/flower-newest $(VENV)/flower-newest-without-grpc  ## one model hash with each pair of a Flower and a Python: in one process, on Ray, over the network
	$(BIN)/python -m tests.network.flower_matrix --python $(PYTHONS) --flower $^

quick: $(VENV)/installed  ## tests without whole federations
	$(BIN)/pytest -m 'not slow and not torture and not network and not long'

torture: $(VENV)/installed  ## kills, cuts, full disks, bad input; a table of what was survived; under 30 min
	$(BIN)/pytest -n 2 -m "(torture or catalogue) and not endurance"

endurance: $(VENV)/installed  ## 200 rounds of ten sites under random faults; memory and open files stay flat
	$(BIN)/pytest -s -m endurance

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/installed  ## coverage-guided fuzzing of all code that parses received messages or stored files; 41 min
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	for target in $$($(BIN)/python -m tests.fuzz.run); do $(BIN)/python -m tests.fuzz.run $$target $(FUZZ_SECONDS) || exit 1; done

docs: $(VENV)/installed  ## the docs as a site, in site/index.html; a dead link or a warning stops it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

reference: $(VENV)/installed  ## the tables of docs/*.md that follow from the code
	$(BIN)/python -m supply.reference

lint: form  ## ruff and mypy
	$(BIN)/mypy

form: $(VENV)/installed  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed  ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

weights: weights/efficientnet_lite0.safetensors  ## ImageNet weights of EfficientNet-Lite0 as a local file

weights/efficientnet_lite0.safetensors: | $(VENV)/installed
	$(BIN)/flwr-sim weights $@

$(VENV)/supply-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[supply]'
	touch $@

lock: $(VENV)/installed  ## versions and hashes of all that the images install: supply/*.lock
	$(BIN)/python supply/lock.py

lock-age: $(VENV)/installed  ## how old the locks are, and which libraries have newer releases
	$(BIN)/python supply/lock.py --age

bundle:  ## one tar file that installs without internet, in dist/; GPU=1: with CUDA. Needs Python alone
	$(PYTHON) -m supply.bundle $(if $(filter 1,$(GPU)),--gpu) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

licences: $(VENV)/installed  ## docs/licences.md; fails where a licence is unknown or strong copyleft
	$(BIN)/python supply/licences.py

sbom: $(VENV)/supply-installed  ## bill of materials of this environment, CycloneDX JSON: build/sbom.cdx.json
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.cdx.json $(BIN)/python

audit: $(VENV)/supply-installed  ## known flaws of the locked libraries, where advisories can be had
	$(BIN)/python supply/audit.py

smoke:  ## build both images and train a federation across containers; see docker/README.md
	docker/smoke-test.sh

ONLY ?=
bench: $(VENV)/installed  ## the table of docs/benchmarks.md again, 50 minutes with nothing else running; some: ONLY=idle,start
	PYTHONPATH=. $(BIN)/python benchmarks/table.py --only "$(ONLY)"

clean:  ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
