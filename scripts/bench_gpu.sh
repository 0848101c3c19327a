#!/usr/bin/env bash
# Examines, tests and measures the CUDA path on a machine with GPUs. Takes under 8 minutes, and ends
# with one block of text to paste into an issue.
#
#   scripts/bench_gpu.sh [DIRECTORY [STEP]...]
#
#   DIRECTORY   where report.md and each step's output go, and a file of 256 MiB for I/O past DRAM:
#               on an NVMe (default: gpu-report)
#   STEP        the title of a step to run (default: all)
#
#   PYTHON   an interpreter whose torch is built for CUDA (default: python3)
#   WHEELS   a folder of wheels of what it lacks, for a machine without a network (default: .whl).
#            To fill it for Python 3.12, elsewhere:
#              pip download --no-deps --only-binary=:all: --python-version 3.12 \
#                --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .whl msgspec pyzmq
set -euo pipefail
if [[ "${1:-}" == -* ]]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mkdir -p "${1:-gpu-report}" && cd "${1:-gpu-report}" && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
export PYTHONPATH=$PWD:$packages${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

missing() {
  "$python" - <<'END'
from importlib.util import find_spec
needed = {"msgspec": "msgspec", "zmq": "pyzmq", "sortedcontainers": "sortedcontainers",
          "xxhash": "xxhash", "typer": "typer", "rich": "rich", "pytest": "pytest"}
print(*(package for module, package in needed.items() if find_spec(module) is None))
END
}

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  { echo "$python has no torch that sees a CUDA device" >&2; exit 2; }
lacking=$(missing)
if [ -n "$lacking" ]; then
  if compgen -G "$wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --target "$packages" "$wheels"/*.whl
  else
    # shellcheck disable=SC2086
    "$python" -m pip install -q --target "$packages" $lacking || true
  fi
  lacking=$(missing)
  [ -z "$lacking" ] || { echo "lacking: $lacking; see WHEELS in $0" >&2; exit 2; }
fi

"$python" benchmarks/gpu_hour.py "$out" "${@:2}"
