# `make` alone prints this list. Everything after the first ## of a line is help.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

ifdef RUN
CONFIG ?= $(or $(wildcard configs/$(RUN).yaml),configs/small.yaml)
else
CONFIG ?= configs/small.yaml
RUN := $(basename $(notdir $(CONFIG)))
endif
RUNS ?= runs
ARGS ?=
# Without a GPU two processes, not one with as many threads: these slow each other down where other work takes a core
TOPOLOGY ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep "^GPU"),single,$(if $(filter 1,$(shell nproc 2>/dev/null)),cpu,cpu2))
BUDGET ?= 300
SEEDS ?= 0 1
STAGES ?= operator diffusion consistency rival steady
export PYTHONUNBUFFERED := 1

RUN_DIR = $(RUNS)/$(RUN)
SETTINGS = $(RUN_DIR)/.settings
CACHE_LOG = $(RUN_DIR)/.cache.log
FLAGS = --config $(CONFIG) run.name=$(RUN) run.root=$(RUNS) $(ARGS)
TOPOLOGY_FILE = $(or $(wildcard accelerate_configs/$(TOPOLOGY).yaml),$(error no accelerate_configs/$(TOPOLOGY).yaml; expected \
  TOPOLOGY to be one of: $(basename $(notdir $(wildcard accelerate_configs/*.yaml)))))
WORLD = $(shell sed -n 's/^num_processes: *\([0-9]*\).*/\1/p' $(TOPOLOGY_FILE))
# Every process gets its share of the cores; more threads than cores make two processes fight, accelerate's default is one.
THREADS = $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores > $(WORLD) ? cores / $(WORLD) : 1)))
LAUNCH = UPS_EXPECT_WORLD=$(WORLD) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} \
  $(PY) -m ups.launch --config_file $(TOPOLOGY_FILE)

ifdef PYTHON
PY := $(PYTHON)
ENVIRONMENT :=
else
PY := .venv/bin/python
ENVIRONMENT := .venv/installed
endif

.PHONY: help data doctor cache operator diffusion consistency rival steady report train train-cpu2 train-2gpu train-4gpu train-8gpu train-fsdp smoke test lint bench dry-run \
  leaderboard remove clean-smoke

help:           ## This list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-12s %s\n", $$1, $$2} /^##/ {print substr($$0, 4)}' Makefile

.venv/installed: requirements.txt requirements-dev.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python3 is too old; expected 3.11 or later. Put one first in PATH.")'
	python3 -m venv .venv && .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

train: report   ## The whole chain, from data to report: what is done is kept, what was interrupted continues
train-cpu2:     ## train, on two CPU processes
train-2gpu:     ## train, on 2 GPUs of this machine
train-4gpu:     ## train, on 4 GPUs
train-8gpu:     ## train, on 8 GPUs
train-fsdp:     ## train, on 8 GPUs, the model sharded over them (FSDP2)
train-cpu2 train-2gpu train-4gpu train-8gpu train-fsdp: train-%:
	@$(MAKE) --no-print-directory train TOPOLOGY=$*

data: $(ENVIRONMENT)          ## Generate, or download and check, the data files
	$(PY) prepare_data.py $(FLAGS)

doctor: $(ENVIRONMENT)        ## Examine this machine (GPUs, ranks, limits, disks, caches) and the data files (NaN, repeats, leakage)
	status=0; $(PY) -m ups.machine --topology $(TOPOLOGY_FILE) $(FLAGS) || status=1; $(PY) prepare_data.py --doctor $(FLAGS) || status=1; exit $$status

cache: data                   ## Fit the tokenizers and encode the data
	@mkdir -p $(RUN_DIR)
	$(PY) prepare_cache.py $(FLAGS) | tee $(CACHE_LOG)

operator: $(RUN_DIR)/operator/done.json   ## Train the operator
	@echo "$(<D): up to date"

diffusion: $(RUN_DIR)/diffusion/done.json     ## Train the corrector of the operator's errors
	@echo "$(<D): up to date"

consistency: $(RUN_DIR)/consistency/done.json ## Distil the corrector into one or two evaluations
	@echo "$(<D): up to date"

rival: $(RUN_DIR)/rival/done.json             ## The student's network without a teacher, to compare
	@echo "$(<D): up to date"

steady: $(RUN_DIR)/steady/done.json           ## Train the prior of steady solutions given part of the coefficient
	@echo "$(<D): up to date"

report: $(RUN_DIR)/report/done.json       ## Roll out the test split: results.json, report.html, leaderboard row; fails if a gate does
	@echo "$(<D): up to date, see $(<D)/report.html"

# A stage runs again when its parent or its settings are newer. The script decides whether that makes it stale; where it finds
# nothing to do, `touch -c` keeps it from being asked again.
$(RUN_DIR)/operator/done.json: $(CONFIG) configs/default.yaml $(SETTINGS)
	$(LAUNCH) train_operator.py $(FLAGS)
	@touch -c $@

$(RUN_DIR)/diffusion/done.json $(RUN_DIR)/steady/done.json: $(RUN_DIR)/%/done.json: $(RUN_DIR)/operator/done.json
	$(LAUNCH) train_$*.py $(FLAGS)
	@touch -c $@

$(RUN_DIR)/consistency/done.json $(RUN_DIR)/rival/done.json: $(RUN_DIR)/%/done.json: $(RUN_DIR)/diffusion/done.json
	$(LAUNCH) train_consistency.py $(if $(filter rival,$*),--rival) $(FLAGS)
	@touch -c $@

$(RUN_DIR)/report/done.json: $(patsubst %,$(RUN_DIR)/%/done.json,$(STAGES))
	$(PY) evaluate.py $(FLAGS)
	@touch -c $@

# Written when the settings changed or a cache was built.
$(SETTINGS): export SETTINGS_NOW = $(FLAGS)
$(SETTINGS): cache
	@if ! cmp -s $@ <(echo "$$SETTINGS_NOW") || grep -q ': built in' $(CACHE_LOG); then echo "$$SETTINGS_NOW" > $@; fi

smoke: $(ENVIRONMENT)         ## The whole chain, tiny, anew, on two CPU processes
	rm -rf $(RUNS)/smoke
	@$(MAKE) --no-print-directory train CONFIG=configs/smoke.yaml RUN=smoke TOPOLOGY=cpu2

test: $(ENVIRONMENT)          ## The test suite
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q

lint: $(ENVIRONMENT)          ## Style
	$(PY) -m ruff check .

bench: cache                  ## Ours, an FNO and a U-Net at equal time: make bench TASK=burgers1d BUDGET=300 SEEDS="0 1"
	$(PY) -m bench.compare --config $(CONFIG) --task $(or $(TASK),$(error TASK is missing)) --budget $(BUDGET) --seeds $(SEEDS)

dry-run: $(ENVIRONMENT)       ## What every script would do, and what it would cost; writes nothing
	for script in prepare_data.py prepare_cache.py train_operator.py train_diffusion.py train_consistency.py train_steady.py evaluate.py; do $(PY) $$script --dry-run $(FLAGS); done

leaderboard: $(ENVIRONMENT)   ## All runs side by side
	$(PY) -m ups.leaderboard --path $(RUNS)/leaderboard.jsonl

remove:                       ## Delete one stage of a run: make remove STAGE=operator RUN=small
	rm -r "$(RUN_DIR)/$(or $(STAGE),$(error STAGE is missing, such as STAGE=operator))"

clean-smoke:                  ## Delete the run, the data and the caches of make smoke
	rm -rf $(RUNS)/smoke data/smoke cache/smoke

##
## Variables, as in `make train CONFIG=configs/smoke.yaml RUN=mine ARGS="run.seed=1 operator.train.steps=500"`:
##   CONFIG    settings laid over configs/default.yaml (configs/RUN.yaml if there is one, else configs/small.yaml)
##   ARGS      single settings laid over those
##   RUN       name of the run (the name of CONFIG); results are in RUNS/RUN
##   RUNS      folder of all runs (runs)
##   TOPOLOGY  a file of accelerate_configs/ (single where nvidia-smi lists a GPU, else cpu2)
##   STAGES    what the report is made from (operator alone where no task is corrected, without steady where none is steady)
##   PYTHON    an interpreter with requirements-dev.txt installed; without it .venv is made and used
