"""Claude Code and Codex through the router to two engines of vLLM."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from agent_sessions import TRANSCRIPTS, compacted, of_length, requests_of, usage_of
from api_server import ApiServer
from make_models import make_model
from make_tokenizers import make_tokenizer
from paths import MODELS

pytest.importorskip("aiohttp")

from router_process import RouterProcess, until

pytestmark = pytest.mark.whole

BLOCK = 32


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A router's options for two engines, which run."""
    make_model(MODELS, "tiny")
    directory = tmp_path_factory.mktemp("engines")
    tokenizer = make_tokenizer(directory, "chatml")
    started: list[ApiServer] = []
    named = [f"--tokenizer={tokenizer}"]
    try:
        for name in "ab":
            events, replay = (f"ipc://{directory}/{name}-{kind}" for kind in ("kv", "again"))
            server = ApiServer(
                directory / f"{name}.log",
                {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
                ["--tokenizer", str(tokenizer), "--max-model-len", "8192",
                 "--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
                kv_events={"endpoint": events, "replay_endpoint": replay},
                kv_cache_bytes=64 << 20,
            )  # fmt: skip
            started.append(server)
            named += [f"--worker={server.url}", f"--events={server.url}={events},{replay}"]
        for server in started:
            server.wait_ready()
        yield named
    finally:
        for server in started:
            server.stop()


def ask(router: RouterProcess, target: str, body: dict[str, Any]) -> tuple[str, int, int, int]:
    """Return the worker, the predicted and the reported cached tokens, and the prompt's tokens."""
    raw = json.dumps({**body, **of_length(target, 4), "model": "tiny"}).encode()
    headers = {"Content-Type": "application/json", **TRANSCRIPTS[target]["headers"]}
    request = urllib.request.Request(router.url + target, raw, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        fields, text = answer.headers, answer.read().decode()
    worker, predicted = fields["x-flexcache-worker"], int(fields["x-flexcache-matched-tokens"])
    return worker, predicted, *usage_of(target, text)


def foreseen(
    router: RouterProcess, target: str, body: dict[str, Any]
) -> tuple[int, dict[str, int]]:
    """Return the length of the prompt as the router reads it, and what each engine has of it."""
    wanted = {"request": {**body, "model": "tiny"}, "path": target}
    selected = router.post("/select", wanted)
    length = selected["effective_prefill_tokens"] + selected["overlap"]["longest_matched"]
    scores = router.post("/score", wanted)["scores"]
    return length, {each["worker_id"]: sum(each["matched"].values()) for each in scores}


def test_sessions_of_both_clients_find_their_kv(options: list[str]) -> None:
    sessions = {target: requests_of(target) for target in TRANSCRIPTS}
    assert [len(each) for each in sessions.values()] == [20, 20]
    turns = exact = same_length = moved = found = 0
    last: dict[str, str] = {}
    with RouterProcess((), *options) as router:
        until(lambda: set(router.states().values()) == {"up"})
        for turn in range(20):
            for target, bodies in sessions.items():
                body = bodies[turn]
                length, _ = foreseen(router, target, body)
                worker, predicted, cached, total = ask(router, target, body)
                print(turn, target, worker, length, total, predicted, cached)
                turns += 1
                exact += predicted == cached
                found += cached > 0
                same_length += length == total
                moved += last.setdefault(target, worker) != worker
                last[target] = worker

                def is_known(target: str = target, turn: int = turn, total: int = total) -> bool:
                    held = foreseen(router, target, sessions[target][turn])[1]
                    return held[last[target]] == (total - 1) // BLOCK * BLOCK

                until(is_known)  # a client takes longer to run its tools
        for target, bodies in sessions.items():
            worker, predicted, cached, total = ask(router, target, {**bodies[-1], "stream": False})
            assert (worker, predicted) == (last[target], cached) and cached > 0
            assert cached == (total - 1) // BLOCK * BLOCK
            shorter = compacted(target, bodies[-1])
            length, _ = foreseen(router, target, shorter)
            worker, predicted, cached, total = ask(router, target, shorter)
            assert (worker, predicted, length) == (last[target], cached, total)
            assert cached > 0, "instructions and tools are the same"
    assert same_length == turns == 40
    assert exact >= 0.99 * turns and found >= 38, (exact, found)
    assert moved <= 0.05 * turns, moved
