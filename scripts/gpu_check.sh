#!/usr/bin/env bash
# What a machine with a Hopper GPU is asked, one call of nine minutes at a time:
#
#   scripts/gpu_check.sh A OUT_FOLDER      # are the kernels right
#   scripts/gpu_check.sh B OUT_FOLDER      # attention and decode steps against the bandwidth
#   scripts/gpu_check.sh C OUT_FOLDER      # tokens per second
#
# A call that was broken off goes on where it was: what OUT_FOLDER or benchmarks/results hold of it
# is not measured again, and programs that were compiled are taken from OUT_FOLDER (programs-*.tar).
# Further options are those of `python -m benchmarks.card`. WHEELS names a folder of packages to
# install first, for machines without a network.
set -euo pipefail

call=${1:?usage: scripts/gpu_check.sh A|B|C OUT_FOLDER [options]}
out=${2:?usage: scripts/gpu_check.sh A|B|C OUT_FOLDER [options]}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    # Nothing of the machine's own is changed.
    export PYTHONPATH="$PYTHONPATH:$site"
fi
exec "$python" -m benchmarks.card "$call" --out "$out" --resume benchmarks/results "${@:3}"
