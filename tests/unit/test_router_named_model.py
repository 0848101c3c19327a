"""Which model a request names, in JSON and in forms."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from flexcache.router.chooser import Arrival
from flexcache.router.tokens.named_model import named_model


def arrival(body: bytes, content_type: str = "application/json") -> Arrival:
    headers = {"content-type": content_type}
    return Arrival(
        request_id="1", method="POST", path="/v1/audio/transcriptions", headers=headers, body=body
    )


def form(*fields: tuple[str, str | bytes]) -> Arrival:
    """Make a form as a client does."""

    async def made() -> tuple[bytes, str]:
        data = aiohttp.FormData(quote_fields=False)
        for name, value in fields:
            file = {"filename": "speech.wav"} if isinstance(value, bytes) else {}
            data.add_field(name, value, **file, content_type="text/plain")  # so it is a form
        writer = data()
        return await writer.as_bytes(), writer.headers["Content-Type"]

    return arrival(*asyncio.run(made()))


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "a", "input": [1, {}]}', "a"),
        (b'{"input": 1}', None),
        (b'{"model": 1}', None),
        (b'["model"]', None),
        (b'{"model": "a', None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_json(body: bytes, model: str | None) -> None:
    assert named_model(arrival(body)) == model
    assert named_model(arrival(body, "")) == model
    assert named_model(arrival(body, "text/plain; charset")) == model


SPEECH = bytes(range(256)) * 4096 + b"\r\n\r\n--model\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        [("model", "a"), ("file", SPEECH)],
        [("file", SPEECH), ("model", "a"), ("language", "en")],
        [("file", b'name="model"\r\n\r\nb\r\n'), ("models", "b"), ("model", "a")],
        [("model", "größer/Modell")],
    ],
)
def test_a_form_names_it_before_or_after_its_file(fields: list[tuple[str, str | bytes]]) -> None:
    assert named_model(form(*fields)) == dict(fields)["model"]


def test_a_form_that_names_none_or_is_malformed() -> None:
    whole = form(("file", SPEECH), ("model", "a"))
    assert named_model(form(("file", SPEECH), ("language", "en"))) is None
    assert named_model(form(("model", "a" * 5000))) is None
    assert named_model(form(*[("n", "1")] * 100, ("model", "a"))) is None, "too many parts"
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=b", "text/plain"):
        assert named_model(arrival(whole.body, content_type)) is None
    for body in (b"", b"--", whole.body[:40], whole.body[40:], b"\r\n" * 1000):
        assert named_model(arrival(body, whole.headers["content-type"])) in (None, "a")
