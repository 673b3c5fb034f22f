#!/usr/bin/env bash
# bench/gpu.sh OUT: everything that needs a card, in under 8 minutes, into OUT (at most 8 files).
#
# Builds the extension for this card, runs the tests marked gpu, compute-sanitizer where it is
# installed, and the default benchmark with the peers that can be imported. Needs no network and
# nothing installed by this project: torch, triton, pytest, ninja, pybind11, matplotlib and nvcc are
# enough; WHEELS may name a folder of wheels of pure Python peers.
#
#   log.txt  all output          cuda.json, cuda.md  the benchmark        cuda-*.png  its plots
set -uo pipefail

out=${1:?usage: bench/gpu.sh OUT}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD:$work/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export PPO_KERNELS_NATIVE=require
status=0

# step NAME SECONDS COMMAND...: runs it under a limit, keeps its output, remembers a failure.
step() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    printf '\n==== %s\n' "$name" >>"$out/log.txt"
    timeout --kill-after=10 "$limit" "$@" >>"$out/log.txt" 2>&1
    local rc=$? verdict=ok
    if [ $rc -ne 0 ]; then
        verdict="exit $rc" status=1
        [ $rc -eq 124 ] && verdict="out of time"
    fi
    printf '%-28s %4d s  %s\n' "$name" $((SECONDS - began)) "$verdict" | tee -a "$work/summary"
}

: >"$out/log.txt"
if [ -n "${WHEELS:-}" ]; then
    for wheel in "$WHEELS"/*.whl; do
        [ -e "$wheel" ] || continue
        "$python" -m pip install --quiet --no-deps --no-index --target "$work/wheels" "$wheel" \
            >>"$out/log.txt" 2>&1 || echo "could not install $wheel" | tee -a "$out/log.txt"
    done
fi

TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$python" -c \
    'import torch; print("%d.%d" % torch.cuda.get_device_capability())')} || exit 2
export TORCH_CUDA_ARCH_LIST
(nvidia-smi || true; "$python" -c 'import sys, torch, triton
print(sys.version, torch.__version__, triton.__version__)') >>"$out/log.txt" 2>&1

step "build for $TORCH_CUDA_ARCH_LIST" 120 "$python" -c '
from ppo_kernels import _native
_native.ensure()
print(_native.module().build_info())'

# The project's own options name plugins that may be missing here; files that need one are reported
# and the others run.
step "pytest -m gpu" 130 "$python" -m pytest -m gpu -q -o addopts= -p no:cacheprovider \
    --continue-on-collection-errors --maxfail=20 tests

if command -v compute-sanitizer >/dev/null; then
    # The caching allocator would hide accesses beyond a tensor's end.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
        step "compute-sanitizer $tool" 40 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" bench/sanitize.py
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
else
    echo "compute-sanitizer            not installed" | tee -a "$work/summary"
fi

step "bench" 230 "$python" -m bench --device cuda --memory --seconds 170 \
    --json "$out/cuda.json" --plot "$out"
if [ -e "$out/cuda.json" ]; then
    "$python" -m bench.report "$out" --full >"$out/cuda.md"
    echo
    "$python" -m bench.report "$out"
fi
echo
cat "$work/summary"
exit $status
