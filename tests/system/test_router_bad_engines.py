"""A router whose engines are out of order: others are served all the same."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from fake_openai_engine import FakeEngine
from odd_engine import Answer, OddEngine, as_json
from router_process import RouterProcess, complete, until

MIB = 1 << 20
QUICK = {"prober.PROBE_INTERVAL_S": 0.2, "prober.DETAILS_INTERVAL_S": 0.2}
"""Constants of the router."""

VLLM = 'vllm:cache_config_info{{block_size="{}",num_gpu_blocks="{}"}} 1.0\n'
SGLANG = "sglang:max_total_num_tokens{{}} {}\nsglang:page_size{{}} {}\n"


@pytest.mark.parametrize(
    "metrics",
    [
        VLLM.format(1 << 70, 100),
        SGLANG.format("NaN", 16),
        pytest.param(VLLM.format(16, 1 << 70), marks=pytest.mark.whole),
        pytest.param(VLLM.format("9" * 5000, 100), marks=pytest.mark.whole),
        pytest.param(SGLANG.format("+Inf", 16), marks=pytest.mark.whole),
        pytest.param(SGLANG.format(1e300, 1e300), marks=pytest.mark.whole),
    ],
)
def test_impossible_numbers_of_an_engine_stop_neither_requests_nor_its_probes(metrics: str) -> None:
    with (
        OddEngine() as engine,
        RouterProcess((), f"--worker={engine.url}", constants=QUICK) as router,
    ):
        engine.answers["/metrics"] = Answer(metrics.encode())
        seen = engine.seen["GET /metrics"]
        until(lambda: engine.seen["GET /metrics"] > seen + 1)
        answer = asyncio.run(complete(router.url, [1] * 40, is_streamed=False))
        assert answer.status == 200
        engine.answers["/health"] = Answer(status=503)
        until(lambda: router.states() == {engine.url: "down"})


@pytest.mark.whole
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_an_answer_without_end_is_left(path: str) -> None:
    with (
        OddEngine({path: Answer(padding=512 * MIB)}) as odd,
        FakeEngine() as engine,
        RouterProcess([engine], f"--worker={odd.url}", constants=QUICK) as router,
    ):
        until(lambda: odd.seen[f"GET {path}"] > 1)  # the first one has ended
        assert asyncio.run(complete(router.url, [1] * 40)).is_whole
        assert odd.sent[path] < 64 * MIB, "it reads on and on"


@pytest.mark.whole
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_an_answer_that_unpacks_to_much_is_not_unpacked(path: str) -> None:
    bomb = gzip.compress(bytes(512 * MIB))
    with (
        OddEngine() as odd,
        FakeEngine() as engine,
        RouterProcess([engine], f"--worker={odd.url}", constants=QUICK) as router,
    ):
        assert router.process is not None
        before = peak_bytes(router.process.pid)
        odd.answers[path] = Answer(bomb, headers={"Content-Encoding": "gzip"})
        seen = odd.seen[f"GET {path}"]
        until(lambda: odd.seen[f"GET {path}"] > seen + 1)
        assert asyncio.run(complete(router.url, [1] * 40)).is_whole
        assert peak_bytes(router.process.pid) - before < 128 * MIB


@pytest.mark.parametrize("proxies", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_impossible_usage_is_no_usage(proxies: int) -> None:
    usage = {"prompt_tokens": 10**30, "prompt_tokens_details": {"cached_tokens": 10**30}}
    with (
        OddEngine({"/v1/completions": as_json({"choices": [], "usage": usage})}) as engine,
        RouterProcess((), f"--worker={engine.url}", proxies=proxies) as router,
    ):
        answer = asyncio.run(complete(router.url, [1] * 40, is_streamed=False))
        assert answer.is_whole
        until(lambda: router.stats()["proxy"]["ended"]["done"] == 1)
        assert router.num_reserved() == 0


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10
