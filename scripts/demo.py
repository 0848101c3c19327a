"""The demo with vLLM: a real engine on the CPU with a small random model made here."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from demo_story import BLOCK, CACHE_GB, Compared, Run, make_prompt, show
from paths import ROOT


class VLLMDemo:
    """A `demo_story.Demo`."""

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
        slowest = "DISK2H" if hits["NVMe"] else "H2D"
        busy = after["ops"][slowest]["seconds"] - before["ops"][slowest]["seconds"]
        return Run(
            name,
            output.metrics.first_token_latency,
            list(output.outputs[0].token_ids),
            len(tokens),
            {tier: blocks * BLOCK for tier, blocks in hits.items()},
            after["ops"]["H2D"]["bytes"] - before["ops"]["H2D"]["bytes"],
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

    def close(self) -> Compared:
        from probe_connector import compare_probes

        probes = compare_probes(self.probe_dir)
        self.llm.llm_engine.engine_core.shutdown()
        return Compared(probes["loaded"], probes["different"])


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
    return show("vLLM", VLLMDemo)


if __name__ == "__main__":
    sys.exit(main())
