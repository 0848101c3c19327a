"""Runs one engine of its own and prints what was seen as one JSON line.

    python run_scenario.py '{"tp": 2, "model": "tiny", ...}'

Run as a process, since the number of ranks, the vLLM version and the shape of the pool differ from
test to test. DRAM is kept small so that early prompts have to come back from SSD.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import ENGINE_ENV, engine_arguments, make_prompt


def main(options: dict[str, Any]) -> dict[str, Any]:
    probe_dir = tempfile.mkdtemp(prefix="probe-")
    ssd_dir = options.get("ssd_dir") or tempfile.mkdtemp(prefix="ssd-")
    os.environ.update(ENGINE_ENV, KV_PROBE_DIR=probe_dir)
    import vllm
    from probe_connector import compare_probes
    from vllm import LLM, SamplingParams

    if "layout" in options:  # what the ranks say of theirs; in one process with the scheduler
        from flexcache.integration.vllm import worker

        worker.describe_layout = lambda *_: options["layout"]
    errors: list[str] = []
    logging.getLogger("flexcache.integration.vllm").addHandler(_Errors(errors))
    extra = {"num_cpu_blocks": options.get("cpu_blocks", 64), "ssd_cache_dirs": [ssd_dir]}
    extra["num_ssd_blocks"] = options.get("ssd_blocks", 1024)
    extra["skip_slow_loads"] = False  # tiny models compute faster than a busy disk reads
    extra.update(options.get("extra", {}))
    overrides = dict(options.get("engine", {}))
    llm = LLM(**engine_arguments(options["model"], extra, **overrides))
    sampling = SamplingParams(
        temperature=0, max_tokens=options.get("max_tokens", 8), ignore_eos=True
    )
    prompts = [
        {"prompt_token_ids": make_prompt(n, i + 1)} for i, n in enumerate(options["prompts"])
    ]

    def run(together: bool) -> list[tuple[list[int], int]]:
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [o for group in groups for o in llm.generate(group, sampling, use_tqdm=False)]
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]

    cold = run(options.get("together", False))
    for _ in range(200):  # puts hold blocks until they end, and end while the engine steps
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
        if llm.reset_prefix_cache():
            break
    else:
        raise AssertionError("the puts did not end")
    warm = run(options.get("together", False))
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    return {
        "vllm": vllm.__version__,
        "tokens": [c[0] for c in cold],
        "errors": errors,
        "tokens_equal": [c[0] == w[0] for c, w in zip(cold, warm, strict=True)],
        "cached": [w[1] for w in warm],
        "probes": compare_probes(Path(probe_dir)),
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "dram_hit_tokens": metrics.get("vllm:flexcache_dram_hit_tokens", 0),
        "ssd_hit_tokens": metrics.get("vllm:flexcache_ssd_hit_tokens", 0),
    }


class _Errors(logging.Handler):
    """Appends the connector's error lines to a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
