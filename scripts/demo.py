"""The demo: one prompt cold, from DRAM, from NVMe, and another that shares part of its prefix.

Runs a real vLLM engine on the CPU with a small random model made here. Exits non-zero unless tokens
and KV bytes are equal to the cold run's.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from engines import make_prompt
from paths import ROOT

SHARED_TOKENS, OTHER_TOKENS, BLOCK = 2048, 512, 32
CACHE_GB = {"DRAM": 1.0, "NVMe": 2.0}


@dataclass
class Run:
    name: str
    ttft_s: float
    tokens: list[int]
    num_prompt: int
    from_tier: dict[str, int]
    moved_bytes: int
    moved_s: float


class Demo:
    """One engine with FlexCache in this process, so that its tiers can be cleared one by one."""

    def __init__(self, work_dir: Path) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.probe_dir = work_dir / "probe"
        self.probe_dir.mkdir()
        os.environ["KV_PROBE_DIR"] = str(self.probe_dir)
        self.llm = LLM(
            model=str(ROOT / ".models" / "mid"),
            # In bf16 a prompt computed in one piece and one whose beginning was cached may round to
            # different tokens, with any cache; then equal tokens would prove nothing.
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=4,
            block_size=BLOCK,
            kv_cache_memory_bytes=512 << 20,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ProbeConnector",  # FlexCacheConnectorV1 that also digests blocks
                kv_connector_module_path="probe_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "cpu_cache_gb": CACHE_GB["DRAM"],
                    "ssd_cache_gb": CACHE_GB["NVMe"],
                    "ssd_cache_dirs": [str(work_dir / "ssd")],
                },
            ),
        )
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.connector._scheduler.manager
        self.generate(make_prompt(64, seed=9))  # the first request of an engine is never typical
        self.drop_gpu(drop_all=True)

    def generate(self, tokens: list[int]) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]

    def run(self, name: str, tokens: list[int]) -> Run:
        before = self.manager.stats()
        output = self.generate(tokens)
        after = self.manager.stats()
        hits = {
            shown: (after["tiers"][tier]["hit_blocks"] - before["tiers"][tier]["hit_blocks"])
            for shown, tier in (("DRAM", "CPU"), ("NVMe", "SSD"))
        }
        loads = {key: after["ops"]["H2D"][key] - before["ops"]["H2D"][key] for key in ("bytes",)}
        slowest = "DISK2H" if hits["NVMe"] else "H2D"
        busy = after["ops"][slowest]["seconds"] - before["ops"][slowest]["seconds"]
        return Run(
            name,
            output.metrics.first_token_latency,
            list(output.outputs[0].token_ids),
            len(tokens),
            {tier: blocks * BLOCK for tier, blocks in hits.items()},
            loads["bytes"],
            busy,
        )

    def settle(self) -> None:
        """Let puts reach every tier."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        while any(self.manager.stats()["tiers"][t]["leased"] for t in ("CPU", "SSD")):
            time.sleep(0.01)

    def drop_gpu(self, drop_all: bool = False) -> None:
        self.settle()
        if not self.llm.reset_prefix_cache(reset_connector=drop_all):
            raise SystemExit("vLLM did not give its GPU cache up")


def main() -> int:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
        TORCH_COMPILE_DISABLE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        PYTHONWARNINGS="ignore",
    )
    logging.getLogger().setLevel(logging.ERROR)
    from rich.console import Console

    console = Console(width=max(130, Console().width))
    say = console.print
    work_dir = Path(tempfile.mkdtemp(prefix="flexcache-demo-", dir=ROOT))
    try:
        with console.status("making the model (136 M parameters, random)"):
            from make_models import make_model

            make_model(ROOT / ".models", "mid")
        say("[green]✓[/] model: 136 M parameters, 12 layers, random weights")
        with console.status("starting vLLM with FlexCache"):
            demo = Demo(work_dir)
        say("[green]✓[/] vLLM is up, with FlexCache on DRAM and NVMe")
        runs = play(demo, say, console)
        demo.settle()
        from probe_connector import compare_probes

        probes = compare_probes(demo.probe_dir)
        stats = demo.manager.stats()
        demo.llm.llm_engine.engine_core.shutdown()
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return report(runs, probes, stats, say)


def play(demo: Demo, say: Any, console: Any) -> dict[str, Run]:
    shared = make_prompt(SHARED_TOKENS, seed=1)
    other = shared[: SHARED_TOKENS // 2] + make_prompt(OTHER_TOKENS, seed=2)
    runs: dict[str, Run] = {}

    def step(key: str, name: str, tokens: list[int]) -> None:
        with console.status(name):
            runs[key] = demo.run(name, tokens)
            demo.settle()
        say(f"[green]✓[/] {name}: first token after {runs[key].ttft_s:.3f} s")

    step("other cold", "the other prompt, cold", other)
    demo.drop_gpu(drop_all=True)
    step("cold", "a long prompt, cold", shared)
    demo.drop_gpu()
    step("dram", "GPU cache dropped, the same from DRAM", shared)
    demo.drop_gpu()
    demo.manager.clear("CPU")
    step("ssd", "DRAM cleared, the same from NVMe", shared)
    demo.drop_gpu()
    step("other", "the other prompt, half of it shared", other)
    return runs


def report(runs: dict[str, Run], probes: dict[str, Any], stats: dict[str, Any], say: Any) -> int:
    from rich.table import Table

    table = Table(title="Where the prompt's KV came from")
    for column in ("run", "prompt", "from DRAM", "from NVMe", "TTFT", "of cold", "moved", "GB/s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    colds = {"dram": "cold", "ssd": "cold", "other": "other cold"}
    for key, run in runs.items():
        ratio = run.ttft_s / runs[colds[key]].ttft_s if key in colds else 1.0
        speed = f"{run.moved_bytes / run.moved_s / 1e9:.2f}" if run.moved_bytes else ""
        table.add_row(
            run.name,
            f"{run.num_prompt} tokens",
            str(run.from_tier["DRAM"] or ""),
            str(run.from_tier["NVMe"] or ""),
            f"{run.ttft_s:.3f} s",
            f"{ratio:.1%}",
            f"{run.moved_bytes / 1e6:.1f} MB" if run.moved_bytes else "",
            speed,
        )
    say(table)
    say("GB/s: of the slower leg, host memory to engine or NVMe to host memory, queueing included")
    written = stats["ops"]["H2DISK"]
    say(f"written to NVMe: {written['bytes'] / 1e6:.1f} MB in {written['ops']} ops")
    tokens_equal = all(runs[key].tokens == runs[cold].tokens for key, cold in colds.items())
    expected = {"dram": ("DRAM", SHARED_TOKENS), "ssd": ("NVMe", SHARED_TOKENS)}
    served = all(runs[key].from_tier[tier] == count for key, (tier, count) in expected.items())
    served &= runs["other"].from_tier["DRAM"] == SHARED_TOKENS // 2
    bytes_equal = probes["loaded"] > 0 and not probes["different"]
    checks = {
        "every tier served what it should": served,
        "tokens are equal to the cold run's": tokens_equal,
        f"KV bytes of all {probes['loaded']} loaded blocks, every layer, are equal": bytes_equal,
    }
    for text, holds in checks.items():
        say(f"[green]✓[/] {text}" if holds else f"[red]✗ NOT: {text}[/]")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
