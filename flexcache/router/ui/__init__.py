"""The live page of a router, `/ui/` of its control port: files of the package, no build step.

The files themselves show nothing of the router and need no token; the page fetches ``/stats`` and
``/decisions`` with the token that its user enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "ui.css": "text/css; charset=utf-8",
    "ui.js": "text/javascript; charset=utf-8",
}

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""To be sent with each file."""


def read(name: str) -> tuple[bytes, str]:
    """Return a file's content and its content type. ``""`` is the page.

    Raises:
        KeyError: There is no such file.
    """
    name = name or "index.html"
    content_type = _TYPES[name]
    return (files(__package__) / name).read_bytes(), content_type
