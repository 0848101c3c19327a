"""Reads which model a request names, whatever else it has.

Most bodies are JSON. Requests with a file, to be transcribed say, are forms (RFC 7578).
"""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser

import msgspec

from flexcache.router.chooser import Arrival

_MOST_PARTS = 64
_LONGEST = 4096  # bytes of a part's header, and of a name


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def named_model(arrival: Arrival) -> str | None:
    """Return the model that a request names; None: it cannot be told."""
    content = Message()
    content["Content-Type"] = arrival.headers.get("content-type", "")
    try:
        if content.get_content_type() == "multipart/form-data":
            return _in_form(arrival.body, content.get_boundary(""))
        return _named.decode(arrival.body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _in_form(raw: bytes, boundary: str) -> str | None:
    """Return the form's field of that name. Raises `UnicodeError`."""
    if not boundary:
        return None
    # The first boundary needs no line before it.
    _, *parts = (b"\r\n" + raw).split(b"\r\n--" + boundary.encode(), _MOST_PARTS)
    for part in parts:
        header, _, value = part.partition(b"\r\n\r\n")
        if max(len(header), len(value)) > _LONGEST:
            continue
        fields = BytesHeaderParser().parsebytes(header.lstrip())
        if fields.get_param("name", header="content-disposition") == "model":
            return value.decode()
    return None
