"""vLLM's OpenAI server on a CPU, as `vllm serve` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paths
from engines import ENGINE_ENV
from paths import MODELS, ROOT, SUPPORT
from ports import free_port
from preloaded import ForkedProcess

READY_S = 300
SERVER = "vllm.entrypoints.openai.api_server"


class ApiServer:
    """A server process with a small model of `make_models` and FlexCache.

    Args:
        log: File that takes its output.
        environment: Variables besides those that every CPU engine needs.
        arguments: Options besides the usual ones; repeated options replace those.
        model: Name of the model, which must exist.
        transfer: Fields of vLLM's ``--kv-transfer-config``, `engines.FLEXCACHE` for
            example; None for an engine without a cache.
        kv_events: Fields of vLLM's ``--kv-events-config``; None publishes no events.
        block_size: Tokens per block.
        kv_cache_bytes: Size of the engine's own KV cache.
        python_path: Put before the search path: another version of vLLM. If there is none, the
            server is forked from a process that has made vLLM's imports.
    """

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        *,
        model: str = "tiny",
        transfer: Mapping[str, Any] | None = None,
        kv_events: Mapping[str, Any] | None = None,
        block_size: int = 32,
        kv_cache_bytes: int = 32 << 20,
        python_path: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        options: list[str] = []
        if transfer is not None:
            usual = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            options += ["--kv-transfer-config", json.dumps({**usual, **transfer})]
        if kv_events is not None:
            config = {"enable_kv_cache_events": True, "publisher": "zmq", **kv_events}
            options += ["--kv-events-config", json.dumps(config)]
        options = [
            "--model", str(MODELS / model), "--served-model-name", model,
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
            "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8",
            "--block-size", str(block_size), "--kv-cache-memory-bytes", str(kv_cache_bytes),
            "--enable-prompt-tokens-details", *options, *arguments,
        ]  # fmt: skip
        path = paths.python_path(*python_path, SUPPORT, ROOT)
        variables = {**os.environ, **ENGINE_ENV, "PYTHONPATH": path, **(environment or {})}
        log.write_bytes(b"")
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if not python_path:
            self.process = ForkedProcess("vllm_imports", variables, serve, options, log=log)
            return
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", SERVER, *options], env=variables, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5),
            ):
                return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.3)

    def complete(
        self, prompt: list[int], rank: int | None = None, **more: Any
    ) -> tuple[list[int], int]:
        """Return generated token ids, and how many prompt tokens came from a cache."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        with self._ask(prompt, headers, **more) as response:
            answer = json.load(response)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def transferred(self, prompt: list[int], params: Mapping[str, Any]) -> dict[str, Any]:
        """Compute a prompt for another engine; return what that is to be told."""
        with self._ask(prompt, {}, max_tokens=1, kv_transfer_params=params) as response:
            return dict(json.load(response)["kv_transfer_params"])

    def stream(self, prompt: list[int], **more: Any) -> Iterator[int]:
        """Yield token ids of an answer as they come. It is aborted if no more are read."""
        with self._ask(prompt, {}, stream=True, **more) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield from json.loads(line[6:])["choices"][0]["token_ids"]

    def _ask(self, prompt: list[int], headers: Mapping[str, str], **more: Any) -> Any:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )  # fmt: skip
        return urllib.request.urlopen(request, timeout=READY_S)

    def kill(self) -> None:
        """Kill the server and its engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stop in an orderly way, or kill what does not end. A killed server may be stopped."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()


def call(url: str, body: Any = None) -> Any:
    """POST a body, or GET without one; returns the answer, which may be empty."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def serve(options: Sequence[str]) -> None:
    """Run a server in this process."""
    sys.argv = [SERVER, *options]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def serving(*servers: ApiServer) -> Iterator[None]:
    """Run servers that are ready inside the block and gone after it."""
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()
