#!/bin/bash
# Proves that the soak finds bugs: it must pass with the healthy pipeline, and fail with each of the
# bugs that native/pipeline/canary.hpp plants. The last line is "caught N/N". Caught means that the
# soak came to a verdict, or ended at an assertion that the bug is known to break; a crash or a hang
# finds nothing.
#   run_canaries.sh [build directory] [operations for each]
set -euo pipefail

cd "$(dirname "$0")/../.."
build=${1:-build/canaries}
ops=${2:-2000000}  # with fewer, the rarest of them (13) is found with two seeds of three
soak=$build/soak

cmake -S native -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
    -DKVDISK_PYTHON=OFF -DKVDISK_TESTS=ON -DKVDISK_CANARY=-1
cmake --build "$build" --target soak

usage=$("$soak" --help 2>&1) || true
last=$(sed -n 's/.*--canary 0\.\.\([0-9]*\).*/\1/p' <<<"$usage")
[[ $last -ge 1 ]]

# These break an assertion of the pipeline or of the simulator, sooner or later.
may_abort=" 3 10 14 "

# Prints the soak's exit status.
run() {
    local status=0
    timeout 300 "$soak" --ops "$ops" --seed 1 --canary "$1" >"$build/canary-$1.log" 2>&1 || status=$?
    echo "$status"
}

# Whether the soak found the bug, by its exit status (soak.cpp).
found() {
    case $2 in
        1) return 0 ;;
        3) [[ $may_abort == *" $1 "* ]] && grep -q '^kvdisk: does not hold: ' "$build/canary-$1.log" ;;
        *) return 1 ;;
    esac
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
    if found "$canary" "$status"; then
        echo "caught $canary: $name"
        caught=$((caught + 1))
    else
        echo "MISSED $canary (exit status $status): $name"
        tail -5 "$build/canary-$canary.log"
    fi
done
echo "caught $caught/$last"
[[ $caught -eq $last ]]
