"""Live pages of a router and of a cache server, for a browser without any other network.

router.html, router.js    what `router.control` serves
cache.html, cache.js      what `server.http` serves
ui.css, ui.js             what both have
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Literal

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# Without a library, so that the policy allows nothing from elsewhere; sets texts, never markup.
PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def read_page(page: Literal["router", "cache"], name: str) -> tuple[bytes, dict[str, str]]:
    """Return a file of a live page, and the headers to serve it with; ``""`` is the page itself.

    The files show nothing of the process and need no token: a browser sends none to open a page. It
    fetches the figures with the token that its user enters.

    Raises:
        KeyError: The page has no such file.
    """
    name = name or f"{page}.html"
    if name not in (f"{page}.html", f"{page}.js", "ui.css", "ui.js"):
        raise KeyError(name)
    content_type = f"{_TYPES[name.partition('.')[2]]}; charset=utf-8"
    content = (files("flexcache.ui") / name).read_bytes()
    return content, {**PAGE_HEADERS, "Content-Type": content_type}
