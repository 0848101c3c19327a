"""Several vLLM engines on one cache: data-parallel ranks, and unrelated engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_ENV, make_prompt
from paths import MODELS, ROOT, SUPPORT
from ports import free_port

READY_S = 300
NUM_TOKENS = 700
CACHED = 672  # whole blocks of 32, the last token left to compute


@pytest.fixture(scope="module", autouse=True)
def _models() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


@pytest.fixture
def probe_dir(tmp_path: Path) -> Path:
    path = tmp_path / "probe"
    path.mkdir()
    return path


@pytest.fixture
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a directory for this test's sockets; socket paths must be short."""
    import shutil
    import tempfile

    path = tempfile.mkdtemp(prefix="fc-")
    yield Path(path)
    shutil.rmtree(path)


class ApiServer:
    """vLLM's OpenAI server with the probing connector, as `vllm serve` starts it."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str,
                 extra_config: dict[str, Any] | None = None) -> None:  # fmt: skip
        self.port = free_port()
        self.log = log
        transfer = {
            "kv_connector": "ProbeConnector", "kv_connector_module_path": "probe_connector",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra_config or {},
        }  # fmt: skip
        path = os.pathsep.join([str(SUPPORT), str(ROOT)])
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(MODELS / "tiny"), "--served-model-name", "tiny",
                "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
                "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8",
                "--block-size", "32", "--kv-cache-memory-bytes", str(32 << 20),
                "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
                *arguments,
            ],
            env={**os.environ, **ENGINE_ENV, "PYTHONPATH": path, **environment},
            stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5),
            ):
                return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.3)

    def complete(self, prompt: list[int], rank: int | None = None) -> tuple[list[int], int]:
        """Return generated token ids, and how many prompt tokens came from a cache."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=READY_S) as response:
            answer = json.load(response)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(*servers: ApiServer) -> Iterator[None]:
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_data_parallel_ranks_share_what_one_has_stored(
    tp_size: int, tmp_path: Path, probe_dir: Path, runtime_dir: Path
) -> None:
    from probe_connector import compare_probes

    environment = {"KV_PROBE_DIR": str(probe_dir), "XDG_RUNTIME_DIR": str(runtime_dir)}
    server = ApiServer(
        tmp_path / "log", environment, "--data-parallel-size", "2",
        "--tensor-parallel-size", str(tp_size), extra_config={"num_cpu_blocks": 256},
    )  # fmt: skip
    with serving(server):
        for turn in range(3):
            prompt = make_prompt(NUM_TOKENS, turn + 1)
            first, second = turn % 2, 1 - turn % 2
            cold, cached = server.complete(prompt, first)
            assert cached == 0
            server.complete(make_prompt(40, 90 + turn), first)  # its steps end the put
            warm, cached = server.complete(prompt, second)
            assert cached == CACHED, server.log.read_text()[-3000:]
            assert warm == cold
    probes = compare_probes(probe_dir)
    assert probes["different"] == []
    assert probes["ranks"] == tp_size
    assert probes["loaded"] == 3 * CACHED // 32 * tp_size
    deadline = time.monotonic() + 120  # an engine that vLLM kills is mourned for 15 s
    while list((runtime_dir / f"flexcache-{os.getuid()}").iterdir()):
        assert time.monotonic() < deadline, "the server that the ranks shared outlives them"
        time.sleep(0.1)


def test_separate_engines_share_a_server_started_by_hand_and_can_come_again(
    tmp_path: Path, probe_dir: Path, runtime_dir: Path
) -> None:
    from probe_connector import compare_probes

    environment = {
        "KV_PROBE_DIR": str(probe_dir), "XDG_RUNTIME_DIR": str(runtime_dir),
        "FLEXCACHE_ENDPOINT": f"ipc://{runtime_dir}/cache.sock",
    }  # fmt: skip
    cache = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server"],
        env={**os.environ, **environment, "FLEXCACHE_CPU_CACHE_GB": "0.2"},
        stdout=(tmp_path / "cache.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    prompt = make_prompt(NUM_TOKENS, 5)
    try:
        one, two = (ApiServer(tmp_path / name, environment) for name in ("one", "two"))
        with serving(one, two):
            cold, cached = one.complete(prompt)
            assert cached == 0
            one.complete(make_prompt(40, 91))
            warm, cached = two.complete(prompt)
            assert (warm, cached) == (cold, CACHED)
            os.killpg(one.process.pid, signal.SIGKILL)  # the whole engine, at once
            warm, _ = two.complete(make_prompt(NUM_TOKENS, 6))
        again = ApiServer(tmp_path / "again", environment)
        with serving(again):
            assert again.complete(prompt) == (cold, CACHED)
            os.kill(cache.pid, signal.SIGKILL)
            cache.wait()
            fresh, cached = again.complete(make_prompt(NUM_TOKENS, 7))
            assert cached == 0
            assert len(fresh) == 8
    finally:
        cache.kill()
        cache.wait()
    assert compare_probes(probe_dir)["different"] == []
