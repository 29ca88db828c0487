#!/usr/bin/env bash
# What one GPU gets out of captured updates, as one table, in at most 9 minutes: bash bench/gpu_check.sh
# A rehearsal, also on a CPU: bash bench/gpu_check.sh --tiny. Parts and options: python -m bench.gpu --help
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
table=$folder/table.md
[[ " $* " == *" --tiny "* ]] && slower=5 || slower=1 # a rehearsal need not be quick
printf '| what | measured |\n| --- | --- |\n' > "$table"
while read -r part seconds; do
  limit=$((seconds * slower))
  timeout --kill-after=5 "$limit" "${PYTHON:-.venv/bin/python}" -m bench.gpu "$part" --table "$table" --folder "$folder" "$@" </dev/null ||
    printf '| %s | not finished: status %d (124: after %d s) |\n' "$part" $? "$limit" >> "$table"
done <<'PARTS'
machine 20
updates 90
curve 40
sizes 60
forecast 40
train 250
sampling 40
PARTS
cat "$table"
