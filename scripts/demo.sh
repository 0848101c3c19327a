#!/usr/bin/env bash
# Shows a real vLLM engine getting a prompt's KV back from DRAM and from NVMe. Sets itself up.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
export PYTHONWARNINGS=ignore
exec "$PYTHON" "$ROOT/scripts/demo.py" "$@"
