#!/usr/bin/env bash
# bench/gpu.sh OUT: everything that needs a card, in under 8 minutes, into OUT (at most 8 files).
#
# Builds the extension for this card, runs the tests marked gpu, compute-sanitizer where it is
# installed, and the default benchmark with the peers that can be imported. Needs no network and
# nothing installed by this project: torch, triton, pytest, ninja, pybind11, matplotlib and nvcc are
# enough; WHEELS may name a folder of wheels of peers, which are unpacked for this run only.
#
#   log.txt  all output          cuda.json, cuda.md  the benchmark        cuda-*.png  its plots
set -uo pipefail

out=${1:?usage: bench/gpu.sh OUT}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work" "$out"/*.part' EXIT
export PYTHONPATH="$PWD:$work/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export PPO_KERNELS_NATIVE=require
deadline=450 # bash counts SECONDS from its start
status=0

# step NAME LIMIT COMMAND...: runs it for LIMIT seconds at most and never past the deadline, keeps
# its output, remembers a failure and goes on.
step() {
    local name=$1 limit=$2 began=$SECONDS left=$((deadline - SECONDS)) rc=124 verdict=ok
    shift 2
    printf '\n==== %s\n' "$name" >>"$out/log.txt"
    if [ "$left" -gt 0 ]; then
        timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >>"$out/log.txt" 2>&1
        rc=$?
    fi
    case $rc in
        0) ;;
        124 | 137) verdict="out of time" status=1 ;;
        *) verdict="exit $rc, see log.txt" status=1 ;;
    esac
    printf '%-28s %4d s  %s\n' "$name" $((SECONDS - began)) "$verdict" | tee -a "$work/summary"
}

: >"$out/log.txt"
for wheel in "${WHEELS:-/nowhere}"/*.whl; do
    [ -e "$wheel" ] && step "unpack ${wheel##*/}" 20 "$python" -m zipfile -e "$wheel" "$work/wheels"
done

if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ]; then
    TORCH_CUDA_ARCH_LIST=$(timeout 60 "$python" -c \
        'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2>>"$out/log.txt") ||
        { echo "bench/gpu.sh: torch finds no CUDA device: $(tail -1 "$out/log.txt")" >&2; exit 2; }
fi
export TORCH_CUDA_ARCH_LIST
{ timeout 20 nvidia-smi || true; } >>"$out/log.txt" 2>&1
step "versions" 30 "$python" -c '
import sys, torch, triton
print(sys.version, torch.__version__, triton.__version__)'

step "build for $TORCH_CUDA_ARCH_LIST" 90 "$python" -c '
from ppo_kernels import _native
_native.ensure()
print(_native.module().build_info())'

# Only the files with such tests: others may import what is missing here. The project's own options
# name plugins that may be missing, too.
mapfile -t tests < <(grep -l 'mark\.gpu' tests/test_*.py)
step "pytest -m gpu" 110 "$python" -m pytest -m gpu -q -o addopts= -p no:cacheprovider \
    --continue-on-collection-errors --maxfail=20 "${tests[@]}"

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        # The caching allocator would hide accesses beyond a tensor's end.
        step "compute-sanitizer $tool" 45 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" bench/sanitize.py
    done
else
    echo "compute-sanitizer                    not installed" | tee -a "$work/summary"
fi

step "bench" "$deadline" "$python" -m bench --device cuda --memory --json "$out/cuda.json" \
    --plot "$out" --seconds $((deadline - SECONDS - 60))
if [ -e "$out/cuda.json" ]; then
    "$python" -m bench.report "$out" --full >"$out/cuda.md"
    echo
    "$python" -m bench.report "$out"
fi
printf '\n%s\n' "$(cat "$work/summary")"
exit $status
