"""The demo with vLLM: real engines on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from demo_story import BLOCK, Run, read_tiers, show
from driven_engine import DrivenEngine
from engines import Settings


class VLLMEngine(DrivenEngine):
    """A `demo_story.Engine`, with the connector that digests blocks."""

    def __init__(self, model: Path, endpoint: str, directory: Path) -> None:
        settings = Settings(
            "FlexCache",
            model.name,
            dram_gb=None,  # the server's
            more={"endpoint": endpoint},
            # In bf16 a prompt computed in one piece and one whose beginning was cached may round to
            # different tokens, with any cache; then equal answers would prove nothing.
            engine={"dtype": "float32", "block_size": BLOCK},
            probe_dir=str(directory),
        )
        super().__init__(settings, directory / "engines.log")  # forked: soon there, one thread

    def run(self, tokens: list[int], num_generated: int) -> Run:
        self.forget("GPU")
        before = self.stats()
        answer = self.ask(tokens, num_generated)
        self.settle()
        return Run(answer["ttft_s"], answer["tokens"], read_tiers(before, self.stats()))


if __name__ == "__main__":
    os.environ["TORCH_LOGS"] = "-all"  # which would warn that there is no Triton
    sys.exit(show("vLLM", VLLMEngine))
