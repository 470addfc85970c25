#!/usr/bin/env bash
# start.sh COMMAND [option ...]: the one-node cluster on a machine without a network; `start.sh --help` lists the rest.
#
# As root. From the environment:
#   PYTHON  an interpreter with torch, grpcio, httpx, rich, typer and PyYAML (default: python3 of PATH)
#   OUT     a folder for what was printed, the result, and all logs in one archive (default: none)
#   LIMIT   seconds after which the command is ended (default: 900)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The carried runtime comes first, so that its parts fit together; the carried `ip` last, for machines without one.
export PATH="$here/cache/bin:$here/system/bin:$PATH:$here/system/fallback"
# The interpreter's own packages come before the carried ones, which fit together but may not fit to them.
own=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH="$here/source:$here/source/operator:$here/source/trainer_image:$own:$here/packages"
export PYTHONUNBUFFERED=1
# Pods inherit the container runtime's limit of open files, and Ray needs many.
ulimit -n 1048576 2>/dev/null || ulimit -n "$(ulimit -Hn)"
mkdir -p "$here/output"
timeout --kill-after=20 "${LIMIT:-900}" "${PYTHON:-python3}" -P -m tools.cluster.offline "$@" 2>&1 |
  tee "$here/output/printed.txt"
code=${PIPESTATUS[0]}
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT"
  for name in printed.txt comparison.json; do [ ! -f "$here/output/$name" ] || cp "$here/output/$name" "$OUT"; done
  # The model and the prompts are no news; what a job wrote lies in its claim.
  tar -C / --exclude=workload --exclude='*.safetensors' --exclude='*.pt' -czf "$OUT/logs.tar.gz" \
    "${here#/}/output" "${here#/}/state/logs" "${here#/}/state/storage" var/log/pods 2>/dev/null
fi
exit "$code"
