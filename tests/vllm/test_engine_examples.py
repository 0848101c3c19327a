"""The vLLM example runs: the prompt is loaded within one run, and from SSD by the next."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from engines import ENGINE_ENV, MODELS
from paths import ROOT

ENGINE_ARGS = {
    "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 4,
    "block_size": 32, "kv_cache_memory_bytes": 32 << 20, "seed": 0,
}  # fmt: skip


def test_the_vllm_example_loads_what_it_has_computed(tmp_path: Path) -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")
    command = [
        sys.executable, ROOT / "examples" / "vllm_single_node.py",
        "--model", MODELS / "tiny", "--ssd-dir", tmp_path, "--cpu-gb", "0.05", "--ssd-gb", "0.1",
        "--engine-args", json.dumps(ENGINE_ARGS),
    ]  # fmt: skip
    environment = {**os.environ, **ENGINE_ENV, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (cold, total), (warm, _) = (
        (int(cached), int(total))
        for cached, total in re.findall(r"(\d+) of (\d+) tokens from the cache", done.stdout)
    )
    assert cold == 0
    assert warm == (total - 1) // 32 * 32  # the last token is left to compute
