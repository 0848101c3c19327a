"""Run one engine and print the observations as one JSON line.

    python run_scenario.py '{"tp": 2, "model": "tiny", ...}'

Run as a process, since the number of ranks, the vLLM version and the shape of the pool differ from
test to test. DRAM is kept small so that early prompts have to come back from SSD; with ``settle``
each prompt reaches SSD before the next one comes, so that none finds DRAM full of unwritten blocks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import ENGINE_ENV, PROBED_GROUPS, engine_arguments, make_prompt, wait_until_open

SETTLED_WITHIN_S = 120.0
OPEN_STATES = ("created", "ready", "running")


def main(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fc-", ignore_cleanup_errors=True) as directory:
        return observe(options, Path(directory))


def observe(options: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run the engine; what it writes besides a given ``ssd_dir`` and ``probe_dir`` is in the
    directory."""
    probe_dir = options.get("probe_dir") or str(directory / "probe")
    os.makedirs(probe_dir)
    ssd_dir = options.get("ssd_dir") or str(directory / "ssd")
    os.environ.update(ENGINE_ENV, KV_PROBE_DIR=probe_dir)
    import vllm
    from ports import free_port
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
    settles, address = options.get("settle", False), f"127.0.0.1:{free_port()}"
    if settles:
        extra["http_endpoint"] = address
    extra.update(options.get("extra", {}))
    overrides = dict(options.get("engine", {}))
    if options.get("has_groups"):
        overrides = {"connector": PROBED_GROUPS, "block_size": None, **overrides}
    llm = LLM(**engine_arguments(options["model"], extra, **overrides))
    wait_until_open(llm)
    if settles:  # the cache of an engine in other processes
        wait_until_healthy(address)
    sampling = SamplingParams(
        temperature=0, max_tokens=options.get("max_tokens", 8), ignore_eos=True
    )
    prompts = [
        {"prompt_token_ids": make_prompt(n, i + 1)} for i, n in enumerate(options["prompts"])
    ]

    def run(together: bool, settled: bool = False) -> list[tuple[list[int], int]]:
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = []
        for group in groups:
            outputs += llm.generate(group, sampling, use_tqdm=False)
            if settled:
                step_until(lambda: has_no_open_task(address))
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]

    def step_until(is_done: Callable[[], bool]) -> None:
        """Step the engine, so that puts end and release their blocks."""
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while not is_done():
            assert time.monotonic() < deadline, "the puts did not end"
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)

    cold = run(options.get("together", False), settles)
    step_until(llm.reset_prefix_cache)
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


def wait_until_healthy(address: str) -> None:
    """Wait until a cache serves, with all its workers."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(f"http://{address}/healthz", timeout=30).close()
            return
        except OSError:  # nothing answers yet, or that something is missing
            assert time.monotonic() < deadline, "the cache does not serve"
            time.sleep(0.05)


def has_no_open_task(address: str) -> bool:
    """Return whether the engine's cache has finished all its tasks, SSD writes included."""
    with urllib.request.urlopen(f"http://{address}/status", timeout=30) as answer:
        tasks = json.load(answer)["tasks"]
    return not any(tasks[state] for state in OPEN_STATES)


class _Errors(logging.Handler):
    """Appends the connector's error lines to a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
