"""Run SGLang with a FlexCache of DRAM and SSD: a prompt is computed once, then loaded.

    pip install . sglang==0.5.23
    python examples/sglang_single_node.py --model Qwen/Qwen3-0.6B --ssd-dir /nvme0/kv

Run it twice: the second run, a new process, loads the prompt from the SSD directory. The same as a
server is in `docs/guide/sglang.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

PROMPT = "FlexCache keeps the KV cache of a prompt after the GPU has dropped it. " * 40
GREEDY = {"temperature": 0, "max_new_tokens": 16}


def main() -> None:
    import sglang  # here, since SGLang's own processes import this file too

    parser = argparse.ArgumentParser(description="Compute a prompt once, then load it.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ssd-dir", type=os.path.abspath, required=True, help="of the SSD tier")
    parser.add_argument("--cpu-gb", type=float, default=4.0)
    parser.add_argument("--ssd-gb", type=float, default=16.0)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="further arguments of Engine, as JSON"
    )
    options = parser.parse_args()
    engine = sglang.Engine(
        model_path=options.model,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "FlexCacheLinker",
            "linker_module_path": "flexcache.integration.sglang",
            "linker_extra_config": {
                "cpu_cache_gb": options.cpu_gb,
                "ssd_cache_gb": options.ssd_gb,
                "ssd_cache_dirs": [options.ssd_dir],
            },
        },
        **options.engine_args,
    )
    run(engine, "first ")
    while not engine.flush_cache().success:  # refused until the request is gone
        time.sleep(0.05)
    run(engine, "second")
    engine.shutdown()


def run(engine: Any, name: str) -> None:
    started = time.monotonic()
    told = engine.generate(PROMPT, GREEDY)["meta_info"]
    print(
        f"{name}: {told['cached_tokens']} of {told['prompt_tokens']} tokens from the cache, "
        f"{time.monotonic() - started:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
