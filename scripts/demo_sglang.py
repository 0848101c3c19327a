"""The demo with SGLang: its scheduler, radix tree and model on the CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from demo_story import BLOCK, PROBES, Run, read_tiers, show
from sglang_engine import ENVIRONMENT, TinyEngine, forget_gpu, linker_options, manager_of, settle


class SGLangEngine:
    """A `demo_story.Engine`: starts the process of a `Served`."""

    def __init__(self, model: Path, endpoint: str, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, model, endpoint, directory))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._pipe.recv()

    def run(self, tokens: list[int], num_generated: int) -> Run:
        self._pipe.send((tokens, num_generated))
        answer: Run = self._pipe.recv()
        return answer

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(pipe: Connection, model: Path, endpoint: str, directory: Path) -> None:
    """Run an engine until its pipe is closed."""
    logging.disable(logging.WARNING)
    served = Served(model, endpoint, directory / PROBES)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            pipe.send(served.run(*pipe.recv()))
    served.manager.shutdown()
    os._exit(0)  # SGLang's threads do not end by themselves


class Served:
    """The engine inside its process."""

    def __init__(self, model: Path, endpoint: str, probes: Path) -> None:
        self._engine = TinyEngine(
            path=str(model),
            dtype="float32",  # in bf16 a hit may round to other tokens, with any cache
            page_size=BLOCK,
            context_length=4096,
            max_total_tokens=8192,
            log_level="error",
            **linker_options(endpoint=endpoint, skip_slow_loads=False, log_level="ERROR"),
        )
        self.manager = manager_of(self._engine)
        self._probes = probes

    def run(self, tokens: list[int], num_generated: int) -> Run:
        forget_gpu(self._engine)
        before, start_s = self.manager.stats(), time.perf_counter()
        request = self._engine.add(tokens, num_generated)
        self._engine.step_until(lambda: bool(request.output_ids))
        ttft_s = time.perf_counter() - start_s
        self._engine.step_until(request.finished)
        settle(self._engine)
        self._probe(tokens, request.cached_tokens)
        return Run(ttft_s, list(request.output_ids), read_tiers(before, self.manager.stats()))

    def _probe(self, tokens: list[int], num_cached: int) -> None:
        """Write digests of the pages that were computed or loaded."""
        num_pages = len(tokens) // BLOCK
        layers = self._engine.kv_bytes(tokens[: num_pages * BLOCK])
        with self._probes.open("a") as file:
            for page in range(num_pages):
                digest = hashlib.sha256()
                for layer in layers:
                    size = len(layer) // num_pages
                    digest.update(layer[page * size : (page + 1) * size])
                row = {
                    "event": "loaded" if page * BLOCK < num_cached else "stored",
                    "key": repr(tokens[: (page + 1) * BLOCK]),
                    "digest": digest.hexdigest(),
                }
                file.write(json.dumps(row) + "\n")


def main() -> int:
    os.environ.update(ENVIRONMENT)  # which the engines' processes inherit
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    logging.disable(logging.WARNING)
    return show("SGLang", SGLangEngine)


if __name__ == "__main__":
    sys.exit(main())
