"""Knows the models and adapters that the engines serve, and how their prompts become tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flexcache.router.tokens.body import Kind
from flexcache.router.tokens.engines import ModelCard, NotRendered
from flexcache.router.tokens.model_files import (
    ModelFiles,
    NoTokenizer,
    find_directory,
    read_files,
)
from flexcache.router.tokens.ways import Ways


class ServedModel:
    """A model, under its first name.

    Args:
        files: None: there are none here.
        missing: Why there are none.
    """

    def __init__(self, name: str, files: ModelFiles | None, missing: str) -> None:
        self.name = name
        self.files = files
        self.engines: dict[str, Mapping[str, str]] = {}
        kinds = frozenset[Kind]()
        if files is not None:
            kinds = frozenset(Kind) if files.chat is not None else frozenset({Kind.COMPLETION})
            missing = "no chat template here"
        self.ways = Ways(kinds, missing)

    def engine(self, url: str | None) -> tuple[str, Mapping[str, str]]:
        """Return URL and headers of an engine.

        Args:
            url: That one; None: one after the other.

        Raises:
            NotRendered: There is none.
        """
        if url is None and self.engines:
            url = next(iter(self.engines))
        if url is None or url not in self.engines:
            raise NotRendered("no engine")
        headers = self.engines.pop(url)
        self.engines[url] = headers
        return url, headers


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
