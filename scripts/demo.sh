#!/usr/bin/env bash
# Shows a real engine getting a prompt's KV back from DRAM and from NVMe. Sets itself up.
#
#   scripts/demo.sh           vLLM
#   scripts/demo.sh sglang    SGLang, in an environment of its own
set -euo pipefail
scripts=$(dirname "${BASH_SOURCE[0]}")
export PYTHONWARNINGS=ignore TQDM_DISABLE=1
if [ "${1:-}" = sglang ]; then
  source "$scripts/sglang_venv.sh"
  export PYTHONPATH=$ROOT/tests/support/sglang_cpu${PYTHONPATH:+:$PYTHONPATH}
  exec "$SGLANG_VENV/bin/python" "$ROOT/scripts/demo_sglang.py"
fi
source "$scripts/venv.sh"
exec "$PYTHON" "$ROOT/scripts/demo.py"
