#!/usr/bin/env bash
# What one GPU gets out of captured updates, as one table, in at most 9 minutes: bash bench/gpu_check.sh
# A rehearsal, also on a CPU: bash bench/gpu_check.sh --tiny. Parts and options: python -m bench.gpu --help
set -euo pipefail
cd "$(dirname "$0")/.."
table=$(mktemp)
trap 'rm -f "$table"' EXIT
printf '| what | measured | target |\n| --- | --- | --- |\n' > "$table"
while read -r part seconds; do
  timeout --kill-after=5 "$seconds" "${PYTHON:-.venv/bin/python}" -m bench.gpu "$part" --table "$table" "$@" </dev/null ||
    printf '| %s | not finished: status %d (124: after %d s) | |\n' "$part" $? "$seconds" >> "$table"
done <<'PARTS'
machine 30
updates 160
curve 120
sizes 120
forecast 60
sampling 40
PARTS
cat "$table"
