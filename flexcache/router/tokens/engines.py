"""Asks engines by HTTP: which models they serve, and which tokens they make of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np


class ModelCard(msgspec.Struct):
    """A model that an engine serves.

    Attributes:
        id: Served name.
        root: Directory or name of its files; of an adapter, the adapter's.
        parent: The model that an adapter belongs to; None: no adapter.
    """

    id: str
    root: str | None = None
    parent: str | None = None


class NotRendered(Exception):
    """The engine made no tokens of the request.

    Args:
        missing: It has no such endpoint.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: Any = None


_models = msgspec.json.Decoder(_Models)
_rendered = msgspec.json.Decoder(_Rendered | list[_Rendered])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FAILURES = (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError)


class Engines:
    """HTTP client of the engines.

    Args:
        timeout_s: For one request, all in all.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def models(self, url: str, headers: Mapping[str, str]) -> list[ModelCard] | None:
        """Fetch the models that an engine serves; None: it did not answer."""
        try:
            async with self._session.get(
                f"{url}/v1/models", headers=headers, timeout=self._timeout
            ) as answer:
                if answer.status != 200:
                    return None
                return _models.decode(await answer.read()).data
        except _FAILURES:
            return None

    async def render(
        self, url: str, headers: Mapping[str, str], path: str, body: bytes
    ) -> np.ndarray:
        """Have an engine make a request's tokens, ``uint32``.

        Args:
            path: Path of the request, ``/v1/chat/completions``, say.

        Raises:
            NotRendered: It did not.
        """
        try:
            fields = _object.decode(body)
            fields["mm_payload"] = msgspec.Raw(b'"none"')
            async with self._session.post(
                f"{url}{path}/render",
                data=msgspec.json.encode(fields),
                headers={**headers, "content-type": "application/json"},
                timeout=self._timeout,
            ) as answer:
                if answer.status != 200:
                    missing = answer.status in (404, 405, 501)
                    raise NotRendered(f"status {answer.status}", missing=missing)
                rendered = _rendered.decode(await answer.read())
        except _FAILURES as error:
            raise NotRendered(f"{type(error).__name__}: {error}") from error
        if isinstance(rendered, list):
            if len(rendered) != 1:
                raise NotRendered("several prompts")
            rendered = rendered[0]
        if rendered.features is not None:
            raise NotRendered("media")
        return np.array(rendered.token_ids, dtype=np.uint32)
