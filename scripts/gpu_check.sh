#!/usr/bin/env bash
# The kernels and the engine on a GPU: parity, then timings. --help says more.
#
#   scripts/gpu_check.sh --pack build/gpu_check/wheels   # where there is a package registry
#   scripts/gpu_check.sh                                 # where there is a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec env PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" -m scripts.gpu_check "$@"
