"""What one engine knows and its siblings do not: models, stored responses, files, adapters."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
import uuid
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from odd_engine import Answer, OddEngine, as_json, models
from router_process import RouterProcess, until

TIMES = 12
"""With two engines to choose from, all right by chance is one in 4,096."""
PROXIES = [2, pytest.param(0, marks=pytest.mark.whole)]


class Storing(OddEngine):
    """Keeps responses, files and batches, and loads adapters, as vLLM and SGLang do."""

    def __init__(self, model: str = "m", loads: bool = True) -> None:
        super().__init__(
            {
                "/v1/models": self._models,
                "/v1/responses": self._responses,
                "/v1/files": self._responses,
                "/v1/batches": self._responses,
                "/v1/load_lora_adapter": self._load,
                "/v1/unload_lora_adapter": self._unload,
                "/v1/chat/completions": self._chat,
            }
        )
        self.kept: set[str] = set()
        self.names = [model]
        self._can_load = loads

    def _models(self, method: str, target: str, body: bytes) -> Answer:
        return models(*self.names, max_model_len=4096)

    def _responses(self, method: str, target: str, body: bytes) -> Answer:
        kind, _, rest = target.partition("?")[0].removeprefix("/v1/").partition("/")
        asked = rest.partition("/")[0]
        if method == "POST" and not rest:
            content = json.loads(body)
            asked = content.get("previous_response_id") or content.get("input_file_id") or ""
        if asked and asked not in self.kept:
            return as_json({"error": {"message": f"no {asked}"}}, 404)
        if rest:
            return as_json({"id": asked})
        made = {"id": f"{kind}_{uuid.uuid4().hex}"}
        if kind == "batches":
            made["output_file_id"] = f"file_{uuid.uuid4().hex}"
        self.kept |= set(made.values())
        if not content.get("stream"):
            return as_json(made)
        events = [{"type": "response.created", "response": made}, {"type": "response.completed"}]
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        return Answer(text.encode(), 200, {"Content-Type": "text/event-stream"})

    def _load(self, method: str, target: str, body: bytes) -> Answer:
        if not self._can_load:
            return as_json({"error": {"message": "no such directory"}}, 400)
        self.names.append(json.loads(body)["lora_name"])
        return Answer(b"Success: added", 200, {"Content-Type": "text/plain"})

    def _unload(self, method: str, target: str, body: bytes) -> Answer:
        self.names.remove(json.loads(body)["lora_name"])
        return Answer(b"Success: removed")

    def _chat(self, method: str, target: str, body: bytes) -> Answer:
        if json.loads(body)["model"] not in self.names:
            return as_json({"error": {"message": "no such model"}}, 404)
        return as_json({"choices": []})


def call(router: RouterProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Return status and content, on a connection of its own."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(router.url + path, data, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def started(*engines: OddEngine, proxies: int = 0) -> RouterProcess:
    options = [f"--worker={engine.url}" for engine in engines]
    return RouterProcess((), *options, proxies=proxies, policy="round_robin")


def all_up(router: RouterProcess) -> bool:
    return set(router.states().values()) == {"up"}


def listed(router: RouterProcess) -> set[str]:
    status, content = call(router, "GET", "/v1/models")
    assert status == 200, content
    cards = json.loads(content)["data"]
    assert all(card["max_model_len"] == 4096 for card in cards)
    return {card["id"] for card in cards}


@pytest.mark.parametrize("proxies", PROXIES)
def test_the_models_of_all_engines_are_listed(proxies: int) -> None:
    with Storing("a") as one, Storing("b") as two, started(one, two, proxies=proxies) as router:
        until(lambda: all_up(router))
        until(lambda: listed(router) == {"a", "b"})  # told to each proxy
        assert [listed(router) for _ in range(TIMES)] == [{"a", "b"}] * TIMES
        assert call(router, "GET", "/v1/models/a")[0] == 200


@pytest.mark.parametrize("proxies", PROXIES)
@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_what_continues_or_asks_for_a_response_goes_where_it_is(
    proxies: int, is_streamed: bool
) -> None:
    with Storing() as one, Storing() as two, started(one, two, proxies=proxies) as router:
        until(lambda: all_up(router))
        statuses = []
        for _ in range(TIMES):
            status, text = call(
                router, "POST", "/v1/responses", {"input": "x", "stream": is_streamed}
            )
            assert status == 200
            if is_streamed:
                text = text.split("data: ")[1].partition("\n")[0]
            made = json.loads(text)
            name = made["response"]["id"] if is_streamed else made["id"]
            content = {"input": "y", "previous_response_id": name}
            statuses += [
                call(router, "POST", "/v1/responses", content)[0],
                call(router, "GET", f"/v1/responses/{name}?stream=false")[0],
                call(router, "POST", f"/v1/responses/{name}/cancel", {})[0],
            ]
        assert statuses == [200] * len(statuses)
        status, text = call(router, "GET", "/v1/responses/responses_of_yesterday")
        assert status == 404
        assert "does not know which" in text


def test_batches_and_files_go_where_they_are() -> None:
    with Storing() as one, Storing() as two, started(one, two) as router:
        until(lambda: all_up(router))
        statuses = []
        for _ in range(TIMES):
            file = json.loads(call(router, "POST", "/v1/files", {})[1])
            content = {"input_file_id": file["id"]}
            status, text = call(router, "POST", "/v1/batches", content)
            statuses.append(status)
            if status == 200:
                output = json.loads(text)["output_file_id"]
                statuses.append(call(router, "GET", f"/v1/files/{output}/content")[0])
        assert statuses == [200] * 2 * TIMES


@pytest.mark.whole
def test_a_new_decider_knows_where_responses_are() -> None:
    with Storing() as one, Storing() as two, started(one, two, proxies=1) as router:
        until(lambda: all_up(router))
        made = json.loads(call(router, "POST", "/v1/responses", {"input": "x"})[1])
        (old,) = router.children("decider")
        os.kill(old, signal.SIGKILL)
        until(lambda: router.children("decider") not in ([], [old]))
        until(router.is_ready)
        path = f"/v1/responses/{made['id']}"
        assert [call(router, "GET", path)[0] for _ in range(TIMES)] == [200] * TIMES


@pytest.mark.parametrize("proxies", PROXIES)
def test_an_adapter_is_loaded_by_every_engine(proxies: int) -> None:
    with Storing() as one, Storing() as two, started(one, two, proxies=proxies) as router:
        until(lambda: all_up(router))
        body = {"lora_name": "tuned", "lora_path": "/a"}
        assert call(router, "POST", "/v1/load_lora_adapter", body) == (200, "Success: added")
        chat = {"model": "tuned", "messages": []}
        statuses = [call(router, "POST", "/v1/chat/completions", chat)[0] for _ in range(TIMES)]
        assert statuses == [200] * TIMES
        until(lambda: listed(router) == {"m", "tuned"})
        assert call(router, "POST", "/v1/unload_lora_adapter", body)[0] == 200
        until(lambda: listed(router) == {"m"})
        assert one.names == two.names == ["m"]


CHANGES = (
    "pause", "resume", "init_weight_transfer_engine", "start_weight_update", "update_weights",
    "start_draft_weight_update", "finish_weight_update", "collective_rpc", "sleep", "wake_up",
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
    "update_weights_from_ipc", "release_memory_occupation", "resume_memory_occupation",
    "begin_weight_update", "end_weight_update", "pause_generation", "continue_generation",
)  # fmt: skip


def test_every_engine_gets_what_changes_its_weights() -> None:
    made: dict[int, list[str]] = {1: [], 2: []}

    def engine(number: int, model: str) -> OddEngine:
        def change(method: str, target: str, body: bytes) -> Answer:
            made[number].append(target)
            return Answer(b"done")

        listing = {"/v1/models": lambda *_: models(model, max_model_len=4096)}
        return OddEngine({**listing, **{f"/{name}": change for name in CHANGES}})

    with engine(1, "a") as one, engine(2, "b") as two, started(one, two) as router:
        until(lambda: all_up(router))
        assert {call(router, "POST", f"/{name}", {})[0] for name in CHANGES} == {200}
        assert call(router, "POST", "/update_weights", {"model": "b"})[0] == 200
        assert call(router, "GET", "/resume_memory_occupation")[0] == 200  # SGLang takes it, too
    sent = [f"/{name}" for name in CHANGES]
    assert made[1] == [*sent, "/resume_memory_occupation"]
    assert made[2] == [*sent, "/update_weights", "/resume_memory_occupation"]


def test_the_engines_that_did_not_load_an_adapter_are_named() -> None:
    with Storing() as one, Storing(loads=False) as two, started(one, two) as router:
        until(lambda: all_up(router))
        body = {"lora_name": "tuned", "lora_path": "/a"}
        status, text = call(router, "POST", "/v1/load_lora_adapter", body)
        assert status == 400
        assert f"1 of 2 engines did not do it, the others did: {two.url}: status 400" in text


@pytest.mark.whole
def test_an_adapter_is_loaded_by_the_engines_of_the_model_that_is_named() -> None:
    with Storing("a") as one, Storing("b") as two, started(one, two) as router:
        until(lambda: all_up(router))
        body = {"lora_name": "tuned", "lora_path": "/a", "model": "b"}
        assert call(router, "POST", "/v1/load_lora_adapter", body)[0] == 200
        assert (one.names, two.names) == (["a"], ["b", "tuned"])
