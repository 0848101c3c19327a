"""The files of the package that a request enters, and the calls on the way.

    python tests/support/traced_paths.py get|put|routed

Prints JSON: the files with their calls, in the order in which they are entered first. Each request
is made several times and the least is taken, so that what runs in the background does not count.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import flexcache

PACKAGE = str(Path(flexcache.__file__).parent)
TRIES = 5
ROUTED_TRIES = 31
PATIENCE_S = 60.0


class CallTrace:
    """Counts the calls of the package's functions, of all threads started after it was made."""

    def __init__(self) -> None:
        self._calls: dict[str, int] | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        calls = self._calls
        if event == "call" and calls is not None:
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE):
                calls[file] = calls.get(file, 0) + 1

    def calls_of(self, request: Callable[[], None]) -> dict[str, int]:
        """Make a request; return the calls by file, named from the package's directory on."""
        self._calls = calls = {}
        request()
        self._calls = None
        return {str(Path(file).relative_to(PACKAGE)): count for file, count in calls.items()}


def least(traces: list[dict[str, int]]) -> dict[str, int]:
    return min(traces, key=lambda calls: (len(calls), sum(calls.values())))


def trace_transfers() -> tuple[dict[str, int], dict[str, int]]:
    """Return the calls of a get and of a put of four blocks, cache and rank in this process."""
    import torch

    from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

    trace = CallTrace()
    model = ModelConfig("traced", num_layers=2, num_kv_heads=2, head_size=8, dtype=torch.float32)
    config = CacheConfig(num_cpu_blocks=256, tokens_per_block=16)
    kv = {f"layer.{i}": torch.zeros(64, 2, 16, 2, 8) for i in range(2)}
    with KVManager(model, config) as manager, KVTPClient(manager.endpoint) as client:
        client.register_kv_caches(kv)
        manager.wait_ready(PATIENCE_S)

        def put(number: int) -> Callable[[], None]:
            def request() -> None:
                tokens = list(range(1000 * number, 1000 * number + 64))
                task, mask = manager.put_async(tokens, slot_mapping=range(64))
                assert mask.sum() == 64
                manager.wait([task])

            return request

        def get(number: int) -> Callable[[], None]:
            def request() -> None:
                tokens = list(range(1000 * number, 1000 * number + 64))
                task, mask = manager.get_async(tokens, slot_mapping=range(512, 576))
                assert mask.sum() == 64
                manager.wait([task])

            return request

        puts = [trace.calls_of(put(number)) for number in range(TRIES + 1)][1:]
        gets = [trace.calls_of(get(number)) for number in range(TRIES + 1)][1:]
    return least(gets), least(puts)


def trace_routed() -> dict[str, int]:
    """Return the calls of a completion that the router of this process passes to an engine."""
    from fake_openai_engine import FakeEngine
    from ports import free_ports

    from flexcache.cli import app

    trace = CallTrace()
    port, control_port = free_ports(2)
    traces: list[dict[str, int]] = []

    def ask() -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({"model": "m", "prompt": list(range(64)), "max_tokens": 1}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.read()

    def ask_and_stop() -> None:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not traces:
                with suppress(OSError):  # not up yet, or it does not know its engine yet
                    traces.append(trace.calls_of(ask))
                assert time.monotonic() < deadline
                time.sleep(0.05)
            traces[:] = [trace.calls_of(ask) for _ in range(ROUTED_TRIES)]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with FakeEngine() as engine:
        threading.Thread(target=ask_and_stop, daemon=True).start()
        arguments = [f"--worker={engine.url}", f"--port={port}", f"--control-port={control_port}"]
        app(["router", *arguments], standalone_mode=False)
    # Not the least: the end of one request may be counted with the next.
    totals = [sum(calls.values()) for calls in traces]
    return traces[totals.index(statistics.mode(totals))]


def main(what: str) -> None:
    traces = trace_routed() if what == "routed" else trace_transfers()[what == "put"]
    print(json.dumps(traces))


if __name__ == "__main__":
    main(sys.argv[1])
