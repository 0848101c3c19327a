"""Ids of stored things are found in answers, however these are cut, and in requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.router.chooser import Arrival, NotRouted
from flexcache.router.stored import StoredIds, id_reader, named_id

STREAM, JSON = "text/event-stream", "application/json; charset=utf-8"
CREATED = {"type": "response.created", "response": {"id": "resp_1", "output": [{"id": "msg_1"}]}}


def event(content: Any, newline: str = "\n") -> bytes:
    lines = ("event: response.created", f"data: {json.dumps(content)}", "", "")
    return newline.join(lines).encode()


@pytest.mark.parametrize(
    ("content_type", "answer", "ids"),
    [
        (STREAM, event(CREATED) + b"data: [DONE]\n\n", ["resp_1"]),
        (STREAM, event(CREATED, "\r\n") * 2, ["resp_1"]),
        (STREAM, b": " + b" " * 100_000 + event(CREATED), []),
        (STREAM, b"data: [DONE]\n\n", []),
        (JSON, b'{"output": [{"id": "msg_1"}], "id": "resp_1"}', ["resp_1"]),
        (JSON, b'{"id": "batch_1", "output_file_id": "file_2"}', ["batch_1", "file_2"]),
        (JSON, b'{"id": 1}', []),
        (JSON, b'{"id": "' + b"x" * 1000 + b'"}', []),
        (JSON, b"[" * 100_000, []),
        ("application/octet-stream", b'{"id": "resp_1"}', []),
    ],
)
@given(data=st.data())
def test_ids_are_found_however_an_answer_is_cut(
    content_type: str, answer: bytes, ids: list[str], data: st.DataObject
) -> None:
    found: list[str] = []
    size = data.draw(st.sampled_from([None, len(answer)]))
    reader = id_reader(found.extend, "/v1/responses?x=1", content_type, size)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    if reader is not None:
        for start, stop in zip([0, *cuts], [*cuts, len(answer)], strict=True):
            reader.feed(answer[start:stop])
        if size is not None:
            assert found == ids, "before the client has all of it"
        reader.end()
    assert found == ids


def test_other_paths_are_not_read() -> None:
    assert id_reader(print, "/v1/chat/completions", JSON, None) is None


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/responses", {"previous_response_id": None}, None),
        ("/v1/responses", {"input": "previous_response_id"}, None),
        ("/v1/responses/resp%5F1?stream=true", None, "resp_1"),
        ("/v1/responses/resp_1/cancel", {}, "resp_1"),
        ("/v1/batches", {"input_file_id": "file_1"}, "file_1"),
        ("/v1/files/file_1/content", None, "file_1"),
        ("/v1/files", None, None),
        ("/v1/models/m", None, None),
        ("/v2/responses/resp_1", None, None),
        ("*", None, None),
    ],
)
def test_the_id_that_a_request_names(path: str, body: Any, name: str | None) -> None:
    raw = b"" if body is None else json.dumps(body).encode()
    assert named_id(Arrival(request_id="r", method="POST", path=path, body=raw)) == name


def test_of_several_engines_an_unknown_id_is_refused() -> None:
    stored = StoredIds()
    stored.note("http://a", ["resp_1"])
    known, unknown = (
        Arrival(request_id="r", method="GET", path=f"/v1/responses/resp_{n}") for n in (1, 2)
    )
    assert stored.url(known, ["http://a", "http://b"]) == "http://a"
    assert stored.url(unknown, ["http://b"]) is None, "it is there, or nowhere"
    with pytest.raises(NotRouted, match=r"resp_2.*does not know which") as refused:
        stored.url(unknown, ["http://a", "http://b"])
    assert refused.value.status == 404


def test_an_id_that_another_proxy_tells_a_little_later_is_found() -> None:
    urls = ["http://a", "http://b"]
    asked = Arrival(request_id="r", method="GET", path="/v1/responses/resp_1")

    async def test() -> str | None:
        stored = StoredIds()
        asyncio.get_running_loop().call_soon(stored.note, "http://b", ["resp_1"])
        return await stored.find(asked, urls)

    assert asyncio.run(test()) == "http://b"


def test_the_oldest_ids_are_forgotten() -> None:
    stored = StoredIds()
    stored.note("http://a", (str(number) for number in range(100_001)))
    assert len(stored.items()) == 100_000
    assert "0" not in stored.items()
