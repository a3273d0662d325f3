#!/bin/bash
# Proves that the soak finds bugs: it must pass with the healthy pipeline, and fail with each of the
# bugs that native/pipeline/canary.hpp plants. The last line is "caught N/N". Caught means that the
# soak went on to its verdict; a crash or a hang finds nothing.
#   run_canaries.sh [build directory] [operations for each]
set -euo pipefail

cd "$(dirname "$0")/../.."
build=${1:-build/canaries}
ops=${2:-400000}
soak=$build/soak

cmake -S native -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
    -DKVDISK_PYTHON=OFF -DKVDISK_TESTS=ON -DKVDISK_CANARY=-1
cmake --build "$build" --target soak

usage=$("$soak" --help 2>&1) || true
last=$(sed -n 's/.*--canary 0\.\.\([0-9]*\).*/\1/p' <<<"$usage")
[[ $last -ge 1 ]]

verdict=1                       # the soak's exit status when it found something (soak.cpp)
declare -A expected=([10]=3)    # a row that ends twice trips an assertion of the pipeline

# Prints the soak's exit status.
run() {
    local status=0
    timeout 300 "$soak" --ops "$ops" --seed 1 --canary "$1" >"$build/canary-$1.log" 2>&1 || status=$?
    echo "$status"
}

if [[ $(run 0) -ne 0 ]]; then
    tail -20 "$build/canary-0.log"
    echo "the soak fails without any planted bug"
    exit 1
fi

caught=0
for ((canary = 1; canary <= last; canary++)); do
    name=$(sed -n 's/^ *"\(.*\)",$/\1/p' native/pipeline/canary.hpp | sed -n "$((canary + 1))p")
    status=$(run "$canary")
    if [[ $status -eq ${expected[$canary]:-$verdict} ]]; then
        echo "caught $canary: $name"
        caught=$((caught + 1))
    else
        echo "MISSED $canary (exit status $status): $name"
        tail -5 "$build/canary-$canary.log"
    fi
done
echo "caught $caught/$last"
[[ $caught -eq $last ]]
