# `make` alone prints this list. Everything after the first ## of a line is help.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

# From another folder (`make -f CLONE/Makefile`, `ups train`) HERE is CLONE/; runs, data and caches are in the working folder.
MAKEFILE := $(firstword $(MAKEFILE_LIST))
HERE := $(if $(filter-out ./,$(dir $(MAKEFILE))),$(dir $(abspath $(MAKEFILE))))
ifneq ($(HERE),)
$(if $(wildcard $(MAKEFILE)),,$(error the Makefile is '$(strip $(MAKEFILE_LIST))'; expected a path without spaces. Move the clone))
# A module that lies in a folder of data is not imported.
export PYTHONSAFEPATH := 1
export PYTHONPATH := $(HERE:%/=%)$(addprefix :,$(PYTHONPATH))
endif

VARIABLES := CONFIG ARGS RUN RUNS TOPOLOGY STAGES TASK BUDGET SEEDS TO SOLVER FINE STARTS OPTIONS PYTHON SHELL
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
$(if $(filter-out $(VARIABLES),$(GIVEN)),$(error unknown variable $(firstword $(filter-out $(VARIABLES),$(GIVEN))); expected some \
  of: $(VARIABLES). `make` alone explains them))

RUNS ?= runs
ifdef RUN
# configs/RUN.yaml, or the configuration of an earlier run of that name
CONFIG ?= $(firstword $(wildcard $(HERE)configs/$(RUN).yaml $(RUNS)/$(RUN)/operator/config.yaml) $(HERE)configs/$(RUN).yaml)
else
CONFIG ?= $(HERE)configs/small.yaml
RUN := $(basename $(notdir $(CONFIG)))
endif
ARGS ?=
# Without a GPU two processes are faster than two threads, which wait for each other when other work takes a core.
ifndef TOPOLOGY
TOPOLOGY := $(if $(shell timeout 10 nvidia-smi -L 2>/dev/null | grep "^GPU"),single,$(if $(filter 1,$(shell nproc 2>/dev/null)),cpu,cpu2))
endif
TOPOLOGY_FILE = $(HERE)accelerate_configs/$(TOPOLOGY).yaml
BUDGET ?= 300
SEEDS ?= 0 1
COMMA := ,
SPACE := $(subst ,, )
TRAINED := $(sort $(patsubst $(HERE)train_%.py,%,$(wildcard $(HERE)train_*.py)))
export PYTHONUNBUFFERED := 1

# Variables are checked before anything runs.
# Recipes hand these to the shell as single words.
UNSAFE := ; & | < > ( ) ' " ` \ * ? [ ] { }
$(foreach name,CONFIG RUN RUNS TOPOLOGY TASK TO PYTHON,$(if $(filter-out 0 1,$(words $($(name))))$(if $(filter command \
  environment,$(origin $(name))),$(findstring $$,$(value $(name))))$(strip $(foreach sign,$(UNSAFE),$(findstring $(sign),$($(name))))),$(error \
  $(name) is '$(value $(name))'; expected one word, without spaces, $$ or any of $(UNSAFE). Rename the file or folder)))
ifneq ($(filter-out help venv test test-faults lint corrector leaderboard publish smoke,$(or $(MAKECMDGOALS),help)),)
$(if $(wildcard $(CONFIG)),,$(error no configuration file '$(CONFIG)'; expected one of: $(wildcard $(HERE)configs/*.yaml), or a \
  file of your own. Name it: make train CONFIG=configs/small.yaml RUN=mine))
$(if $(wildcard $(TOPOLOGY_FILE)),,$(error no $(TOPOLOGY_FILE); expected TOPOLOGY to \
  be one of: $(basename $(notdir $(wildcard $(HERE)accelerate_configs/*.yaml)))))
endif
$(if $(RUNS),,$(error RUNS is empty; expected a folder, such as RUNS=runs))
# RUN names a folder inside RUNS.
$(if $(and $(filter 1,$(words $(RUN))),$(if $(findstring /,$(RUN))$(filter .%,$(RUN)),,yes)),,$(error RUN is \
  '$(RUN)'; expected one word without / that does not begin with a dot. It names a folder of $(RUNS)))

RUN_DIR = $(RUNS)/$(RUN)
FLAGS = --config $(CONFIG) run.name=$(RUN) run.root=$(RUNS) $(ARGS)$(if $(strip $(STAGES)), \
  "evaluate.stages=[$(subst $(SPACE),$(COMMA),$(strip $(STAGES)))]")
WORLD = $(shell sed -n 's/^num_processes: *\([0-9]*\).*/\1/p' $(TOPOLOGY_FILE))
# Every process gets an equal number of cores: accelerate's default is one thread, and more threads than cores are slow.
THREADS = $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores > $(WORLD) ? cores / $(WORLD) : 1)))
LAUNCH = UPS_EXPECT_WORLD=$(WORLD) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} \
  $(PY) -m ups_launch --config_file $(TOPOLOGY_FILE)
# $(call stage,NAME,SCRIPT): run SCRIPT unless ups.commands.stages finds the stage up to date. Its exit status is 3 if there is work;
# it compares configuration, inputs and checksums, without torch, in a third of a second.
stage = @status=0; $(PY) -m ups.commands.stages $(1) $(FOR) $(FLAGS) || status=$$?; \
  if [ $$status -eq 3 ]; then $(2) $(FLAGS); else exit $$status; fi

ifdef PYTHON
PY := $(PYTHON)
ENVIRONMENT := .python
else
PY := $(HERE).venv/bin/python
ENVIRONMENT := $(HERE).venv/installed
endif

.PHONY: help venv data doctor cache operator diffusion consistency scoring steady report train train-cpu2 train-2gpu train-4gpu \
  train-8gpu train-fsdp smoke test test-faults test-gpu lint bench bench-gpu corrector record dry-run leaderboard publish

help:           ## This list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-12s %s\n", $$1, $$2} /^##/ {print substr($$0, 4)}' $(MAKEFILE)

.PHONY: .python
.python:
	@command -v "$(PY)" >/dev/null || { echo "there is no PYTHON=$(PY); without PYTHON= make sets up .venv" >&2; exit 2; }
	@$(PY) -m ups.commands.interpreter

# ups is installed as a link to this clone: scripts and notebooks of any folder import it, and .venv/bin/ups is its command.
$(HERE).venv/installed: $(addprefix $(HERE),requirements.txt requirements-data.txt requirements-dev.txt pyproject.toml)
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python3 is too old; expected 3.11 or later. Put one first in PATH.")'
	python3 -m venv $(HERE).venv && $(PY) -m pip install --quiet --disable-pip-version-check -r $(HERE)requirements-dev.txt -e $(or $(HERE),.)
	@touch $@

venv: $(ENVIRONMENT)          ## Set up .venv, as every other target does

train: report   ## The whole chain from data to report; finished stages are kept, interrupted ones continue
train-cpu2:     ## train, on two CPU processes
train-2gpu:     ## train, on 2 GPUs of this machine
train-4gpu:     ## train, on 4 GPUs
train-8gpu:     ## train, on 8 GPUs
train-fsdp:     ## train, on 8 GPUs with the model sharded (FSDP2)
train-cpu2 train-2gpu train-4gpu train-8gpu train-fsdp: train-%:
	@$(MAKE) -f $(MAKEFILE) --no-print-directory train TOPOLOGY=$*

data: $(ENVIRONMENT)          ## Generate or download the data files, and check them
	$(call stage,$@,$(PY) $(HERE)prepare_data.py)

doctor: $(ENVIRONMENT)        ## Check this machine (GPUs, ranks, limits, disks) and the data files (NaN, repetitions, leakage)
	status=0; $(PY) -m ups.commands.machine_check --topology $(TOPOLOGY_FILE) $(FLAGS) || status=1; $(PY) $(HERE)prepare_data.py --doctor $(FLAGS) || status=1; exit $$status

cache: data                   ## Fit the tokenizers and encode the data
	$(call stage,$@,$(PY) $(HERE)prepare_cache.py)

operator: cache               ## Train the operator
diffusion: operator           ## Train the corrector, which samples the operator's errors
consistency: diffusion        ## Distil the corrector into one or two evaluations
scoring: diffusion            ## Train a network by the scores of its samples (CRPS and energy score), without a teacher
steady: operator              ## Train the prior of steady solutions for partly observed coefficients
$(TRAINED):
	$(call stage,$@,$(LAUNCH) $(HERE)train_$@.py)

# A report trains only the stages that the configuration names in evaluate.stages.
report: FOR := --of-report
report: $(TRAINED)            ## Evaluate on the test split: results.csv, report.html; fails if a gate fails
	$(call stage,$@,$(PY) $(HERE)evaluate.py)

CORRECTOR = $(PY) -m ups.commands.corrector_data --solver $(or $(SOLVER),$(error SOLVER is missing)) \
  --fine $(or $(FINE),$(error FINE is missing)) --starts $(or $(STARTS),$(error STARTS is missing)) --folder data/$(RUN) $(OPTIONS)

corrector: CONFIG = data/$(RUN)/$(RUN).yaml
corrector: $(ENVIRONMENT)     ## Correct your coarse solver: make corrector SOLVER=my:coarse FINE=my:fine STARTS=my:starts RUN=mine (docs/corrector.md)
	$(CORRECTOR)
	$(PY) $(HERE)prepare_cache.py $(FLAGS) && $(LAUNCH) $(HERE)train_operator.py $(FLAGS)
	$(CORRECTOR) --break-even $(RUN_DIR)

smoke: $(ENVIRONMENT)         ## The whole chain in miniature, on two CPU processes
	@$(MAKE) -f $(MAKEFILE) --no-print-directory train CONFIG=$(HERE)configs/smoke.yaml RUN=smoke TOPOLOGY=cpu2

# The tests start Python hundreds of times and each worker imports all of them, so bytecode is kept.
QUICK_START = env -u PYTHONDONTWRITEBYTECODE

test: $(ENVIRONMENT)          ## The fast half of the test suite: truth, behaviour, contracts; known answers with a fixed seed
	@$(PY) -m ups.commands.interpreter requirements-dev.txt
	$(QUICK_START) OMP_NUM_THREADS=1 UPS_TEST_SEED=$${UPS_TEST_SEED:-1} $(PY) -m pytest -q -m "not faults" --ignore=$(HERE)tests/faults -n 4 --dist loadfile --no-loadscope-reorder

test-faults: $(ENVIRONMENT)   ## The slow half: fault injection, mutated files, several machines, sharded stages; known answers with a new seed
	@$(PY) -m ups.commands.interpreter requirements-dev.txt
	$(QUICK_START) OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "faults or drawn" -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: $(ENVIRONMENT)      ## On a GPU: stages that are killed continue bitwise, and too little memory ends nothing
	UPS_TEST_GPU=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -m gpu tests

lint: $(ENVIRONMENT)          ## Style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check -q .

bench: cache                  ## Search settings, and compare with an FNO and a U-Net at equal time: make bench TASK=burgers1d BUDGET=300 SEEDS="0 1"
	$(PY) -m bench.compare --config $(CONFIG) --task $(or $(TASK),$(error TASK is missing)) --budget $(BUDGET) --seeds $(SEEDS)

record: $(ENVIRONMENT)       ## Seconds from a cache to the error of the best published network: make record TASK=burgers1d BUDGET=90 (bench/record.py)
	$(PY) -m bench.record --task $(or $(TASK),$(error TASK is missing)) --budget $(BUDGET) --seeds $(firstword $(SEEDS)) data.tasks=[$(TASK)] $(ARGS)

bench-gpu: $(ENVIRONMENT)     ## Measure updates, passes and forecasts on this machine's GPU in nine minutes: one table
	PYTHON=$(PY) bash bench/gpu_check.sh $(ARGS)

dry-run: $(ENVIRONMENT)       ## Print what every script would do and its cost; writes nothing
	@stages=$$($(PY) -m ups.commands.stages stages $(FLAGS)); for script in prepare_data prepare_cache $${stages:+$$(printf 'train_%s ' $$stages)} \
	  evaluate; do UPS_EXPECT_WORLD=$(WORLD) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(PY) $(HERE)$${script}.py --dry-run $(FLAGS); done

leaderboard: $(ENVIRONMENT)   ## Table of all runs
	$(PY) -m bench.leaderboard --runs $(RUNS)

publish: $(ENVIRONMENT)       ## Copy the weights of a run: make publish RUN=small TO=weights (a folder, or hf://OWNER/NAME)
	$(PY) -m ups.commands.publish "$(RUN_DIR)" "$(or $(TO),$(error TO is missing, such as TO=weights))"

##
## Variables, as in `make train CONFIG=configs/smoke.yaml RUN=mine ARGS="run.seed=1 operator.train.steps=500"`:
##   CONFIG    overlay of configs/default.yaml (default: configs/RUN.yaml, or configs/small.yaml without RUN)
##   ARGS      single settings, which override CONFIG
##   RUN       name of the run (default: the name of CONFIG); results are in RUNS/RUN
##   RUNS      folder of all runs (default: runs)
##   TOPOLOGY  a file of accelerate_configs/ (default: single if nvidia-smi lists a GPU, else cpu2)
##   STAGES    stages to train and report instead of evaluate.stages; stages without reserved trajectories are skipped
##   OPTIONS   of make corrector: --dt, --boundary, .. (python -m ups.commands.corrector_data --help lists them)
##   PYTHON    an interpreter with requirements-dev.txt installed (default: make sets up .venv)
