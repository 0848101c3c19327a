"""An engine at a shared server that is killed, stopped or ended at chosen moments of a step that
loads a prompt. Prints, as JSON, how each case went.

    python struck_steps.py [ARGUMENT=JSON of vllm.LLM ...]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import until
from engines import ENGINE_ENV, Engine, engine_arguments, make_prompt
from paths import MODELS

MOMENTS = ("promised", "scheduled", "begun", "in a layer", "at its end")
BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "ended": signal.SIGTERM}
SERVER_TIMEOUT_S = 1.0


class Server:
    """A server by itself, at the same address each time."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/cache.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flexcache.cli", "server"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={
                **os.environ, "FLEXCACHE_ENDPOINT": self.endpoint, "FLEXCACHE_CPU_CACHE_GB": "0.2",
            },
        )  # fmt: skip

    def strike(self, blow: int) -> None:
        assert self._process is not None
        self._process.send_signal(blow)

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()


class Steps:
    """Calls back at a moment of the next step that loads."""

    def __init__(self, engine: Engine) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler, worker = engine.connector._scheduler, get_kv_transfer_group()._worker
        self.layers, self.worker = get_kv_transfer_group()._layers, worker
        self.num_promised = 0
        self._callback: tuple[str, Callable[[], None]] | None = None
        cache, loads = scheduler._cache, worker.step_loads
        promise, take_step, begin_step = cache.promise, scheduler.take_step, worker.begin_step
        before_layer, finish = loads.before_layer, loads.finish

        def promised(task_id: int) -> Any:
            found = promise(task_id)
            if found is not None:
                self._come_to("promised")
            return found

        def scheduled(output: Any) -> Any:
            metadata = take_step(output)
            num_promised = sum(load.promised is not None for load in metadata.loads)
            self.num_promised += num_promised
            if num_promised:
                self._come_to("scheduled")
            return metadata

        def begun(metadata: Any) -> None:
            if any(load.promised for load in metadata.loads):
                self._come_to("begun")
            begin_step(metadata)

        def in_a_layer(name: str) -> None:
            before_layer(name)
            if loads._loads:
                self._come_to("in a layer")

        def at_its_end() -> None:
            if loads._loads:
                self._come_to("at its end")
            finish()

        cache.promise, scheduler.take_step = promised, scheduled
        worker.begin_step, loads.before_layer, loads.finish = begun, in_a_layer, at_its_end

    def call_at(self, moment: str, callback: Callable[[], None]) -> None:
        self._callback = moment, callback

    def _come_to(self, moment: str) -> None:
        if self._callback is not None and self._callback[0] == moment:
            callback, self._callback = self._callback[1], None
            callback()


def tokens_of(engine: Engine, prompt: list[int]) -> list[int]:
    return list(engine.generate(prompt).outputs[0].token_ids)


def strike(engine: Engine, steps: Steps, server: Server, moment: str, blow: str) -> dict[str, Any]:
    """Serve a prompt, and again from DRAM while its server is struck."""
    prompt = make_prompt(900, 1)
    cold = tokens_of(engine, prompt)
    engine.forget_gpu()
    for layer in steps.layers.values():
        layer.normal_(0, 3)
    steps.num_promised = 0
    client = steps.worker.client

    def fall() -> None:
        server.strike(BLOWS[blow])
        until(lambda: client._is_leaving)  # the rank has noticed, and would leave

    steps.call_at(moment, fall)
    struck = tokens_of(engine, prompt)
    return {
        "moment": moment,
        "blow": blow,
        "promised": steps.num_promised,
        "equal": struck == cold,
        "later equal": tokens_of(engine, prompt) == cold,  # from the GPU
    }


def main() -> None:
    os.environ.update(ENGINE_ENV, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from make_models import make_model
    from vllm import LLM

    make_model(MODELS, "tiny")
    with tempfile.TemporaryDirectory(prefix="fc-") as directory:
        os.environ["KV_PROBE_DIR"] = directory
        server = Server(Path(directory))
        extra = {
            "layerwise_load": "on", "endpoint": server.endpoint,
            "server_timeout_s": SERVER_TIMEOUT_S,
        }  # fmt: skip
        overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
        arguments = engine_arguments("tiny", extra, dtype="float32")
        arguments.update({name: json.loads(text) for name, text in overrides.items()})
        server.start()
        llm = LLM(**arguments)
        seen = []
        try:
            engine = Engine(llm, Path(directory))
            steps = Steps(engine)
            for moment in MOMENTS:
                for blow in BLOWS:
                    until(engine.manager.is_ready)
                    seen.append(strike(engine, steps, server, moment, blow))
                    server.end()
                    engine.forget_gpu()
                    server.start()
        finally:
            llm.llm_engine.engine_core.shutdown()
            server.end()
    config = llm.llm_engine.vllm_config
    runs_ahead = bool(config.scheduler_config.async_scheduling)
    print(json.dumps({"asynchronous": runs_ahead, "seen": seen}))


if __name__ == "__main__":
    main()
