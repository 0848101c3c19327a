"""Tokens that are loaded come with the experts that computed them, in vLLM 0.33 and later.

vLLM keeps the experts of what it computed itself, and limits hits to that. Earlier versions end at
such a hit, and are refused (`test_identity`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import preloaded
import pytest
from engines import Engine, engine_arguments, make_prompt
from make_models import make_model
from paths import MODELS
from probe_connector import compare_probes
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

pytestmark = [pytest.mark.whole, pytest.mark.newest]
PROMPT, CACHED = make_prompt(500, 1), 480
TIMEOUT_S = 400.0


def serve(probe_dir: str) -> list[tuple[Any, ...]]:
    """Return tokens, experts and tokens cached of a prompt: computed, on the GPU, loaded from DRAM,
    and after vLLM was reset."""
    from vllm import LLM

    arguments = engine_arguments(
        "experts", {"cpu_cache_gb": 0.1}, dtype="float32", kv_cache_memory_bytes=12 << 20,
        enable_return_routed_experts=True,
    )  # fmt: skip
    engine = Engine(LLM(**arguments), Path(probe_dir))
    seen = []

    def generate() -> None:
        answer = engine.generate(PROMPT)
        [output] = answer.outputs
        seen.append((output.token_ids, output.routed_experts.tolist(), answer.num_cached_tokens))

    generate()
    generate()
    for seed in (2, 3, 4):  # 141 blocks, and the GPU has 96
        engine.generate(make_prompt(1500, seed))
    generate()
    engine.forget_gpu()
    generate()
    engine.llm.llm_engine.engine_core.shutdown()
    return seen


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "unregister_kv_caches"), reason="refused before vLLM 0.33"
)
def test_a_loaded_prompt_has_the_experts_that_computed_it(tmp_path: Path) -> None:
    make_model(MODELS, "experts")
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "KV_PROBE_DIR": str(tmp_path)
    }  # fmt: skip
    seen = preloaded.call("vllm_imports", environment, TIMEOUT_S, serve, str(tmp_path))
    tokens, experts, cached = zip(*seen, strict=True)
    assert list(cached) == [0, CACHED, CACHED, 0]  # vLLM's reset forgets the experts
    assert tokens.count(tokens[0]) == experts.count(experts[0]) == 4
    probes = compare_probes(tmp_path)
    assert (probes["loaded"], probes["different"]) == (CACHED // 32, [])
