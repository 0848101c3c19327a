#!/usr/bin/env bash
# Asks real engines about a text: cold, from DRAM, at another engine, from NVMe after a restart. Sets
# itself up, with SmolLM2-135M-Instruct (90 MB to fetch), or a random model where that cannot be had.
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
