"""Several vLLM engines on one cache: data-parallel ranks, and unrelated engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, serving
from engines import PROBED_FLEXCACHE, make_prompt
from paths import MODELS

NUM_TOKENS = 700
INTERVAL = 64
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


def start_server(
    log: Path, environment: dict[str, str], *arguments: str, **extra_config: object
) -> ApiServer:
    """Start a server with the probing connector."""
    transfer = {**PROBED_FLEXCACHE, "kv_connector_extra_config": extra_config}
    return ApiServer(log, environment, arguments, transfer=transfer)


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_data_parallel_ranks_share_what_one_has_stored(
    tp_size: int, tmp_path: Path, probe_dir: Path, runtime_dir: Path
) -> None:
    from probe_connector import compare_probes

    environment = {"KV_PROBE_DIR": str(probe_dir), "XDG_RUNTIME_DIR": str(runtime_dir)}
    server = start_server(
        tmp_path / "log", environment, "--data-parallel-size", "2",
        "--tensor-parallel-size", str(tp_size), num_cpu_blocks=256,
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


@pytest.mark.whole
def test_an_engine_killed_in_mid_answer_finds_it_on_ssd(tmp_path: Path, probe_dir: Path) -> None:
    from probe_connector import compare_probes

    life: dict[str, Any] = {
        "num_cpu_blocks": 256, "num_ssd_blocks": 256, "ssd_cache_dirs": [str(tmp_path / "ssd")],
        "answer_interval_tokens": INTERVAL, "skip_slow_loads": False,
    }  # fmt: skip
    environment, prompt = {"KV_PROBE_DIR": str(probe_dir)}, make_prompt(NUM_TOKENS, 8)
    one = start_server(tmp_path / "one", environment, **life)
    with serving(one):
        seen = list(islice(one.stream(prompt, max_tokens=1000), 3 * INTERVAL + 28))
        one.kill()
    again = start_server(tmp_path / "again", environment, **life)
    with serving(again):
        _, cached = again.complete([*prompt, *seen])
    assert cached >= CACHED + 3 * INTERVAL > NUM_TOKENS + len(seen) - INTERVAL
    assert compare_probes(probe_dir)["different"] == []


def test_separate_engines_share_a_server_started_by_hand_and_can_come_again(
    tmp_path: Path, probe_dir: Path, runtime_dir: Path
) -> None:
    from probe_connector import compare_probes

    environment = {
        "KV_PROBE_DIR": str(probe_dir), "XDG_RUNTIME_DIR": str(runtime_dir),
        "FLEXCACHE_ENDPOINT": f"ipc://{runtime_dir}/cache.sock",
        "FLEXCACHE_ANSWER_INTERVAL_TOKENS": str(INTERVAL),
    }  # fmt: skip
    cache = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server"],
        env={**os.environ, **environment, "FLEXCACHE_CPU_CACHE_GB": "0.2"},
        stdout=(tmp_path / "cache.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    prompt = make_prompt(NUM_TOKENS, 5)
    try:
        one, two = (start_server(tmp_path / name, environment) for name in ("one", "two"))
        with serving(one, two):
            cold, cached = one.complete(prompt)
            assert cached == 0
            one.complete(make_prompt(40, 91))
            warm, cached = two.complete(prompt)
            assert (warm, cached) == (cold, CACHED)
            answer = one.stream(prompt, max_tokens=1000)
            seen = list(islice(answer, 3 * INTERVAL + 28))
            one.kill()  # in mid-answer
            _, cached = two.complete([*prompt, *seen])
            assert cached >= CACHED + 3 * INTERVAL > NUM_TOKENS + len(seen) - INTERVAL
            warm, _ = two.complete(make_prompt(NUM_TOKENS, 6))
        again = start_server(tmp_path / "again", environment)
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
