"""Run vLLM with a FlexCache of DRAM and SSD: a prompt is computed once, then loaded.

    pip install ".[vllm]"
    python examples/vllm_single_node.py --model Qwen/Qwen3-0.6B --ssd-dir /nvme0/kv

Run it twice: the second run, a new process, loads the prompt from the SSD directory. (Set
PYTHONHASHSEED if your vLLM draws the root of its block hashes at random, as 0.28 does.) The same as
a server:

    FLEXCACHE_CPU_CACHE_GB=4 FLEXCACHE_SSD_CACHE_GB=16 FLEXCACHE_SSD_CACHE_DIRS=/nvme0/kv \
    vllm serve Qwen/Qwen3-0.6B --kv-transfer-config '{"kv_connector": "FlexCacheConnectorV1",
        "kv_connector_module_path": "flexcache.integration.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'
"""

from __future__ import annotations

import argparse
import json
import os
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = "FlexCache keeps the KV cache of a prompt after the GPU has dropped it. " * 40
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute a prompt once, then load it.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ssd-dir", type=os.path.abspath, required=True, help="of the SSD tier")
    parser.add_argument("--cpu-gb", type=float, default=4.0)
    parser.add_argument("--ssd-gb", type=float, default=16.0)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON"
    )
    options = parser.parse_args()
    llm = LLM(
        model=options.model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FlexCacheConnectorV1",
            kv_connector_module_path="flexcache.integration.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "cpu_cache_gb": options.cpu_gb,
                "ssd_cache_gb": options.ssd_gb,
                "ssd_cache_dirs": [options.ssd_dir],
            },
        ),
        **options.engine_args,
    )
    run(llm, "first ")
    while not llm.reset_prefix_cache():  # vLLM keeps the blocks until they are stored
        llm.generate("step", GREEDY, use_tqdm=False)
        time.sleep(0.05)
    run(llm, "second")


def run(llm: LLM, name: str) -> None:
    started = time.monotonic()
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    print(
        f"{name}: {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens from the "
        f"cache, {time.monotonic() - started:.2f} s"
    )


if __name__ == "__main__":
    main()
