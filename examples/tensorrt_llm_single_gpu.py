"""Run TensorRT-LLM with a FlexCache in DRAM: a prompt is computed once, then loaded.

    FLEXCACHE_CPU_CACHE_GB=16 flexcache server &    # prints FLEXCACHE_ENDPOINT=...
    export FLEXCACHE_ENDPOINT=...
    python examples/tensorrt_llm_single_gpu.py --model Qwen/Qwen3-0.6B

Needs a GPU and TensorRT-LLM 1.2 or later. Run it twice: the second run, a new process, loads the
prompt from the server's DRAM. Without a server, the cache is the engine's own and ends with it.
"""

from __future__ import annotations

import argparse
import time

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig, KvCacheConnectorConfig

PROMPT = "FlexCache keeps the KV cache of a prompt after the GPU has dropped it. " * 40


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute a prompt once, then load it.")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    llm = LLM(
        model=options.model,
        kv_cache_config=KvCacheConfig(enable_partial_reuse=False),
        kv_connector_config=KvCacheConnectorConfig(
            connector_module="flexcache.integration.tensorrt_llm",
            connector_scheduler_class="FlexCacheConnectorScheduler",
            connector_worker_class="FlexCacheConnectorWorker",
        ),
    )
    llm.generate("The ranks find the cache in the first step.", SamplingParams(max_tokens=1))
    started = time.monotonic()
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    print(f"{time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    main()
