# Everything from a bare clone on a new machine: `make demo` and `make test` need nothing before them
# but GNU make, Python 3.11 or newer with its venv module and, for the native core, a C++20 compiler.
#
#   make venv    the virtual environment .venv: PyTorch first, then Replicator, editable
#   make demo    three nodes, one is lost, the job goes on; options: make demo DEMO_ARGS="--seed 7"
#   make examples  each framework's example: two nodes, one is lost; options: make examples EXAMPLES_ARGS="--only NAME"
#   make test    lint, then all tests; options: make test TEST_ARGS="tests/store -x"
#   make simulate  real agents on a simulated network; options: SEEDS=2000, or SEED=123 and its trace, BREAK=skip-crc
#   make bench   limits, Replicator and its peers, measured; options: make bench BENCH_ARGS="--quick --json out.json"
#   make faults  kills and network faults on this machine, as a table; options: make faults FAULTS_ARGS="--list"
#   make lint    ruff and mypy --strict
#   make format  let ruff rewrite what it can
#   make clean   remove everything that the targets above made

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
EXAMPLES_ARGS ?=
TEST_ARGS ?=
# Tests start processes of their own and wait for deadlines; more of them at a time only make each other late.
TEST_PROCESSES ?= 2
BENCH_ARGS ?=
FAULTS_ARGS ?=

BIN := $(VENV)/bin
SEEDS ?= 200
SEED ?=
BREAK ?=
CHECKED := replicator tests benchmarks examples
# What an installed environment depends on. Of Python sources only which there are: the install is editable, but it
# knows modules by name, and one that became a package would not be found.
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard native/* protos/replicator/v1/*.proto)
MODULES := find replicator -name '*.py' -not -path 'replicator/v1/*' | LC_ALL=C sort

# Tests start Python hundreds of times: it keeps what it compiled of the sources, whatever the user's habit.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: FORCE help venv demo examples test simulate bench faults lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n '4,13s/^# *//p' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Replicator needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Say: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	@touch $@

# --no-compile: Python compiles what it imports; pip would compile ten thousand files, and most are never looked at.
# PyTorch first and alone, so that no later resolution picks another build of it.
$(VENV)/.torch: $(VENV)/.created
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)'
	@touch $@

$(VENV)/.modules: $(VENV)/.created FORCE
	@new=$@.$$$$; $(MODULES) > $$new; if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi

FORCE:

$(VENV)/.installed: $(VENV)/.torch $(VENV)/.modules $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test,torch]'
	@touch $@

demo: venv
	$(BIN)/replicator-admin demo $(DEMO_ARGS)

examples: venv
	$(BIN)/python -m examples $(EXAMPLES_ARGS)

lint: venv
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy --strict -p replicator -p benchmarks

test: lint
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

simulate: venv
	$(BIN)/python -m tests.simulator $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(if $(BREAK),--break $(BREAK))

bench: venv
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

faults: venv
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

format: venv
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:
	rm -rf $(VENV) build dist benchmarks/.cache replicator/v1 .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find replicator tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
