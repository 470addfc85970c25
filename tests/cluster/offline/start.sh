#!/usr/bin/env bash
# start.sh COMMAND [option ...]: the one-node cluster on a machine without a network; `start.sh --help` lists the rest.
#
# PYTHON (default: python3 of PATH) needs torch, grpcio, httpx, rich, typer and PyYAML. As root.
# Logs of all parts are packed into OUT/logs.tar.gz when OUT is set.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The carried runtime comes first, so that its parts fit together; the carried `ip` last, for machines without one.
export PATH="$here/cache/bin:$here/system/bin:$PATH:$here/system/fallback"
export PYTHONPATH="$here/source:$here/source/operator:$here/source/trainer_image:$here/packages"
cd "$here/source"
"${PYTHON:-python3}" -m tests.cluster.offline "$@"
code=$?
if [ -n "${OUT:-}" ]; then tar -C "$here/state" -czf "$OUT/logs.tar.gz" logs; fi
exit $code
