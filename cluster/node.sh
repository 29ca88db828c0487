#!/usr/bin/env bash
# The chain on one machine of several; cluster/slurm.sh runs it on every machine at the same time.
# The first machine prepares data and caches and writes the report, all train together. The same command continues a run.
#   NUM_NODES NODE_RANK FIRST_NODE   how many machines, which one this is, the address of the first
#   NUM_GPUS                         GPUs of this machine (0: one process on the CPU)
#   PORT                             first of the ports used between the machines, one per stage
#   JOB                              a word that all machines share and no other job has
#   PATIENCE_S, COMPANY_S            for which the others wait for a sign of life of the first, and it, prepared, for theirs
#   CONFIG RUN RUNS ARGS STAGES PYTHON   as for make; RUNS and cache.root lie on a file system that all machines see
set -euo pipefail
cd "$(dirname "$0")/.."

: "${CONFIG:=configs/small.yaml}" "${RUNS:=runs}" "${ARGS:=}" "${STAGES:=}"
: "${RUN:=$(basename "$CONFIG" .yaml)}" "${NUM_NODES:=1}" "${NODE_RANK:=0}" "${FIRST_NODE:=127.0.0.1}" "${NUM_GPUS:=0}" "${JOB:=1}"
: "${PATIENCE_S:=300}" "${COMPANY_S:=45}"
: "${PORT:=$((20000 + $(cksum <<<"$JOB" | cut -d ' ' -f 1) % 12000))}" "${PYTHON:=.venv/bin/python}"
read -ra arguments <<<"--config $CONFIG run.name=$RUN run.root=$RUNS $ARGS"
read -ra asked <<<"$STAGES"
((${#asked[@]} == 0)) || arguments+=("evaluate.stages=[$(printf '%s,' "${asked[@]}")]")
settings=(CONFIG="$CONFIG" RUN="$RUN" RUNS="$RUNS" ARGS="$ARGS" STAGES="$STAGES")
[[ $PYTHON == .venv/bin/python ]] || settings+=(PYTHON="$PYTHON")

# ---- data and caches, by the first machine
mkdir -p "$RUNS/$RUN"
ready=$RUNS/$RUN/.prepared here=$HOSTNAME
refuse() { # what is wrong, what was expected
  echo "node.sh: $1; expected $2. Fix that, then start all machines again." >&2
  exit 1
}
host() { # of a machine, once it wrote that it is there
  local said
  said=$(cat "$RUNS/$RUN/.node$1" 2>/dev/null || true)
  [[ $said != "$JOB "* ]] || echo "${said#"$JOB "}"
}
absent() { # the machines that did not write that they are there
  for ((node = 1; node < NUM_NODES; node++)); do
    [[ $(host "$node") ]] || echo -n " $node"
  done
}
if ((NODE_RANK == 0)); then
  echo "$JOB $here" >"$RUNS/$RUN/.node0"
  # The other machines have clocks of their own: they look for another number, not for a time.
  sign=0
  while kill -0 $$ && echo "$JOB preparing $((sign++))" >"$ready"; do sleep 5; done &>/dev/null &
  alive=$! status=0
  make cache "${settings[@]}" || status=$?
  since=$SECONDS
  until ((status)) || [[ -z $(absent) ]] || ((SECONDS - since > COMPANY_S)); do sleep 1; done
  alone=$( ((status)) || absent)
  kill $alive && wait $alive || true
  echo "$JOB $( ((status)) || [[ -n $alone ]] && echo failed || echo ready)" >"$ready"
  ((status == 0)) || exit "$status"
  [[ -z $alone ]] || refuse "of $NUM_NODES machines number$alone did not come within $COMPANY_S s" \
    "each to run this with NUM_NODES=$NUM_NODES JOB=$JOB, its own NODE_RANK, and RUNS=$RUNS that all see"
fi
seen='' since=$SECONDS
until [[ $seen == "$JOB ready" ]]; do
  now=$(cat "$ready" 2>/dev/null || true)
  if [[ $now != "$seen" && $now == "$JOB "* ]]; then
    seen=$now first=$(host 0)
    ours=" localhost 127.0.0.1 $here $(hostname -I 2>/dev/null || true) "
    if [[ -n $first && $first != "$here" && $ours == *" $FIRST_NODE "* ]]; then
      refuse "FIRST_NODE is $FIRST_NODE, which is this machine ($here)" "an address of the first one, $first"
    fi
    echo "$JOB $here" >"$RUNS/$RUN/.node$NODE_RANK"
    since=$SECONDS # after the commands above, which take seconds where the machine is busy
  fi
  if [[ $seen == "$JOB failed" ]] || ((SECONDS - since > PATIENCE_S)); then
    seen=${seen#"$JOB "}
    refuse "the last word of the first machine ($FIRST_NODE) is '${seen:-nothing}', $((SECONDS - since)) s ago" "'ready'"
  fi
  [[ $seen == "$JOB ready" ]] || sleep 2
done

# ---- stages, by all
stages=$("$PYTHON" -m ups.commands.stages stages "${arguments[@]}")
((NUM_GPUS > 0)) || export ACCELERATE_USE_CPU=true
processes=$((NUM_GPUS > 0 ? NUM_GPUS : 1))
export UPS_EXPECT_WORLD=$((NUM_NODES * processes)) PYTHONUNBUFFERED=1
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}" # seconds to save in after SIGTERM; torch's default is 30
trap : TERM INT # the stage ends by itself, then so does this script; without a trap it would leave the stage alone
port=$PORT
for stage in $stages; do
  "$PYTHON" -m ups_launch --config_file accelerate_configs/multinode.yaml --num_machines "$NUM_NODES" \
    --num_processes "$UPS_EXPECT_WORLD" --machine_rank "$NODE_RANK" --main_process_ip "$FIRST_NODE" \
    --main_process_port "$((port++))" train_"$stage".py "${arguments[@]}"
done

# ---- report, by the first machine
((NODE_RANK != 0)) || make report "${settings[@]}"
