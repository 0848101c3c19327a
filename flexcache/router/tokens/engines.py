"""Engines as tokenizers: HTTP requests for the tokens that they make of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import hdrs
from msgspec import Meta

from flexcache.router.tokens.body import ChatBody, CompletionBody

MAX_ANSWER_BYTES = 1 << 20
"""Size of an engine's answer to the router itself."""


class BadAnswer(ValueError):
    """An engine answered what no engine in order does."""


class NotRendered(Exception):
    """The engine made no tokens of the request.

    Args:
        missing: It has no endpoint for it.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Rendered(msgspec.Struct):
    token_ids: list[_TokenId]
    features: Any = None


class _Tokenized(msgspec.Struct):
    tokens: list[_TokenId]


_rendered = msgspec.json.Decoder(_Rendered | list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MISSING = (403, 404, 405, 501)
"""403: vLLM 0.32 has ``/render`` only with ``--enable-scale-out``."""
_BYTES_PER_TOKEN_ID = 16
"""In JSON; a byte of a request makes one token at most, beside those of the chat template."""


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a session for the router's own requests to engines.

    Nothing is unpacked, since a kilobyte may become a gigabyte, and no cookie is kept.

    Args:
        headers: Sent with each request, the engines' key, say.
    """
    return aiohttp.ClientSession(
        headers={**headers, hdrs.ACCEPT_ENCODING: "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def read_answer(answer: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Read the body of an engine's answer.

    Raises:
        BadAnswer: It is too long, or compressed, which was not asked for.
    """
    encoding = answer.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding != "identity":
        raise BadAnswer(f"{answer.url.path} is compressed ({encoding[:20]!r}), unasked")
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise BadAnswer(f"{answer.url.path} is longer than {max_bytes} bytes")
    return b"".join(pieces)


class EngineApi:
    """HTTP client of the engines.

    Args:
        session: Of `open_session`.
        timeout_s: For one prompt, all in all.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._without_render: set[str] = set()

    def forget(self, url: str) -> None:
        """Note that an engine may be another one by now."""
        self._without_render.discard(url)

    async def tokens(
        self,
        url: str,
        path: str,
        raw: bytes,
        body: ChatBody | CompletionBody,
    ) -> np.ndarray:
        """Have an engine make a request's tokens, ``uint32``: by ``/render``, else ``/tokenize``.

        Args:
            path: Path of the request, ``/v1/chat/completions``, say.
            raw: Its body.
            body: The same, parsed.

        Raises:
            NotRendered: It did not.
        """
        if url not in self._without_render:
            try:
                return await self._render(url, path, raw)
            except NotRendered as error:
                if not error.missing:
                    raise
                self._without_render.add(url)
        content = msgspec.json.encode(body.for_tokenize())
        answer = await self._post(f"{url}/tokenize", content)
        try:
            return np.array(_tokenized.decode(answer).tokens, dtype=np.uint32)
        except _UNREADABLE as error:
            raise NotRendered(str(error)) from error

    async def _render(self, url: str, path: str, raw: bytes) -> np.ndarray:
        fields = _object.decode(raw)
        fields["mm_payload"] = msgspec.Raw(b'"none"')
        answer = await self._post(f"{url}{path}/render", msgspec.json.encode(fields))
        try:
            rendered = _rendered.decode(answer)
        except _UNREADABLE as error:
            raise NotRendered(str(error)) from error
        if isinstance(rendered, list):
            if len(rendered) != 1:
                raise NotRendered("several prompts")
            rendered = rendered[0]
        if rendered.features is not None:
            raise NotRendered("media")
        return np.array(rendered.token_ids, dtype=np.uint32)

    async def _post(self, url: str, content: bytes) -> bytes:
        try:
            async with self._session.post(
                url,
                data=content,
                headers={hdrs.CONTENT_TYPE: "application/json"},
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    missing = answer.status in _MISSING
                    raise NotRendered(f"status {answer.status}", missing=missing)
                most = MAX_ANSWER_BYTES + _BYTES_PER_TOKEN_ID * len(content)
                return await read_answer(answer, most)
        except (*_FAILURES, BadAnswer) as error:
            raise NotRendered(f"{type(error).__name__}: {error}") from error
