#!/usr/bin/env bash
# The chain on one machine of several; cluster/slurm.sh and cluster/sky.yaml run it on every machine at the same time.
# The first machine prepares data and caches and writes the report, all train together. The same command continues a run.
#   NUM_NODES NODE_RANK FIRST_NODE   how many machines, which one this is, the address of the first
#   NUM_GPUS                         GPUs of this machine (0: one process on the CPU)
#   PORT                             first of the ports used between the machines, one per stage
#   JOB                              a word that all machines share and no other job has
#   PATIENCE_S                       for which the others wait for a sign of life of the first
#   CONFIG RUN RUNS ARGS STAGES PYTHON   as for make; RUNS and cache.root lie on a file system that all machines see
set -euo pipefail
cd "$(dirname "$0")/.."

: "${CONFIG:=configs/small.yaml}" "${RUNS:=runs}" "${ARGS:=}" "${STAGES:=}"
: "${RUN:=$(basename "$CONFIG" .yaml)}" "${NUM_NODES:=1}" "${NODE_RANK:=0}" "${FIRST_NODE:=127.0.0.1}" "${NUM_GPUS:=0}" "${JOB:=1}"
: "${PATIENCE_S:=300}"
: "${PORT:=$((20000 + $(cksum <<<"$JOB" | cut -d ' ' -f 1) % 12000))}" "${PYTHON:=.venv/bin/python}"
read -ra arguments <<<"--config $CONFIG run.name=$RUN run.root=$RUNS $ARGS"
read -ra asked <<<"$STAGES"
((${#asked[@]} == 0)) || arguments+=("evaluate.stages=[$(printf '%s,' "${asked[@]}")]")
settings=(CONFIG="$CONFIG" RUN="$RUN" RUNS="$RUNS" ARGS="$ARGS" STAGES="$STAGES")
[[ $PYTHON == .venv/bin/python ]] || settings+=(PYTHON="$PYTHON")

# ---- data and caches, by the first machine
mkdir -p "$RUNS/$RUN"
ready=$RUNS/$RUN/.prepared
if ((NODE_RANK == 0)); then
  # The other machines have clocks of their own: they look for another number, not for a time.
  sign=0
  while kill -0 $$ && echo "$JOB preparing $((sign++))" >"$ready"; do sleep 5; done &>/dev/null &
  alive=$! status=0
  make cache "${settings[@]}" || status=$?
  kill $alive && wait $alive || true
  echo "$JOB $( ((status)) && echo failed || echo ready)" >"$ready"
  ((status == 0)) || exit "$status"
fi
seen='' since=$SECONDS
until [[ $seen == "$JOB ready" ]]; do
  now=$(cat "$ready" 2>/dev/null || true)
  [[ $now == "$seen" || $now != "$JOB "* ]] || seen=$now since=$SECONDS
  if [[ $seen == "$JOB failed" ]] || ((SECONDS - since > PATIENCE_S)); then
    seen=${seen#"$JOB "}
    echo "node.sh: the last word of the first machine ($FIRST_NODE) is '${seen:-nothing}'," \
      "$((SECONDS - since)) s ago; expected 'ready'. Mend what it says, then start all machines again." >&2
    exit 1
  fi
  [[ $seen == "$JOB ready" ]] || sleep 2
done

# ---- stages, by all
stages=$("$PYTHON" -m ups.chain stages "${arguments[@]}")
((NUM_GPUS > 0)) || export ACCELERATE_USE_CPU=true
processes=$((NUM_GPUS > 0 ? NUM_GPUS : 1))
export UPS_EXPECT_WORLD=$((NUM_NODES * processes)) PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) > processes ? $(nproc) / processes : 1))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}" # seconds to save in after SIGTERM; torch's default is 30
trap : TERM INT # the stage ends by itself, then so does this script; without a trap it would leave the stage alone
port=$PORT
for stage in $stages; do
  "$PYTHON" -m ups.training.launch --config_file accelerate_configs/multinode.yaml --num_machines "$NUM_NODES" \
    --num_processes "$UPS_EXPECT_WORLD" --machine_rank "$NODE_RANK" --main_process_ip "$FIRST_NODE" \
    --main_process_port "$((port++))" train_"$stage".py "${arguments[@]}"
done

# ---- report, by the first machine
((NODE_RANK != 0)) || make report "${settings[@]}"
