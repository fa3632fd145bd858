#!/usr/bin/env bash
# Everything a machine with a GPU is for, in one call of at most ten minutes: are the kernels right
# there, how fast are they, how fast is a decode step, how many tokens per second come out.
#
#   benchmarks/kernels/gpu_check.sh OUT_FOLDER                      # writes log.txt and a *.json per step
#   STEPS="kernels throughput" benchmarks/kernels/gpu_check.sh /tmp/out    # some, where time is short: check,
#                                                               # decode_step, kernels, throughput
#   SECONDS_IN_ALL=1200 THROUGHPUT_ARGS="--model llama3.1-70b …" benchmarks/kernels/gpu_check.sh /tmp/out
#
# A step that fails or runs out of time does not stop the next one. Exit code 1 if any did.
set -uo pipefail

out=${1:?usage: benchmarks/kernels/gpu_check.sh OUT_FOLDER}
python=${PYTHON:-python3}
seconds_in_all=${SECONDS_IN_ALL:-570}
steps=${STEPS:-check kernels decode_step throughput}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
text=$(mktemp)
trap 'rm -f "$text"' EXIT
rm -f "$out"/{log.txt,summary.json}
for name in $steps; do
    case $name in
        check | kernels | decode_step | throughput) rm -f "$out/$name".json{,l} ;;
        *) echo "error: STEPS: got $name, wanted check, decode_step, kernels, throughput" >&2 && exit 2 ;;
    esac
done
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [[ -z ${THROUGHPUT_ARGS:-} ]]; then
    # Prompts that outgrow the pool of a 24 GB card, without compression and with it.
    THROUGHPUT_ARGS="--model llama3.1-8b --dummy-weights --emulate l4 --rate v 8"
    THROUGHPUT_ARGS+=" --input-len 2000 --output-len 256 --num-prompts 64"
    if [[ -z $gpu ]]; then
        THROUGHPUT_ARGS="--model smollm2-135m --dummy-weights --rate v 8 --no-limits"
        THROUGHPUT_ARGS+=" --input-len 96 --output-len 4 --num-prompts 2 --pool-tokens 512"
    fi
fi
results=()
failed=0

# step NAME LIMIT COMMAND...: run it within what is left of the time, keep its output and result.
# A command that writes no NAME.json itself ends its output with one line of JSON.
step() {
    local name=$1 limit=$2 left=$((seconds_in_all - SECONDS)) began=$SECONDS code=0
    [[ " $steps " == *" $name "* ]] || return 0
    shift 2
    ((left < limit)) && limit=$left
    if ((limit < 20)); then
        results+=("{\"step\":\"$name\",\"exit_code\":null,\"seconds\":0}")
        failed=1
        echo "== $name: no time left"
        return
    fi
    echo "== $name (at most $limit s)"
    # The long lines of JSON are in the files.
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$text" | grep -v '^{' | tail -n 60
    code=${PIPESTATUS[0]}
    cat "$text" >>"$out/log.txt"
    if [[ ! -s $out/$name.json ]]; then
        tail -n 1 "$text" | grep '^{' >"$out/$name.json" || rm -f "$out/$name.json"
    fi
    results+=("{\"step\":\"$name\",\"exit_code\":$code,\"seconds\":$((SECONDS - began))}")
    ((code == 0)) || failed=1
}

step check 170 "$python" -m benchmarks.kernels --only check --out "$out/check.json"
step decode_step 140 "$python" -m benchmarks.kernels --only step --out "$out/decode_step.json"
# `decode` takes longest: when the time is up, what it has found by then is in the file.
step kernels 220 "$python" -m benchmarks.kernels --only window move decode \
    --out "$out/kernels.json"
# shellcheck disable=SC2086
step throughput 300 "$python" -m kvjax throughput $THROUGHPUT_ARGS --out "$out/throughput.jsonl"

printf '{"gpu":"%s","seconds":%d,"steps":[%s]}\n' \
    "$gpu" "$SECONDS" "$(IFS=, && echo "${results[*]}")" | tee "$out/summary.json"
exit "$failed"
