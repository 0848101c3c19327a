"""Tokenizers of a router: find the tokens of requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from flexcache.counters import Histogram
from flexcache.logs import log_event
from flexcache.router.chooser import Arrival, RouteRequest
from flexcache.router.stats import TokenizerStats
from flexcache.router.tokens.asked import AskedTokens
from flexcache.router.tokens.body import (
    CHAT_PATH,
    COMPLETION_PATH,
    Body,
    ChatBody,
    CompletionBody,
    Kind,
    Prompt,
    UnknownPrompt,
    count_structure,
    named_model,
    read_body,
    read_prompt,
)
from flexcache.router.tokens.engines import Engines, NotRendered, open_session
from flexcache.router.tokens.local import LocalTokens, TokenLimits
from flexcache.router.tokens.models import ModelRegistry, ServedModel, Way
from flexcache.router.waiting import Turns, is_set_within

_TEXT = (
    "  Ünïcode, 数字 1234567 and\ttabs;\n\n  def f(x):\n      return x ** 2  # 'quoted' \"text\"\n"
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "Oslo"]}},
            "required": ["city"],
        },
    },
}
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": f"An answer. {_TEXT}"},
    {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]},
]
_CHATS = [
    [{"role": "system", "content": f"You are a system.{_TEXT}"}, *_TURNS],
    _TURNS,
    _TURNS[:1],
]


def probes(kind: Kind, model: str) -> tuple[str, list[bytes]]:
    """Make requests of a kind.

    Returns:
        Their path, and bodies, the most telling first. Not every template takes each of them.
    """
    if kind is Kind.COMPLETION:
        return COMPLETION_PATH, [_body(model, prompt=_TEXT)]
    if kind is Kind.CHAT:
        return CHAT_PATH, [_body(model, messages=chat) for chat in _CHATS]
    with_tools = {"tools": [_TOOL], "tool_choice": "none"}
    return CHAT_PATH, [_body(model, messages=chat, **with_tools) for chat in _CHATS]


def _body(model: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": model, "max_tokens": 1, **fields})


logger = logging.getLogger(__name__)

_MAX_BODY = 1 << 20  # of a request that is compared: an engine takes a second for it


class Comparison:
    """Runs comparisons beside the requests, one for each kind and period."""

    def __init__(self, local: LocalTokens, asked: AskedTokens, limits: TokenLimits) -> None:
        self._local = local
        self._asked = asked
        self._every_s = limits.check_every_s
        self._next: dict[tuple[str, Kind], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._samples = Turns("comparisons")

    def sample(
        self, model: ServedModel, path: str, raw: bytes, body: ChatBody | CompletionBody, now: float
    ) -> None:
        """Compare a request in the background if it is time to.

        Args:
            now: Seconds, of any clock.
        """
        key = (model.name, body.kind)
        due = self._next.setdefault(key, now + self._every_s)
        if now < due or len(raw) > _MAX_BODY or not model.engines:
            return
        self._next[key] = now + self._every_s
        task = asyncio.create_task(self._compare_sample(model, path, raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare_sample(self, model: ServedModel, path: str, raw: bytes) -> None:
        with self._samples.turn():
            await self._compare(model, path, raw, None)

    async def probe(self, model: ServedModel, url: str) -> None:
        """Compare probes of every kind that is made here with one engine's tokens."""
        for kind in Kind:
            if not model.ways.has_local(kind):
                continue
            path, bodies = probes(kind, model.name)
            for raw in bodies:
                if await self._compare(model, path, raw, url):
                    break

    async def _compare(self, model: ServedModel, path: str, raw: bytes, url: str | None) -> bool:
        """Compare one request.

        Returns:
            Whether it could be compared.
        """
        if model.files is None:
            return False
        try:
            body = read_body(path, raw)
            if not isinstance(body, (ChatBody, CompletionBody)):
                return False
            made = await self._local.tokens(model.files, body, len(raw))
            if made.num_tokens > len(made.ids):
                return False  # not all is known: media
            theirs = await self._asked.render(model, path, raw, body, url)
        except (UnknownPrompt, NotRendered):
            return False
        ours = made.ids
        equal = len(ours) == len(theirs) and bool((ours == theirs).all())
        before = model.ways.way(body.kind)
        model.ways.compared(body.kind, equal)
        if model.ways.way(body.kind) is not before:
            log_event(
                logger,
                logging.WARNING if not equal else logging.INFO,
                "router_tokens_differ" if not equal else "router_tokens_agree_again",
                model=model.name,
                prompts=body.kind.value,
                from_token=None if equal else _first_difference(ours, theirs),
                now=model.ways.way(body.kind).value,
            )
        return True

    async def close(self) -> None:
        """Give up what is being compared."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _first_difference(ours: np.ndarray, theirs: np.ndarray) -> int:
    shared = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shared] != theirs[:shared])
    return int(differing[0]) if len(differing) else shared


_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Tokenizers:
    """Reads requests. Make and use it on one running event loop.

    Args:
        tokenizer: Directory of the models' tokenizer, or a model's name in the Hugging Face
            cache; None: as the engines report. Without a tokenizer the engines are asked.
        seed: Secret of the memos' hashes; None: random.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        seed: int | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        if seed is None:
            seed = secrets.randbits(63)
        self._limits = limits or TokenLimits()
        self._session = open_session({})
        engines = Engines(self._session, self._limits.render_timeout_s)
        self._local = LocalTokens(self._limits, seed)
        self._asked = AskedTokens(engines, self._limits, seed)
        self._registry = ModelRegistry(engines, tokenizer)
        self._comparison = Comparison(self._local, self._asked, self._limits)
        self._look = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._looks = Turns("tokenizers")
        self._requests = Counter({"ids": 0, "local": 0, "render": 0, "unknown": 0})
        self._unknown: Counter[str] = Counter()
        self._tokens = 0
        self._remembered = 0
        self._seconds = Histogram(_SECONDS)

    async def start(self) -> None:
        """Ask the engines for their models, compare tokenizers, and go on doing so beside."""
        with self._looks.turn():
            await self.look()
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Stop all that runs."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._comparison.close()
        await self._asked.close()
        await self._local.close()
        await self._session.close()

    def set_engines(self, engines: Mapping[str, Mapping[str, str]]) -> None:
        """Set the engines, by base URL, with the headers that they require, a key, say."""
        self._registry.set_engines(engines)
        self.look_soon()

    def look_soon(self) -> None:
        """Have the engines' models looked at again."""
        self._look.set()

    async def look(self) -> None:
        """Look at the engines' models now, and compare with engines that are new."""
        self._look.clear()
        new = await self._registry.refresh()
        if new:
            self._asked.forget()
        await asyncio.gather(*(self._comparison.probe(model, url) for model, url in new))

    async def _keep_looking(self) -> None:
        while True:
            await is_set_within(self._look, self._limits.refresh_every_s)
            with self._looks.turn():
                await self.look()

    async def read(self, arrival: Arrival) -> RouteRequest:
        """Read a request. Never raises: what cannot be read goes by load."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        body, model, adapter, prompt, way = Body(), None, None, None, "unknown"
        try:
            path = arrival.path.partition("?")[0]
            body = self._parse(path, arrival.body)
            model, adapter = self._registry.find(body.model)
            prompt, way = await self._prompt(model, path, arrival.body, body)
        except (UnknownPrompt, msgspec.DecodeError, UnicodeError) as error:
            self._unknown[str(error) if isinstance(error, UnknownPrompt) else "malformed"] += 1
        except Exception:  # no body may stop the router
            log_event(logger, logging.ERROR, "router_request_not_read", exc_info=True)
            self._unknown["error"] += 1
        self._requests[way] += 1
        if prompt is not None:
            self._tokens += len(prompt.ids)
            self._remembered += prompt.remembered
        self._seconds.observe(loop.time() - started)
        return RouteRequest(
            request_id=arrival.request_id,
            num_tokens=body.estimate(len(arrival.body)) if prompt is None else prompt.num_tokens,
            token_ids=None if prompt is None else prompt.ids,
            model=body.model or named_model(arrival),
            adapter=adapter,
            cache_salt=body.cache_salt,
            session_id=arrival.headers.get("x-session-id") or body.session_id,
        )

    def _parse(self, path: str, raw: bytes) -> Body:
        if not raw:
            raise UnknownPrompt("no body")
        limits = self._limits
        if len(raw) > limits.max_body:
            raise UnknownPrompt("too long")
        braces, commas = count_structure(raw)
        if braces > limits.max_braces or (path == CHAT_PATH and commas > limits.max_commas):
            raise UnknownPrompt("too long")
        return read_body(path, raw)

    async def _prompt(
        self, model: ServedModel | None, path: str, raw: bytes, body: Body
    ) -> tuple[Prompt, str]:
        """Find a prompt's tokens.

        Returns:
            The prompt, and how it was found.

        Raises:
            UnknownPrompt: It was not.
        """
        if not isinstance(body, (ChatBody, CompletionBody)):
            raise UnknownPrompt("path")
        body.check_cacheable()
        if isinstance(body, CompletionBody):
            ids = read_prompt(body.prompt)
            if isinstance(ids, np.ndarray):
                return Prompt(ids, len(ids), 0), "ids"
        if model is None:
            raise UnknownPrompt("no tokenizer")
        way = model.ways.way(body.kind)
        if model.engines:
            self._comparison.sample(model, path, raw, body, asyncio.get_running_loop().time())
        if way is Way.LOCAL and model.files is not None:
            return await self._local.tokens(model.files, body, len(raw)), way.value
        if way is Way.RENDER and model.engines:
            return await self._asked.tokens(model, path, raw, body), way.value
        raise UnknownPrompt("no tokenizer")

    def stats(self) -> TokenizerStats:
        """Return what became of all requests so far."""
        models = self._registry.models
        kinds = [
            (f"{model.name} {kind.value}", model.ways, kind) for model in models for kind in Kind
        ]
        return TokenizerStats(
            requests=dict(self._requests),
            unknown=dict(self._unknown),
            tokens=self._tokens,
            remembered_tokens=self._remembered,
            seconds=self._seconds.snapshot(),
            checks=sum(model.ways.checks for model in models),
            mismatches=sum(model.ways.mismatches for model in models),
            models={name: ways.way(kind).value for name, ways, kind in kinds},
            reasons={name: ways.reason(kind) for name, ways, kind in kinds},
            memo_bytes=self._local.memo_bytes + self._asked.memo_bytes,
        )

    def check(self) -> None:
        """Check memos and ways.

        Raises:
            InternalError: They are wrong.
        """
        self._local.check()
        self._asked.check()
        for model in self._registry.models:
            model.ways.check()
