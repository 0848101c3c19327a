"""Tokens made by engines, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from flexcache.router.tokens.body import ChatBody, CompletionBody, Prompt, UnknownPrompt
from flexcache.router.tokens.engines import Engines, NotRendered
from flexcache.router.tokens.local import TokenLimits, TokenMemo
from flexcache.router.tokens.models import ServedModel
from flexcache.router.tokens.template import has_media

_LOOK_BACK = 64
"""Messages by which a chat may have grown since it was rendered."""


class RenderedMemo:
    """Tokens of whole chats, found again by a chat that begins with the same messages.

    Args:
        memo: Where they are kept.
    """

    def __init__(self, memo: TokenMemo) -> None:
        self._memo = memo

    def keys(self, body: ChatBody | CompletionBody, model: str) -> list[bytes]:
        """Compute a key for each number of messages, beginning with one.

        All else that shapes the prompt is in each key. A completion's prompt is one message.
        """
        if isinstance(body, CompletionBody):
            return [_digest(b"", (model, bytes(body.prompt), body.add_special_tokens))]
        settings = (
            model,
            body.tools,
            body.documents,
            body.reasoning_effort,
            body.chat_template,
            body.chat_template_kwargs,
            body.add_generation_prompt,
            body.continue_final_message,
            body.add_special_tokens,
        )
        key = _digest(b"", settings)
        return [key := _digest(key, message) for message in body.messages]

    def longest(self, keys: Sequence[bytes]) -> tuple[np.ndarray, int] | None:
        """Find the longest beginning of a chat that is known.

        Returns:
            Its tokens and its number of messages. They end with the beginning of the answer, as
            the chat goes on in most templates.
        """
        for count in range(len(keys), max(0, len(keys) - _LOOK_BACK), -1):
            ids = self._memo.get(keys[count - 1])
            if ids is not None:
                return ids, count
        return None

    def put(self, keys: Sequence[bytes], ids: np.ndarray) -> None:
        """Remember the tokens of a whole chat."""
        self._memo.put(keys[-1], ids)


def _digest(before: bytes, what: object) -> bytes:
    return xxhash.xxh3_128_digest(before + msgspec.msgpack.encode(what))


class AskedTokens:
    """Asks engines, and remembers what they said.

    Args:
        seed: Seed of the memo's hash.
    """

    def __init__(self, engines: Engines, limits: TokenLimits, seed: int) -> None:
        self._engines = engines
        self._limits = limits
        self._memo = TokenMemo(limits.memo_bytes, seed)
        self._rendered = RenderedMemo(self._memo)
        self._asking: dict[bytes, asyncio.Task[np.ndarray]] = {}

    @property
    def memo_bytes(self) -> int:
        """Memory of the memo."""
        return self._memo.num_bytes

    async def tokens(
        self, model: ServedModel, path: str, raw: bytes, body: ChatBody | CompletionBody
    ) -> Prompt:
        """Have the tokens of a request made.

        Args:
            path: Path of the request.
            raw: Its body.
            body: The same, parsed.

        Raises:
            UnknownPrompt: The engine did not make them in time, and no earlier turn of the chat
                is known.
        """
        keys = self._rendered.keys(body, model.name)
        known = self._rendered.longest(keys)
        if known is not None and known[1] == len(keys):
            ids = known[0]
            return Prompt(ids, len(ids), len(ids))
        why = "media"  # an engine would fetch and process them, for the sake of a text
        if not isinstance(body, ChatBody) or not has_media(body.messages):
            asking = self._ask(model, path, raw, body, keys)
            why = "engine too slow" if asking is not None else "busy"
            if asking is not None and await self._done(asking):
                try:
                    ids = asking.result()
                except NotRendered as error:
                    raise UnknownPrompt("not rendered") from error
                return Prompt(ids, len(ids), 0)
        if known is None or not isinstance(body, ChatBody):
            raise UnknownPrompt(why)
        ids, count = known
        return Prompt(ids, len(ids) + body.estimate_messages(count), len(ids))

    async def _done(self, asking: asyncio.Task[np.ndarray]) -> bool:
        await asyncio.wait({asking}, timeout=self._limits.render_deadline_s)
        return asking.done()

    def _ask(
        self,
        model: ServedModel,
        path: str,
        raw: bytes,
        body: ChatBody | CompletionBody,
        keys: list[bytes],
    ) -> asyncio.Task[np.ndarray] | None:
        asking = self._asking.get(keys[-1])
        if asking is None and len(self._asking) < self._limits.rendering:
            asking = asyncio.create_task(self._render(model, path, raw, body, keys))
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._asking[keys[-1]] = asking
        return asking

    async def _render(
        self,
        model: ServedModel,
        path: str,
        raw: bytes,
        body: ChatBody | CompletionBody,
        keys: list[bytes],
    ) -> np.ndarray:
        try:
            ids = await self.render(model, path, raw, body)
            self._rendered.put(keys, ids)
            return ids
        finally:
            del self._asking[keys[-1]]

    async def render(
        self,
        model: ServedModel,
        path: str,
        raw: bytes,
        body: ChatBody | CompletionBody,
        url: str | None = None,
    ) -> np.ndarray:
        """Have an engine of the model make a request's tokens, however long it takes.

        Args:
            url: The engine; None: any.

        Raises:
            NotRendered: It did not.
        """
        url, headers = model.engine(url)
        try:
            ids = await self._engines.tokens(url, headers, path, raw, body)
        except NotRendered as error:
            if error.missing:
                model.ways.engine_renders(False)
            raise
        model.ways.engine_renders(True)
        return ids

    def forget(self) -> None:
        """Forget what engines said; another may say otherwise."""
        self._memo.clear()

    async def close(self) -> None:
        """Give up what is being asked."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        """Check the memo.

        Raises:
            InternalError: It is wrong.
        """
        self._memo.check()
