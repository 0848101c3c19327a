"""Claude Code and Codex through the router to two engines of vLLM.

`agent_transcripts.json` has the last of 20 requests of a session with either command line
(2.1.332 and 0.171.0), whose model was a script. Texts are made up or shortened. The requests before
were its beginnings, but for the place of the ``cache_control`` marker.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from make_models import make_model
from make_tokenizers import make_tokenizer
from paths import MODELS

pytest.importorskip("aiohttp")

from router_process import RouterProcess, until

pytestmark = pytest.mark.whole

TRANSCRIPTS = json.loads((Path(__file__).parent / "agent_transcripts.json").read_text())
MESSAGES, RESPONSES = TRANSCRIPTS
BLOCK = 32
ENDS = ("message_delta", "response.completed", "response.incomplete")
OF_THE_MODEL = ("reasoning", "function_call")


def requests_of(target: str) -> list[dict[str, Any]]:
    """Return the bodies of a session, as the client sent them."""
    body = TRANSCRIPTS[target]["body"]
    field = "messages" if target == MESSAGES else "input"
    items = body[field]
    said = [each.get("role") == "assistant" or each.get("type") in OF_THE_MODEL for each in items]
    ends = [i for i in range(1, len(items)) if said[i] and not said[i - 1]]
    made = [json.loads(json.dumps({**body, field: items[:end]})) for end in [*ends, len(items)]]
    if target == MESSAGES:
        for each in made:
            last = each[field][-1]
            if isinstance(last["content"], str):
                last["content"] = [{"type": "text", "text": last["content"]}]
            last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return made


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


def compacted(target: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a client asks once a summary stands for the conversation so far."""
    text = (
        "The session goes on from one that was too long. Summary: the change is made, tests pass."
    )
    if target == MESSAGES:
        reminder = body["messages"][0]["content"][0]
        said = {"role": "user", "content": [reminder, {"type": "text", "text": text}]}
        return {**body, "messages": [said]}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {**body, "input": [*body["input"][:2], said]}


def ask(router: RouterProcess, target: str, body: dict[str, Any]) -> tuple[str, int, int, int]:
    """Return the worker, the predicted and the reported cached tokens, and the prompt's tokens."""
    few = {"max_tokens": 4} if target == MESSAGES else {"max_output_tokens": 4}
    raw = json.dumps({**body, **few, "model": "tiny"}).encode()
    headers = {"Content-Type": "application/json", **TRANSCRIPTS[target]["headers"]}
    request = urllib.request.Request(router.url + target, raw, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        fields, text = answer.headers, answer.read().decode()
    if body["stream"]:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        last = [each for each in events if each["type"] in ENDS][-1]
    else:
        last = json.loads(text)
    usage = last.get("response", last)["usage"]
    worker, predicted = fields["x-flexcache-worker"], int(fields["x-flexcache-matched-tokens"])
    if target == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        new = usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
        return worker, predicted, cached, cached + new
    return worker, predicted, usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]


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
