"""Models and adapters that engines serve, and how their prompts become tokens."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import chain

import numpy as np

from flexcache.errors import InternalError
from flexcache.logs import log_event
from flexcache.router.fleet import ModelCard
from flexcache.router.tokens.body import ChatBody, CompletionBody, Kind
from flexcache.router.tokens.engines import EngineApi, NotRendered
from flexcache.router.tokens.template import ChatTemplate
from flexcache.router.tokens.text_tokenizer import (
    ModelFiles,
    NoTokenizer,
    find_directory,
    read_files,
)

AGREEMENTS_TO_RETURN = 3
"""Comparisons in a row that must agree before a kind that differed is made here again."""


class TokenWay(str, Enum):
    """How prompts become tokens."""

    LOCAL = "local"
    RENDER = "render"
    """The engine is asked."""
    UNKNOWN = "unknown"
    """They do not: the request goes by load."""


class Ways:
    """The ways of one model, for each kind of prompt.

    Args:
        local: Kinds for which there are tokenizer and template here.
        missing: Why the others have none.

    Attributes:
        checks: Comparisons so far.
        mismatches: Comparisons that differed.
    """

    def __init__(self, local: frozenset[Kind], missing: str) -> None:
        self._local = local
        self._missing = missing
        self._engine_renders: bool | None = None
        self._agreed: dict[Kind, int] = {}  # comparisons in a row; 0: the last one differed
        self._differing: set[Kind] = set()
        self.checks = 0
        self.mismatches = 0

    def way(self, kind: Kind) -> TokenWay:
        """Tell how prompts of a kind become tokens now."""
        if kind in self._local and kind not in self._differing:
            return TokenWay.LOCAL
        return TokenWay.UNKNOWN if self._engine_renders is False else TokenWay.RENDER

    def compared(self, kind: Kind, equal: bool) -> None:
        """Note a comparison of the tokens made here with the engine's."""
        self._engine_renders = True
        self.checks += 1
        if not equal:
            self.mismatches += 1
            self._agreed[kind] = 0
            self._differing.add(kind)
            return
        self._agreed[kind] = self._agreed.get(kind, 0) + 1
        if self._agreed[kind] >= AGREEMENTS_TO_RETURN:
            self._differing.discard(kind)

    def engine_renders(self, renders: bool) -> None:
        """Note whether the engine has ``/render`` or ``/tokenize``."""
        self._engine_renders = renders

    def reason(self, kind: Kind) -> str:
        """Say why prompts of a kind go that way."""
        if self.way(kind) is TokenWay.LOCAL:
            if self._agreed.get(kind):
                return "checked"
            return "unchecked: no /tokenize" if self._engine_renders is False else "unchecked"
        why = self._missing if kind not in self._local else "differs from the engine"
        return f"{why}; no /tokenize" if self._engine_renders is False else why

    def check(self) -> None:
        """Check the state.

        Raises:
            InternalError: It is impossible.
        """
        for kind in self._differing:
            if self._agreed.get(kind, 0) >= AGREEMENTS_TO_RETURN:
                raise InternalError(f"{kind} is asked of the engine without a reason")
        if not len(self._differing) <= self.mismatches <= self.checks:
            raise InternalError(f"{self.mismatches} mismatches in {self.checks} checks")


class ServedModel:
    """A model, under its first name.

    Args:
        files: None: there are none here.
        missing: Why there are none.
    """

    def __init__(self, name: str, files: ModelFiles | None, missing: str) -> None:
        self.name = name
        self.files = files
        self.engines: deque[str] = deque()
        """URLs, the one that is asked next first."""
        self.is_vllms = True
        """Its engines make chats of agents' requests as vLLM does."""
        kinds = frozenset[Kind]()
        if files is not None:
            kinds = frozenset(Kind) if files.chat is not None else frozenset({Kind.COMPLETION})
            missing = "no chat template here"
        self.ways = Ways(kinds, missing)

    @property
    def templates(self) -> tuple[ChatTemplate | None, ...]:
        """Its chat templates, without and with tools."""
        return () if self.files is None else (self.files.chat, self.files.chat_with_tools)

    async def render(
        self, engines: EngineApi, path: str, raw: bytes, body: ChatBody | CompletionBody
    ) -> np.ndarray:
        """Have an engine make a request's tokens, however long it takes; each in turn.

        Args:
            path: Path of the request.
            raw: Its body.
            body: The same, parsed.

        Raises:
            NotRendered: It did not, or there is none.
        """
        if not self.engines:
            raise NotRendered("no engine")
        url = self.engines[0]
        self.engines.rotate(-1)
        try:
            ids = await engines.tokens(url, path, raw, body)
        except NotRendered as error:
            if error.missing:
                self.ways.engine_renders(False)
            raise
        self.ways.engine_renders(True)
        return ids


def read_model(
    name: str, source: str | None, strftime_now: Callable[[str], str]
) -> tuple[ModelFiles | None, str]:
    """Read the files of a model; slow.

    Args:
        source: Directory, or name in the Hugging Face cache.

    Returns:
        The files, or None and the reason.
    """
    directory = find_directory(source) if source else None
    if directory is None:
        return None, f"no tokenizer here for {source or name}"
    try:
        return read_files(directory, strftime_now), ""
    except NoTokenizer as error:
        return None, str(error)


def base_models(cards: Iterable[ModelCard]) -> dict[str, list[str]]:
    """Group the served names of models, without adapters, by the models' files."""
    found: dict[str, list[str]] = {}
    for card in cards:
        if card.parent is None:
            found.setdefault(card.root or card.id, []).append(card.id)
    return found


def _roots_of_others(cards: Iterable[ModelCard]) -> set[str]:
    """Return the models' files at engines other than vLLM."""
    return {card.root or card.id for card in cards if card.owner not in (None, "vllm")}


logger = logging.getLogger(__name__)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ModelRegistry:
    """The models that the engines serve, and which name belongs to which.

    Args:
        tokenizer: Source of the tokenizer for all models: directory, or name in the Hugging Face
            cache; None: that which the engine reports as the model's.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = tokenizer
        self._cards: dict[str, Sequence[ModelCard]] = {}
        """By URL of their engine."""
        self._models: dict[str, ServedModel] = {}  # by source of their files
        self._names: dict[str, tuple[ServedModel, str | None]] = {}

    @property
    def models(self) -> list[ServedModel]:
        """All served models."""
        return list(self._models.values())

    def follow(self, urls: Collection[str]) -> None:
        """Keep these engines, and no others. `update` must follow."""
        for url in self._cards.keys() - set(urls):
            del self._cards[url]

    def set_cards(self, url: str, cards: Sequence[ModelCard]) -> None:
        """Take note of what an engine serves. `update` must follow."""
        self._cards[url] = cards

    def find(self, name: str | None) -> tuple[ServedModel | None, str | None]:
        """Find model and adapter by the name in a request.

        A name that no engine has told yet is taken for a new adapter of the only model.
        """
        if name is not None and name in self._names:
            return self._names[name]
        if len(self._models) != 1:
            return None, None
        (model,) = self._models.values()
        return model, name if self._names else None

    async def update(self) -> None:
        """Read the files of new models, and work out which name belongs to which."""
        listed = dict(self._cards)  # they may change while files are read
        for cards in listed.values():
            for root, names in base_models(cards).items():
                if root not in self._models:
                    self._models[root] = await self._read(names[0], root)
        if self._tokenizer is not None and not self._models:
            self._models[self._tokenizer] = await self._read("", self._tokenizer)
        self._assign(listed)

    async def _read(self, name: str, root: str) -> ServedModel:
        source = self._tokenizer or root
        files, missing = await asyncio.to_thread(read_model, name, source, _strftime_now)
        log_event(
            logger,
            logging.WARNING if files is None else logging.INFO,
            "router_tokenizer_read" if files is not None else "router_tokenizer_missing",
            model=name or None,
            source=source,
            why=missing or None,
        )
        return ServedModel(name, files, missing)

    def _assign(self, listed: Mapping[str, Sequence[ModelCard]]) -> None:
        engines: dict[str, deque[str]] = {}
        names: dict[str, tuple[ServedModel, str | None]] = {}
        for url, cards in listed.items():
            for root, served in base_models(cards).items():
                engines.setdefault(root, deque()).append(url)
                names |= dict.fromkeys(served, (self._models[root], None))
            for card in cards:
                if card.parent is not None and card.parent in names:
                    names[card.id] = (names[card.parent][0], card.id)
        if listed:
            self._models = {root: model for root, model in self._models.items() if root in engines}
        others = _roots_of_others(chain.from_iterable(listed.values()))
        for root, model in self._models.items():
            model.engines = engines.get(root, deque())
            model.is_vllms = root not in others
        self._names = names
