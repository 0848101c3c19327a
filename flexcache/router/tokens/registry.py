"""Keeps the list of served models: asks the engines again and again, reads tokenizers' files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime

from flexcache.logs import log_event
from flexcache.router.tokens.engines import BadAnswer, Engines, ModelCard
from flexcache.router.tokens.served import ServedModel, base_models, read_model

logger = logging.getLogger(__name__)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ModelRegistry:
    """The models that the engines serve, and which name belongs to which.

    Args:
        tokenizer: Source of the tokenizer for all models: directory, or name in the Hugging Face
            cache; None: that which the engine reports as the model's.
    """

    def __init__(self, engines: Engines, tokenizer: str | None) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self._urls: dict[str, Mapping[str, str]] = {}
        self._cards: dict[str, list[ModelCard]] = {}
        self._models: dict[str, ServedModel] = {}  # by source of their files
        self._names: dict[str, tuple[ServedModel, str | None]] = {}

    @property
    def models(self) -> list[ServedModel]:
        """All served models."""
        return list(self._models.values())

    def set_engines(self, engines: Mapping[str, Mapping[str, str]]) -> None:
        """Set the engines: base URL to headers."""
        self._urls = dict(engines)

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

    async def refresh(self) -> list[tuple[ServedModel, str]]:
        """Ask every engine which models it serves.

        Returns:
            Models with the URL of an engine that was not known to serve it.
        """
        urls = list(self._urls)
        answers = await asyncio.gather(*(self._list(url, self._urls[url]) for url in urls))
        heard = {url: cards for url, cards in zip(urls, answers, strict=True) if cards is not None}
        self._cards = {
            url: cards for url, cards in (self._cards | heard).items() if url in self._urls
        }
        for cards in self._cards.values():
            for root, names in base_models(cards).items():
                if root not in self._models:
                    self._models[root] = await self._read(names[0], root)
        if self._tokenizer is not None and not self._models:
            self._models[self._tokenizer] = await self._read("", self._tokenizer)
        return self._assign()

    async def _list(self, url: str, headers: Mapping[str, str]) -> list[ModelCard] | None:
        try:
            return await self._engines.models(url, headers)
        except BadAnswer:  # the prober, which reads it too, says so
            return None

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

    def _assign(self) -> list[tuple[ServedModel, str]]:
        """Work out names and engines of all models."""
        before = {(root, url) for root, model in self._models.items() for url in model.engines}
        engines: dict[str, dict[str, Mapping[str, str]]] = {}
        names: dict[str, tuple[ServedModel, str | None]] = {}
        for url, cards in self._cards.items():
            for root, served in base_models(cards).items():
                engines.setdefault(root, {})[url] = self._urls[url]
                names |= dict.fromkeys(served, (self._models[root], None))
            for card in cards:
                if card.parent is not None and card.parent in names:
                    names[card.id] = (names[card.parent][0], card.id)
        if self._cards:
            self._models = {root: model for root, model in self._models.items() if root in engines}
        for root, model in self._models.items():
            model.engines = engines.get(root, {})
        self._names = names
        return [
            (model, url)
            for root, model in self._models.items()
            for url in model.engines
            if (root, url) not in before
        ]
