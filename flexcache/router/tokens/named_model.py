"""Reads which model a request names, whatever else it has.

Most bodies are JSON. Requests with a file, to be transcribed say, are forms (RFC 7578).
"""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from itertools import islice

import msgspec

from flexcache.router.chooser import Arrival

_MOST_PARTS = 64
_LONGEST = 1024  # bytes of a field with its header
_SEARCHED = 1 << 20  # bytes at either end of a form: half a millisecond each


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def named_model(arrival: Arrival) -> str | None:
    """Return the model that a request names; None: it cannot be told. Never raises."""
    try:
        content = Message()
        # `email` takes seconds for hundreds of kB of a malformed header.
        content["Content-Type"] = arrival.headers.get("content-type", "")[:_LONGEST]
        if content.get_content_type() == "multipart/form-data":
            return _in_form(arrival.body, content.get_boundary(""))
        return _named.decode(arrival.body).model
    except (ValueError, TypeError, RecursionError):  # `email` raises many for malformed headers
        return None


def _in_form(raw: bytes, boundary: str) -> str | None:
    """Return the form's field of that name. Raises whatever `email` does."""
    if not boundary:
        return None
    for part in islice(_parts(raw, b"\r\n--" + boundary.encode()), _MOST_PARTS):
        header, _, value = part.partition(b"\r\n\r\n")
        fields = BytesHeaderParser().parsebytes(header.lstrip())
        if fields.get_param("name", header="content-disposition") == "model":
            return value.decode()
    return None


def _parts(raw: bytes, delimiter: bytes) -> Iterator[bytes]:
    """Yield the parts at either end of a form; empty in place of one too long to be the field.

    Clients put fields before or after the file. To search all of it would hold the event loop up,
    28 ms for 60 MB, and from a thread too: a search keeps the interpreter's lock.
    """
    size, most = len(raw), _SEARCHED
    for begin, stop in [(0, most), (size - most, size)] if size > 2 * most else [(0, size)]:
        if is_part := not begin and raw.startswith(delimiter[2:]):  # with no line before it
            begin = len(delimiter) - 2
        while (end := raw.find(delimiter, begin, stop)) >= 0:
            yield raw[begin:end] if is_part and end - begin <= _LONGEST else b""
            begin = end + len(delimiter)
            is_part = True
