"""FlexCache behind vLLM's NixlConnector: one engine computes a prompt, another one decodes."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from driven_engine import DrivenEngine
from engines import Settings, make_prompt
from paths import MODELS
from ports import free_ports

pytestmark = pytest.mark.whole


NIXL_PATH = os.environ.get("NIXL_PATH")
"""Where the wheels nixl and nixl-cu12 are unpacked, unless they are installed."""
if NIXL_PATH is None and find_spec("nixl") is None:
    pytest.skip("the nixl wheel is not installed", allow_module_level=True)

PROMPT = make_prompt(700, 1)
CACHED = 672
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 32 << 20,
    "seed": 0,
}
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
COMPUTE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


def test_a_prompt_handed_over_by_nixl_is_stored_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")
    common = Settings(
        "FlexCache", "tiny", dram_gb=None, more={"num_cpu_blocks": 128, "skip_slow_loads": False},
        engine=ENGINE, num_threads=1, connectors=[NIXL, {}],
    )  # fmt: skip
    with ExitStack() as stack:
        engines, packages = [], [NIXL_PATH] if NIXL_PATH else []
        for port, role in zip(free_ports(2), ["kv_producer", "kv_consumer"], strict=True):
            settings = replace(common, role=role)
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
            engines.append(
                DrivenEngine(settings, tmp_path / f"log-{port}", sys.executable, packages)
            )
            stack.callback(engines[-1].stop)
        prefill, decode = engines
        prefill.wait_ready()
        decode.wait_ready()
        computed = prefill.transfer(PROMPT, COMPUTE, num_generated=1)
        decoded = decode.transfer(PROMPT, computed["params"])
        # Brought by NIXL, every token of the prompt; FlexCache did not even look.
        assert decode.metric("vllm:external_prefix_cache_hits") == len(PROMPT)
        assert decode.stats()["hit_blocks"] == {}
        assert decoded["tokens"][0] == computed["tokens"][0]
        for engine in engines:
            engine.settle()
            engine.forget("GPU")
            assert engine.generate(PROMPT) == (decoded["tokens"], CACHED)
            assert engine.stats()["hit_blocks"] == {"CPU": CACHED // 32}
