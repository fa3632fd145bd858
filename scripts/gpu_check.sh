#!/usr/bin/env bash
# What a machine with a Hopper GPU is asked, within a time budget of a quarter of an hour:
#
#   scripts/gpu_check.sh first OUT_FOLDER  # at most 560 s: of all three below, what tells most
#   scripts/gpu_check.sh rest OUT_FOLDER   # 200 s: all else, as far as they go
#
# or, nine minutes each:
#
#   scripts/gpu_check.sh A OUT_FOLDER      # are the kernels right
#   scripts/gpu_check.sh B OUT_FOLDER      # attention and decode steps against the bandwidth
#   scripts/gpu_check.sh C OUT_FOLDER      # tokens per second
#
# `--seconds N` gives it N seconds instead. A call that was broken off goes on where it was: what
# OUT_FOLDER or benchmarks/results hold of it is not measured again, and programs that were compiled
# are taken from there (programs-*.tar). Where OUT_FOLDER is emptied between calls, put what it held
# into benchmarks/results. Further options are those of `python -m benchmarks.card`. WHEELS names a
# folder of packages to install first, for machines without a network.
set -euo pipefail

usage='usage: scripts/gpu_check.sh first|rest|A|B|C OUT_FOLDER [options]'
call=${1:?$usage}
out=${2:?$usage}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Where NVIDIA's packages are there without ptxas, JAX looks for it in a folder "None".
cuda=${CUDA_HOME:-/usr/local/cuda}
if [[ -x $cuda/bin/ptxas ]]; then
    export CUDA_ROOT=${CUDA_ROOT:-$cuda}
fi
if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    # Nothing of the machine's own is changed.
    export PYTHONPATH="$PYTHONPATH:$site"
fi
exec "$python" -m benchmarks.card "$call" --out "$out" --resume benchmarks/results "${@:3}"
