"""How the tests set up a real vLLM engine on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(os.environ.get("MODELS_DIR", ROOT / ".models"))

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_arguments(model: str, extra_config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with the probing connector."""
    from vllm.config import KVTransferConfig

    policy = overrides.pop("kv_load_failure_policy", "recompute")
    return {
        "model": str(MODELS / model),
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 32 << 20,
        "seed": 0,
        "disable_log_stats": False,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="ProbeConnector",
            kv_connector_module_path="probe_connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra_config,
        ),
        **overrides,
    }


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    return [3 + (i * (2 * seed + 7) + seed) % 500 for i in range(num_tokens)]
