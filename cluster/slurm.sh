#!/usr/bin/env bash
# The chain under Slurm, on the machines that sbatch gives it. Submit from the repository, on a file system that all nodes see:
#   sbatch --nodes=2 --gpus-per-node=8 --export=ALL,CONFIG=configs/small.yaml,RUN=mine cluster/slurm.sh
# Variables: those of make (CONFIG, RUN, RUNS, ARGS, STAGES). `make .venv/installed` sets up the environment beforehand.
#SBATCH --job-name=ups
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST_NODE=${nodes%%$'\n'*} NUM_NODES=$SLURM_JOB_NUM_NODES NUM_GPUS=${SLURM_GPUS_ON_NODE:-0} JOB=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}

status=0
# shellcheck disable=SC2016  # SLURM_NODEID is that of the task
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec cluster/node.sh' || status=$?

# Three minutes before its time is up (--signal) the run saves and stops by itself; then it goes back to the queue. A run that
# failed, or that scancel ended (which ends this script too), does not.
name=${RUN:-$(basename "${CONFIG:-configs/small.yaml}" .yaml)}
if ((status)) && grep -qs '"status": "preempted"' "${RUNS:-runs}/$name"/*/status.json; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
