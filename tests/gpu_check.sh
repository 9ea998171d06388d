#!/usr/bin/env bash
# The checks that need a GPU, in one command of at most 4 minutes: bash tests/gpu_check.sh
# Needs python3 with torch and, on an NVIDIA card, nvcc; with deepspeed and pydantic it also checks a training step.
# Prints one table, writes gpu_check.json to $OUT (else here). Exit code 0, 1 (a check failed), 2 (nothing to check on).
# Arguments are passed on: "--device cpu" is a rehearsal on the CPU with tiny sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python || true)}
[ -n "$python" ] || { echo "gpu_check: no python3 on PATH; PYTHON=/path/to/python names one"; exit 2; }
"$python" -c "import torch" 2>/dev/null || { echo "gpu_check: $python has no torch; PYTHON names another"; exit 2; }
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" tests/gpu_check.py "$@"
