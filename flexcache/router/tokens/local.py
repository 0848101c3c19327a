"""Tokens made by the router itself, within limits."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import numpy as np
import xxhash

from flexcache.errors import InternalError
from flexcache.router.tokens.body import (
    CHARS_PER_TOKEN,
    ChatBody,
    CompletionBody,
    PromptTokens,
    UnknownPrompt,
    read_prompt,
)
from flexcache.router.tokens.text_tokenizer import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Beyond these, requests go by load.

    Attributes:
        max_body: Bytes of a body that is looked into.
        max_braces: Braces and brackets in a body; each may be an object that the parser makes.
        max_commas: Commas in a body, which separate the other values, unless it has token ids.
        max_messages: Messages of a chat.
        max_text: Characters of a prompt.
        memo_bytes: Memory of remembered tokens.
        threads: Threads for long texts, by default half the processors and at most 4; as many more
            for short ones, which need not wait for them.
        waiting_chars: Characters that may wait for or be in threads.
        encode_deadline_s: Time to encode a prompt; then its known beginning has to do.
        render_deadline_s: Time for an engine to render a prompt; then, too.
        render_timeout_s: Time after which the engine's answer is given up.
        rendering: Requests that may be at engines at a time.
        check_every_s: Time between comparisons with the engine, for each kind of prompt.
    """

    max_body: int = 16 << 20
    max_braces: int = 50_000
    max_commas: int = 300_000
    max_messages: int = 4096
    max_text: int = 8 << 20
    memo_bytes: int = 256 << 20
    threads: int = max(1, min(4, (os.cpu_count() or 1) // 2))
    waiting_chars: int = 32 << 20
    encode_deadline_s: float = 2.0
    render_deadline_s: float = 0.05
    render_timeout_s: float = 30.0
    rendering: int = 16
    check_every_s: float = 60.0


_ENTRY_BYTES = 300
"""What an entry takes beside its ids: key, array, place in the table."""


class TokenMemo:
    """Token ids by text, least recently used first out, bounded by bytes.

    Texts are known by a 128-bit hash, so the text itself is not kept.

    Args:
        max_bytes: Bound on the memory of all entries.
        seed: Seed of the hash. A client that does not know it cannot make texts that collide.
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self._max_bytes = max_bytes
        self._seed = seed
        self._entries: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all entries."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, text: str, space: int) -> bytes:
        """Compute the key of a text; texts of different spaces are different.

        Raises:
            UnicodeEncodeError: The text has half a surrogate pair.
        """
        return xxhash.xxh3_128_digest(text.encode(), self._seed ^ space)

    def get(self, key: bytes) -> np.ndarray | None:
        """Return the ids of a text, and note that they were used."""
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def find(self, keys: Iterable[bytes]) -> dict[bytes, np.ndarray]:
        """Return those of some texts that are remembered."""
        return {key: ids for key in keys if (ids := self.get(key)) is not None}

    def put(self, key: bytes, ids: np.ndarray) -> None:
        """Remember the ids of a text."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._bytes -= _size(old)
        self._entries[key] = ids
        self._bytes += _size(ids)
        while self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= _size(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._bytes = 0

    def check(self) -> None:
        """Check the accounts.

        Raises:
            InternalError: They are wrong.
        """
        held = sum(map(_size, self._entries.values()))
        if held != self._bytes or held > self._max_bytes:
            raise InternalError(f"segment memo counts {self._bytes} bytes, holds {held}")


def _size(ids: np.ndarray) -> int:
    return ids.nbytes + _ENTRY_BYTES


_T = TypeVar("_T")

# What takes less than a millisecond or two is done in the loop.
_LOOP_CHARS = 400  # to be encoded
_LOOP_MESSAGES = 128  # to be rendered
_LOOP_TEXT = 1 << 20  # to be rendered or split
_SHORT_CHARS = 32_768  # 30 ms: not to wait behind texts of a second


class LocalTokens:
    """Renders, splits, looks up, encodes.

    Args:
        seed: Seed of the memo's hash.
    """

    def __init__(self, limits: TokenLimits, seed: int) -> None:
        self._limits = limits
        self._memo = TokenMemo(limits.memo_bytes, seed)
        # Two pools, so that short texts need not wait behind texts that take a second.
        self._short = ThreadPoolExecutor(limits.threads, "flexcache-short-texts")
        self._long = ThreadPoolExecutor(limits.threads, "flexcache-long-texts")
        self._waiting_chars = 0
        self._encoding: dict[bytes, asyncio.Task[dict[bytes, np.ndarray]]] = {}

    @property
    def memo_bytes(self) -> int:
        """Memory of the memo."""
        return self._memo.num_bytes

    async def tokens(
        self, files: ModelFiles, body: ChatBody | CompletionBody, num_bytes: int
    ) -> PromptTokens:
        """Make the tokens of a request.

        Args:
            num_bytes: Length of the raw body.

        Raises:
            UnknownPrompt: They cannot be made.
        """
        if isinstance(body, ChatBody):
            return await self._chat(files, body, num_bytes)
        prompt = read_prompt(body.prompt)
        if isinstance(prompt, np.ndarray):
            return PromptTokens(prompt, len(prompt), 0)
        return await self._text(files, prompt, body.add_special_tokens)

    async def _chat(self, files: ModelFiles, body: ChatBody, num_bytes: int) -> PromptTokens:
        template = files.chat_with_tools if body.tools else files.chat
        if template is None:
            raise UnknownPrompt("no chat template")
        if len(body.messages) > self._limits.max_messages:
            raise UnknownPrompt("too long")
        is_quick = len(body.messages) <= _LOOP_MESSAGES and num_bytes <= _LOOP_TEXT
        text, whole = await self._call(is_quick, lambda: template.render(body))
        if whole:
            return await self._text(files, text, body.add_special_tokens)
        known = files.text.up_to_last_border(text)
        if not known:
            raise UnknownPrompt("media")
        prompt = await self._text(files, known, body.add_special_tokens, ends=False)
        return PromptTokens(prompt.ids, max(body.estimate(0), prompt.num_tokens), prompt.remembered)

    async def _call(self, is_quick: bool, work: Callable[[], _T]) -> _T:
        if is_quick:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    async def _text(
        self, files: ModelFiles, text: str, special_tokens: bool, *, ends: bool = True
    ) -> PromptTokens:
        """Make the tokens of a text.

        Args:
            ends: The prompt ends with it.
        """
        if len(text) > self._limits.max_text:
            raise UnknownPrompt("too long")
        segments = await self._call(len(text) <= _LOOP_TEXT, lambda: files.text.split(text))
        space = files.number
        keys = [self._memo.key(segment, space) for segment in segments]
        found = self._memo.find(keys)
        remembered = sum(len(found[key]) for key in keys if key in found)
        missing = {key: text for key, text in zip(keys, segments, strict=True) if key not in found}
        found |= await self._encode(files, missing)
        parts = [found[key] for key in takewhile(found.__contains__, keys)]
        is_whole = len(parts) == len(keys)
        wrapped = files.text.wrap(parts, special_tokens, ends=ends and is_whole)
        if wrapped is None:
            raise UnknownPrompt("special tokens")
        unknown = sum(map(len, segments[len(parts) :])) // CHARS_PER_TOKEN
        if not parts and unknown:
            raise UnknownPrompt("too slow")
        return PromptTokens(wrapped, len(wrapped) + unknown, min(remembered, len(wrapped)))

    async def _encode(
        self, files: ModelFiles, missing: dict[bytes, str]
    ) -> dict[bytes, np.ndarray]:
        """Encode segments, none perhaps, and wait for those that are being encoded already.

        Returns:
            Those that were done in time.
        """
        new = {key: text for key, text in missing.items() if key not in self._encoding}
        chars = sum(map(len, new.values()))
        if chars <= _LOOP_CHARS and len(new) == len(missing):
            return self._remember(list(new), files.text.encode(list(new.values())))
        if self._waiting_chars + chars > self._limits.waiting_chars:
            raise UnknownPrompt("busy")
        for share in self._shares(new, chars):
            self._waiting_chars += sum(map(len, share.values()))
            task = asyncio.create_task(self._encode_in_thread(files, share))
            self._encoding |= dict.fromkeys(share, task)
        tasks = {self._encoding[key] for key in missing}
        done, _ = await asyncio.wait(tasks, timeout=self._limits.encode_deadline_s)
        found: dict[bytes, np.ndarray] = {}
        for task in done:
            if task.exception() is not None:
                raise UnknownPrompt("tokenizer") from task.exception()
            found |= task.result()
        return found

    def _shares(self, new: dict[bytes, str], chars: int) -> list[dict[bytes, str]]:
        """Share a long text out among the threads."""
        if chars <= _SHORT_CHARS:
            return [new] if new else []
        shares: list[dict[bytes, str]] = [{} for _ in range(self._limits.threads)]
        begun = 0
        for key, text in new.items():
            shares[begun * len(shares) // chars][key] = text
            begun += len(text)
        return [share for share in shares if share]

    async def _encode_in_thread(
        self, files: ModelFiles, new: dict[bytes, str]
    ) -> dict[bytes, np.ndarray]:
        chars = sum(map(len, new.values()))
        threads = self._short if chars <= _SHORT_CHARS else self._long
        try:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(threads, files.text.encode, list(new.values()))
            return self._remember(list(new), made)
        finally:
            self._waiting_chars -= chars
            for key in new:
                del self._encoding[key]

    def _remember(
        self, keys: Sequence[bytes], made: Sequence[np.ndarray]
    ) -> dict[bytes, np.ndarray]:
        for key, ids in zip(keys, made, strict=True):
            self._memo.put(key, ids)
        return dict(zip(keys, made, strict=True))

    async def close(self) -> None:
        """Stop the threads; what they are at is not waited for."""
        tasks = set(self._encoding.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Check the memo.

        Raises:
            InternalError: It is wrong.
        """
        self._memo.check()
