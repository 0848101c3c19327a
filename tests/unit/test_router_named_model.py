"""Which model a request names, in JSON and in forms."""

from __future__ import annotations

import asyncio
import tracemalloc

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.router.chooser import Arrival
from flexcache.router.tokens.body import named_model


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


FORM = "multipart/form-data; boundary=a"


def part(disposition: str) -> Arrival:
    """Make a form of one field, ``m``."""
    header = f"Content-Disposition: {disposition}\r\nContent-Type: text/plain"
    return arrival(f"--a\r\n{header}\r\n\r\nm\r\n--a--\r\n".encode(), FORM)


@pytest.mark.parametrize(
    ("disposition", "model"),
    [
        ("form-data; name=model", "m"),
        ('form-data ;filename="a; name=b" ; NAME = "model"', "m"),
        ('form-data; name="model"; filename*=x; filename*0=b', None),
        (f'form-data; name="model"; filename*{"0" * 700}=x', "m"),
        ('form-data; name="file"; filename="a; name=model"', None),
        ("form-data; name*=model; name*0=model", None),
        ('form-data; name="model', None),
        ("form-data; name=", None),
        ("form-data", None),
        ("", None),
    ],
)
def test_headers_of_parts(disposition: str, model: str | None) -> None:
    assert named_model(part(disposition)) == model


@pytest.mark.parametrize(
    ("parameters", "model"),
    [
        ("boundary=a", "m"),
        ('charset="b; boundary=c"; Boundary="a"', "m"),
        ("boundary*=a; boundary*0=b", None),
        (f"boundary*{'0' * 5000}=a", None),
        ('boundary=""', None),
        ("boundary=\udcff", None),
        ("", None),
    ],
)
def test_content_types_of_forms(parameters: str, model: str | None) -> None:
    body = part("form-data; name=model").body
    assert named_model(arrival(body, f"Multipart/Form-Data; {parameters}")) == model


PIECES = ["form-data", "name", "filename", "boundary", "model", "a", "=", "*", "0", ";", '"', "\\",
          "'", " ", "%ff", "\r\n", ":", "0" * 5000]  # fmt: skip
HEADERS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


@given(HEADERS, HEADERS, st.binary())
def test_whatever_a_client_sends_raises_nothing(
    parameters: str, disposition: str, value: bytes
) -> None:
    content_type = "multipart/form-data;" + parameters
    raw = b"--a\r\nContent-Disposition:" + disposition.encode(errors="replace")
    for kind in (FORM, content_type, parameters):
        assert isinstance(named_model(arrival(raw + value + b"\r\n--a--", kind)), str | None)


LARGE = bytes(3 << 20)


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ([("model", "a"), ("file", LARGE)], "a"),
        ([("file", LARGE), ("model", "a")], "a"),
        ([("file", LARGE), ("language", "en"), ("second", LARGE[::2]), ("model", "a")], "a"),
        ([("file", LARGE), ("model", "a"), ("second", LARGE)], None),
        ([("file", LARGE)], None),
    ],
)
def test_a_large_form_is_searched_at_its_ends_and_not_copied(
    fields: list[tuple[str, str | bytes]], model: str | None
) -> None:
    large = form(*fields)
    tracemalloc.start()
    assert named_model(large) == model
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 100_000


@pytest.mark.parametrize("size", range((1 << 20) - 350, (1 << 20) + 50, 7))
def test_a_field_where_the_two_ends_of_a_form_meet_is_found(size: int) -> None:
    file = b'--a\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + LARGE[:size] + b"\r\n"
    for more in (b"", LARGE[:50_000]):
        raw = file + part("form-data; name=model").body[:-9] + b"\r\n--a\r\n\r\n" + more
        assert named_model(arrival(raw + b"\r\n--a--\r\n", FORM)) == "m"


@pytest.mark.parametrize("before", range((1 << 20) - 80, (1 << 20) + 80, 7))
def test_where_the_search_ends_no_other_fields_end_is_taken_for_the_model(before: int) -> None:
    fake = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake'
    tail = b"\r\n--a--\r\n"
    file = b'--a\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + LARGE + fake
    raw = file + b"\r\n--a\r\n\r\n" + bytes(before - len(fake) - len(tail)) + tail
    assert named_model(arrival(raw, FORM)) is None
