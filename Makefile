# `make` alone prints this list. Everything after the first ## of a line is help.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VARIABLES := CONFIG ARGS RUN RUNS TOPOLOGY STAGES STAGE TASK BUDGET SEEDS TO GRID PYTHON SHELL
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
$(if $(filter-out $(VARIABLES),$(GIVEN)),$(error unknown variable $(firstword $(filter-out $(VARIABLES),$(GIVEN))); expected some \
  of: $(VARIABLES). `make` alone says what they are))

RUNS ?= runs
ifdef RUN
# its own file, or what an earlier run of that name was made with
CONFIG ?= $(firstword $(wildcard configs/$(RUN).yaml $(RUNS)/$(RUN)/operator/config.yaml) configs/$(RUN).yaml)
else
CONFIG ?= configs/small.yaml
RUN := $(basename $(notdir $(CONFIG)))
endif
ARGS ?=
# Without a GPU two processes, not one with as many threads: these slow each other down where other work takes a core
TOPOLOGY ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep "^GPU"),single,$(if $(filter 1,$(shell nproc 2>/dev/null)),cpu,cpu2))
BUDGET ?= 300
SEEDS ?= 0 1
COMMA := ,
SPACE := $(subst ,, )
TRAINED := operator diffusion consistency rival steady
export PYTHONUNBUFFERED := 1

# What is asked for is looked at before anything runs.
ifneq ($(filter-out help venv test test-faults lint leaderboard publish remove smoke clean-smoke,$(or $(MAKECMDGOALS),help)),)
$(if $(wildcard $(CONFIG)),,$(error no configuration file '$(CONFIG)'; expected one of: $(wildcard configs/*.yaml), or a \
  file of your own. Name it: make train CONFIG=configs/small.yaml RUN=mine))
$(if $(wildcard accelerate_configs/$(TOPOLOGY).yaml),,$(error no accelerate_configs/$(TOPOLOGY).yaml; expected TOPOLOGY to \
  be one of: $(basename $(notdir $(wildcard accelerate_configs/*.yaml)))))
endif
# Paths and names are used as single words
$(foreach name,CONFIG RUN RUNS TOPOLOGY STAGE TASK TO PYTHON,$(if $(filter-out 0 1,$(words $($(name)))),$(error $(name) is \
  '$($(name))'; expected one word, without spaces. Rename the file or folder)))
$(if $(RUNS),,$(error RUNS is empty; expected a folder, such as RUNS=runs))
# RUN and STAGE name folders: no way out of RUNS
is_name = $(and $(filter 1,$(words $(1))),$(if $(findstring /,$(1))$(filter .%,$(1)),,yes))
$(if $(call is_name,$(RUN)),,$(error RUN is '$(RUN)'; expected one word without / that does not begin with a dot. It names a \
  folder of $(RUNS)))
$(if $(STAGE),$(if $(call is_name,$(STAGE)),,$(error STAGE is '$(STAGE)'; expected one of: $(TRAINED) report)))

RUN_DIR = $(RUNS)/$(RUN)
FLAGS = --config $(CONFIG) run.name=$(RUN) run.root=$(RUNS) $(ARGS)$(if $(strip $(STAGES)), \
  "evaluate.stages=[$(subst $(SPACE),$(COMMA),$(strip $(STAGES)))]")
TOPOLOGY_FILE = accelerate_configs/$(TOPOLOGY).yaml
WORLD = $(shell sed -n 's/^num_processes: *\([0-9]*\).*/\1/p' $(TOPOLOGY_FILE))
# Every process gets its share of the cores; more threads than cores make two processes fight, accelerate's default is one.
THREADS = $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores > $(WORLD) ? cores / $(WORLD) : 1)))
LAUNCH = UPS_EXPECT_WORLD=$(WORLD) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} \
  $(PY) -m ups.training.launch --config_file $(TOPOLOGY_FILE)
# $(call stage,NAME,SCRIPT): the script, where `ups.commands.stages` says that there is something to do (3). It is always asked: it reads
# the configuration and compares settings, parents and every file's digest, without torch, in a third of a second.
stage = @status=0; $(PY) -m ups.commands.stages $(1) $(FOR) $(FLAGS) || status=$$?; \
  if [ $$status -eq 3 ]; then $(2) $(FLAGS); else exit $$status; fi

ifdef PYTHON
PY := $(PYTHON)
ENVIRONMENT := .python
else
PY := .venv/bin/python
ENVIRONMENT := .venv/installed
endif

.PHONY: help venv data doctor cache operator diffusion consistency rival steady report train train-cpu2 train-2gpu train-4gpu train-8gpu train-fsdp smoke test test-faults lint bench bench-gpu tune sweep profile dry-run \
  leaderboard publish remove clean-smoke

help:           ## This list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-12s %s\n", $$1, $$2} /^##/ {print substr($$0, 4)}' Makefile

.PHONY: .python
.python:
	@command -v "$(PY)" >/dev/null || { echo "there is no PYTHON=$(PY); leave it out, and make sets up .venv" >&2; exit 2; }
	@$(PY) -m ups.commands.interpreter

.venv/installed: requirements.txt requirements-data.txt requirements-dev.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python3 is too old; expected 3.11 or later. Put one first in PATH.")'
	python3 -m venv .venv && .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

venv: $(ENVIRONMENT)          ## Set up .venv; every other target does so too

train: report   ## The whole chain, from data to report: what is done is kept, what was interrupted continues
train-cpu2:     ## train, on two CPU processes
train-2gpu:     ## train, on 2 GPUs of this machine
train-4gpu:     ## train, on 4 GPUs
train-8gpu:     ## train, on 8 GPUs
train-fsdp:     ## train, on 8 GPUs, the model sharded over them (FSDP2)
train-cpu2 train-2gpu train-4gpu train-8gpu train-fsdp: train-%:
	@$(MAKE) --no-print-directory train TOPOLOGY=$*

data: $(ENVIRONMENT)          ## Generate, or download and check, the data files
	$(call stage,$@,$(PY) prepare_data.py)

doctor: $(ENVIRONMENT)        ## Check this machine (GPUs, ranks, limits, disks) and the data files (NaN, repeats, leakage)
	status=0; $(PY) -m ups.commands.machine_check --topology $(TOPOLOGY_FILE) $(FLAGS) || status=1; $(PY) prepare_data.py --doctor $(FLAGS) || status=1; exit $$status

cache: data                   ## Fit the tokenizers and encode the data
	$(call stage,$@,$(PY) prepare_cache.py)

operator: cache               ## Train the operator
	$(call stage,$@,$(LAUNCH) train_operator.py)

diffusion: operator           ## Train the corrector of the operator's errors
	$(call stage,$@,$(LAUNCH) train_diffusion.py)

consistency: diffusion        ## Distil the corrector into one or two evaluations
	$(call stage,$@,$(LAUNCH) train_consistency.py)

rival: diffusion              ## The student's network without a teacher, to compare
	$(call stage,$@,$(LAUNCH) train_rival.py)

steady: operator              ## Train the prior of steady solutions given part of the coefficient
	$(call stage,$@,$(LAUNCH) train_steady.py)

# of the stages, those that the configuration names
report: FOR := --of-report
report: $(TRAINED)            ## Roll out the test split: results.json, report.html; fails if a gate does
	$(call stage,$@,$(PY) evaluate.py)

smoke: $(ENVIRONMENT)         ## The whole chain, tiny, anew, on two CPU processes
	$(PY) -m ups.commands.remove "$(RUNS)/smoke"
	@$(MAKE) --no-print-directory train CONFIG=configs/smoke.yaml RUN=smoke TOPOLOGY=cpu2

test: $(ENVIRONMENT)          ## The test suite but its slow half: truth, behaviour, contracts; known answers from a fixed seed
	@$(PY) -m ups.commands.interpreter requirements-dev.txt
	OMP_NUM_THREADS=1 UPS_TEST_SEED=$${UPS_TEST_SEED:-1} $(PY) -m pytest -q -m "not faults" -n 3 --dist loadfile

test-faults: $(ENVIRONMENT)   ## The other half: injections, mutations, several machines, sharded stages; known answers drawn anew
	@$(PY) -m ups.commands.interpreter requirements-dev.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "faults or drawn" -n 2 --dist loadfile

lint: $(ENVIRONMENT)          ## Style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check -q .

bench: cache                  ## Ours, an FNO and a U-Net at equal time: make bench TASK=burgers1d BUDGET=300 SEEDS="0 1"
	$(PY) -m bench.compare --config $(CONFIG) --task $(or $(TASK),$(error TASK is missing)) --budget $(BUDGET) --seeds $(SEEDS)

tune: cache                   ## Search settings for a task on validation, for ours and both rivals: make tune TASK=burgers1d BUDGET=180
	$(PY) -m bench.tune --config $(CONFIG) --task $(or $(TASK),$(error TASK is missing)) --budget $(BUDGET) --seeds $(firstword $(SEEDS))

profile: cache                ## Where a step's time goes, beside the machine's peaks, and a trace: make profile STAGE=operator
	$(PY) -m bench.profiling $(or $(STAGE),$(error STAGE is missing, such as STAGE=operator)) $(FLAGS)

sweep: $(ENVIRONMENT)         ## Settings times seeds, on validation: make sweep GRID="operator.optim.muon_lr=2e-3,4e-3" SEEDS="0 1" STAGES=operator
	$(PY) -m ups.commands.sweep --config $(CONFIG) --run $(RUN) --runs $(RUNS) --seeds "$(SEEDS)" --args "$(ARGS)" \
	  --stages "$(STAGES)" --topology $(TOPOLOGY) -- $(or $(GRID),$(error GRID is missing, such as GRID="run.seed=1,2"))

bench-gpu: $(ENVIRONMENT)     ## A training step on this machine's GPUs: samples per second, shares of their peaks, bf16, compiled
	$(PY) -m bench.gpu --config $(CONFIG) $(ARGS)

dry-run: $(ENVIRONMENT)       ## What every script would do, and what it would cost; writes nothing
	@stages=$$($(PY) -m ups.commands.stages stages $(FLAGS)); for script in prepare_data prepare_cache $${stages:+$$(printf 'train_%s ' $$stages)} \
	  evaluate; do UPS_EXPECT_WORLD=$(WORLD) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(PY) $${script}.py --dry-run $(FLAGS); done

leaderboard: $(ENVIRONMENT)   ## All runs side by side
	$(PY) -m ups.report.leaderboard --runs $(RUNS)

publish: $(ENVIRONMENT)       ## Put what travels of a run elsewhere: make publish RUN=small TO=pretrained (a folder, or hf://OWNER/NAME)
	$(PY) -m ups.commands.publish "$(RUN_DIR)" "$(or $(TO),$(error TO is missing, such as TO=pretrained))"

remove: $(ENVIRONMENT)        ## Delete one stage of a run: make remove STAGE=operator RUN=small
	$(PY) -m ups.commands.remove "$(RUN_DIR)/$(or $(STAGE),$(error STAGE is missing, such as STAGE=operator))"

clean-smoke: $(ENVIRONMENT)   ## Delete the run, the data and the caches of make smoke; nothing that carries no record of ours
	$(PY) -m ups.commands.remove "$(RUNS)/smoke" data/smoke cache/smoke

##
## Variables, as in `make train CONFIG=configs/smoke.yaml RUN=mine ARGS="run.seed=1 operator.train.steps=500"`:
##   CONFIG    settings laid over configs/default.yaml (configs/RUN.yaml; configs/small.yaml where no RUN is named)
##   ARGS      single settings laid over those
##   RUN       name of the run (the name of CONFIG); results are in RUNS/RUN
##   RUNS      folder of all runs (runs)
##   TOPOLOGY  a file of accelerate_configs/ (single where nvidia-smi lists a GPU, else cpu2)
##   STAGES    what is trained and reported, in place of evaluate.stages of CONFIG and ARGS; those that no task reserves
##             trajectories for are left out
##   PYTHON    an interpreter with requirements-dev.txt installed; without it .venv is made and used
