"""The demo with SGLang: its scheduler, radix tree and model on the CPU, with a small random model
made here."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from demo_story import BLOCK, CACHE_GB, Compared, Run, make_prompt, show
from paths import ROOT

os.environ["MODELS_DIR"] = str(ROOT / ".models")

from sglang_engine import ENVIRONMENT, TinyEngine, forget_gpu, linker_options, manager_of, settle


class SGLangDemo:
    """A `demo_story.Demo`."""

    def __init__(self, work_dir: Path) -> None:
        self._engine = TinyEngine(
            model="mid",
            dtype="float32",  # in bf16 a hit may round to other tokens, with any cache
            page_size=BLOCK,
            context_length=4096,
            max_total_tokens=8192,
            log_level="error",
            **linker_options(
                cpu_cache_gb=CACHE_GB["DRAM"],
                ssd_cache_gb=CACHE_GB["NVMe"],
                ssd_cache_dirs=[str(work_dir / "ssd")],
                log_level="ERROR",
            ),
        )
        self.manager = manager_of(self._engine)
        self._computed: dict[bytes, bytes] = {}
        """Digests of pages by their prefixes."""
        self._num_loaded = self._num_different = 0
        self._generate(make_prompt(64, seed=9))  # the first request of an engine is never typical
        self.drop_gpu(drop_all=True)

    def run(self, name: str, tokens: list[int]) -> Run:
        before = self.manager.stats()["ops"]
        request, ttft_s = self._generate(tokens)
        after = self.manager.stats()["ops"]
        self._compare(tokens, request.cached_tokens)

        def gained(kind: str, what: str) -> Any:
            return after[kind][what] - before[kind][what]

        from_nvme = gained("DISK2H", "blocks") * BLOCK
        loaded = gained("H2D", "blocks") * BLOCK
        return Run(
            name,
            ttft_s,
            list(request.output_ids),
            len(tokens),
            {"DRAM": loaded - from_nvme, "NVMe": from_nvme},
            gained("H2D", "bytes"),
            gained("DISK2H" if from_nvme else "H2D", "seconds"),
        )

    def settle(self) -> None:
        settle(self._engine)

    def drop_gpu(self, drop_all: bool = False) -> None:
        forget_gpu(self._engine)
        if drop_all:
            self.manager.reset()
            self._computed.clear()

    def close(self) -> Compared:
        return Compared(self._num_loaded, self._num_different)

    def _generate(self, tokens: list[int]) -> tuple[Any, float]:
        """Return the request, and the time to its first token."""
        start_s = time.perf_counter()
        request = self._engine.add(tokens)
        self._engine.step_until(lambda: bool(request.output_ids))
        ttft_s = time.perf_counter() - start_s
        self._engine.step_until(request.finished)
        self.settle()
        return request, ttft_s

    def _compare(self, tokens: list[int], num_cached: int) -> None:
        """Remember the pages that were computed, and compare those that were loaded."""
        num_pages = len(tokens) // BLOCK
        layers = self._engine.kv_bytes(tokens[: num_pages * BLOCK])
        for page in range(num_pages):
            digest = hashlib.sha256()
            for layer in layers:
                size = len(layer) // num_pages
                digest.update(layer[page * size : (page + 1) * size])
            prefix = repr(tokens[: (page + 1) * BLOCK]).encode()
            if page * BLOCK < num_cached:
                self._num_loaded += 1
                self._num_different += self._computed.get(prefix) != digest.digest()
            else:
                self._computed[prefix] = digest.digest()


def main() -> int:
    os.environ.update(ENVIRONMENT)
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    logging.disable(logging.WARNING)
    return show("SGLang", SGLangDemo)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # SGLang's threads do not end by themselves
