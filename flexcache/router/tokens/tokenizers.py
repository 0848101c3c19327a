"""Tokenizers of a router: find the tokens of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from flexcache.logs import log_event
from flexcache.router.chooser import SESSION_HEADERS, Arrival, RouteRequest
from flexcache.router.fleet import ModelCard
from flexcache.router.stats import TokenizerStats
from flexcache.router.tokens.agents import AgentBody, read_body
from flexcache.router.tokens.body import (
    CHAT_PATHS,
    Body,
    ChatBody,
    CompletionBody,
    Kind,
    PromptTokens,
    UnknownPrompt,
    count_structure,
    named_model,
    read_prompt,
)
from flexcache.router.tokens.engines import EngineApi, NotRendered, open_session
from flexcache.router.tokens.local import LocalTokens, TokenLimits
from flexcache.router.tokens.models import ModelRegistry, ServedModel, TokenWay
from flexcache.router.tokens.template import has_media
from flexcache.router.waiting import Turns

logger = logging.getLogger(__name__)

_LARGEST_SAMPLE = 1 << 20
"""Bytes of a request that is compared at most: an engine takes a second for them."""


class TokenComparison:
    """Checks the tokens made here against the engine's, on samples of the requests.

    The first request of each kind of prompt is one, then one in a while, beside the requests.
    """

    def __init__(self, local: LocalTokens, engines: EngineApi, limits: TokenLimits) -> None:
        self._local = local
        self._engines = engines
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
        if now < self._next.get(key, now) or len(raw) > _LARGEST_SAMPLE or not model.engines:
            return
        self._next[key] = now + self._every_s
        task = asyncio.create_task(self._compare(model, path, raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, model: ServedModel, path: str, raw: bytes) -> None:
        with self._samples.turn(), contextlib.suppress(UnknownPrompt, NotRendered):
            body = read_body(path, raw)  # its own: rendering may change what it has
            if isinstance(body, AgentBody):
                body = body.as_chat(model.templates)
            if model.files is None or not isinstance(body, (ChatBody, CompletionBody)):
                return
            made = await self._local.tokens(model.files, body, len(raw))
            if made.num_tokens > len(made.ids):
                return  # not all is known: media
            theirs = await model.render(self._engines, path, raw, body)
            equal = np.array_equal(made.ids, theirs)
            before = model.ways.way(body.kind)
            model.ways.compared(body.kind, equal)
            if model.ways.way(body.kind) is not before:
                log_event(
                    logger,
                    logging.WARNING if not equal else logging.INFO,
                    "router_tokens_differ" if not equal else "router_tokens_agree_again",
                    model=model.name,
                    prompts=body.kind.value,
                    from_token=None if equal else _first_difference(made.ids, theirs),
                    now=model.ways.way(body.kind).value,
                )

    async def close(self) -> None:
        """Give up what is being compared."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _first_difference(ours: np.ndarray, theirs: np.ndarray) -> int:
    shared = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shared] != theirs[:shared])
    return int(differing[0]) if len(differing) else shared


class Tokenizers:
    """Reads requests. Make and use it on one running event loop.

    Args:
        tokenizer: Directory of the models' tokenizer, or a model's name in the Hugging Face
            cache; None: as the engines report. Without a tokenizer the engines are asked.
        headers: Sent with each request to an engine, a key, say.
        seed: Secret of the memos' hashes; None: random.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        headers: Mapping[str, str] | None = None,
        seed: int | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        if seed is None:
            seed = secrets.randbits(63)
        self._seed = seed
        self._limits = limits or TokenLimits()
        self._session = open_session(headers or {})
        self._engines = EngineApi(self._session, self._limits.render_timeout_s)
        self._local = LocalTokens(self._limits, seed)
        self._registry = ModelRegistry(tokenizer)
        self._comparison = TokenComparison(self._local, self._engines, self._limits)
        self._num_asking = 0
        self._has_news = asyncio.Event()
        self._updating: asyncio.Task[None] | None = None
        self._updates = Turns("tokenizers")
        self._counts = TokenizerStats()

    async def start(self) -> None:
        """Read the models' files, and go on doing so as engines tell of others."""
        await self.update()
        self._updating = asyncio.create_task(self._keep_updating())

    async def close(self) -> None:
        """Stop all that runs."""
        if self._updating is not None:
            self._updating.cancel()
            await asyncio.gather(self._updating, return_exceptions=True)
        await self._comparison.close()
        await self._local.close()
        await self._session.close()

    def follow(self, urls: Collection[str]) -> None:
        """Keep the engines with these base URLs, and no others."""
        self._registry.follow(urls)
        self._has_news.set()

    def set_cards(self, url: str, cards: Sequence[ModelCard]) -> None:
        """Take note of what an engine serves."""
        self._engines.forget(url)
        self._registry.set_cards(url, cards)
        self._has_news.set()

    async def update(self) -> None:
        """Read the files of the models that were told of."""
        self._has_news.clear()
        with self._updates.turn():
            await self._registry.update()

    async def _keep_updating(self) -> None:
        while True:
            await self._has_news.wait()
            await self.update()

    async def read(self, arrival: Arrival) -> RouteRequest:
        """Read a request. Never raises: what cannot be read goes by load."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        body, model, adapter, prompt, way, why = Body(), None, None, None, "unknown", ""
        try:
            path = arrival.path.partition("?")[0]
            body = self._parse(path, arrival.body)
            model, adapter = self._registry.find(body.model)
            prompt, way = await self._prompt(model, path, arrival.body, body)
        except (UnknownPrompt, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            why = str(error) if isinstance(error, UnknownPrompt) else "malformed"
        except Exception:  # no body may stop the router
            log_event(logger, logging.ERROR, "router_request_not_read", exc_info=True)
            why = "error"
        counts = self._counts
        counts.requests[way] += 1
        if prompt is None:
            counts.unknown[why] = counts.unknown.get(why, 0) + 1
        else:
            counts.tokens += len(prompt.ids)
            counts.remembered_tokens += prompt.remembered
        counts.seconds.observe(loop.time() - started)
        is_known = prompt is not None and prompt.num_tokens == len(prompt.ids)
        return RouteRequest(
            request_id=arrival.request_id,
            num_tokens=body.estimate(len(arrival.body)) if prompt is None else prompt.num_tokens,
            token_ids=None if prompt is None else prompt.ids,
            model=body.model or named_model(arrival),
            adapter=adapter,
            cache_salt=body.cache_salt,
            session_id=next(filter(None, map(arrival.headers.get, SESSION_HEADERS)), None)
            or body.session_id,
            turns=() if is_known else body.turns(self._seed),
        )

    def _parse(self, path: str, raw: bytes) -> Body:
        if not raw:
            raise UnknownPrompt("no body")
        limits = self._limits
        if len(raw) > limits.max_body:
            raise UnknownPrompt("too long")
        braces, commas = count_structure(raw)
        if braces > limits.max_braces or (path in CHAT_PATHS and commas > limits.max_commas):
            raise UnknownPrompt("too long")
        return read_body(path, raw)

    async def _prompt(
        self, model: ServedModel | None, path: str, raw: bytes, body: Body
    ) -> tuple[PromptTokens, str]:
        """Find a prompt's tokens.

        Returns:
            The prompt, and how it was found.

        Raises:
            UnknownPrompt: It was not.
        """
        if not isinstance(body, (ChatBody, CompletionBody, AgentBody)):
            raise UnknownPrompt("path")
        body.check_cacheable()
        if isinstance(body, CompletionBody):
            ids = read_prompt(body.prompt)
            if isinstance(ids, np.ndarray):
                return PromptTokens(ids, len(ids), 0), "ids"
        if model is None:
            raise UnknownPrompt("no tokenizer")
        if isinstance(body, AgentBody):
            if not model.is_vllms:
                raise UnknownPrompt("engine")
            body = body.as_chat(model.templates)
        way = model.ways.way(body.kind)
        if model.engines:
            self._comparison.sample(model, path, raw, body, asyncio.get_running_loop().time())
        if way is TokenWay.LOCAL and model.files is not None:
            return await self._local.tokens(model.files, body, len(raw)), way.value
        if way is TokenWay.RENDER and model.engines:
            return await self._asked(model, path, raw, body), way.value
        raise UnknownPrompt("no tokenizer")

    async def _asked(
        self, model: ServedModel, path: str, raw: bytes, body: ChatBody | CompletionBody
    ) -> PromptTokens:
        """Have an engine make a prompt's tokens, within a deadline.

        Raises:
            UnknownPrompt: It did not.
        """
        if isinstance(body, ChatBody) and has_media(body.messages):
            raise UnknownPrompt("media")  # an engine would fetch them, for the sake of a text
        if self._num_asking >= self._limits.rendering:
            raise UnknownPrompt("busy")
        self._num_asking += 1
        try:
            rendering = model.render(self._engines, path, raw, body)
            ids = await asyncio.wait_for(rendering, self._limits.render_deadline_s)
        except NotRendered as error:
            raise UnknownPrompt("not rendered") from error
        except asyncio.TimeoutError:
            raise UnknownPrompt("engine too slow") from None
        finally:
            self._num_asking -= 1
        return PromptTokens(ids, len(ids), 0)

    def stats(self) -> TokenizerStats:
        """Return what became of all requests so far."""
        models = self._registry.models
        kinds = [
            (f"{model.name} {kind.value}", model.ways, kind) for model in models for kind in Kind
        ]
        return self._counts.snapshot(
            checks=sum(model.ways.checks for model in models),
            mismatches=sum(model.ways.mismatches for model in models),
            models={name: ways.way(kind).value for name, ways, kind in kinds},
            reasons={name: ways.reason(kind) for name, ways, kind in kinds},
            memo_bytes=self._local.memo_bytes,
        )

    def check(self) -> None:
        """Check memos and ways.

        Raises:
            InternalError: They are wrong.
        """
        self._local.check()
        for model in self._registry.models:
            model.ways.check()
