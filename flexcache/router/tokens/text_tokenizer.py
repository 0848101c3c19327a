"""Tokenizers of texts, in segments that do not influence each other, and a model's files.

A Hugging Face tokenizer first cuts the text at its added tokens, then normalises, splits and
encodes what lies between them, each piece on its own. A *border* is an added token that takes
nothing of its neighbours with it. A segment is the text from one border to the next, with the
first of the two. It is encoded alike wherever it stands, except that only the first segment of a
text can be without a border, and so be treated as the beginning.
"""

from __future__ import annotations

import itertools
import os
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import msgspec
import numpy as np
import tokenizers

from flexcache.router.tokens.template import ChatTemplate


class TextTokenizer:
    """A tokenizer with its borders. Threads may share it.

    Args:
        tokenizer: It is taken over: truncation and padding are switched off.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        # Those that are looked for first, in the text as it is.
        verbatim = [token for token in added if not token.normalized and token.content]
        self._borders = frozenset(
            token.content
            for token in verbatim
            if not (token.lstrip or token.rstrip or token.single_word)
            and not any(char.isspace() for char in token.content)
        )
        self._longest_first = sorted({token.content for token in verbatim}, key=len, reverse=True)
        self._verbatim = re.compile("|".join(map(re.escape, self._longest_first)))
        self._wrapping = self._find_wrapping()

    def _find_wrapping(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Find what the tokenizer puts before and after a prompt; None if it is not that simple."""
        bare = self._tokenizer.encode("a b", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a b", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return _ids(whole[:start]), _ids(whole[start + len(bare) :])
        return None

    def split(self, text: str) -> list[str]:
        """Split a text into segments, which together are the text."""
        if not self._borders:
            return [text]
        borders = self._borders
        starts = [
            match.start() for match in self._verbatim.finditer(text) if match.group() in borders
        ]
        edges = [0, *starts, len(text)]
        return [text[start:end] for start, end in itertools.pairwise(edges) if start < end]

    def up_to_last_border(self, text: str) -> str:
        """Cut off what could be encoded otherwise if the text went on."""
        longest = len(self._longest_first[0]) if self._longest_first else 0
        tail = max(0, len(text) - longest)
        # From here on, an added token may have begun that the end of the text cuts in two.
        doubtful = next(
            (i for i in range(tail, len(text)) if self._begins_longer_token(text[i:])), len(text)
        )
        end = 0
        for match in self._verbatim.finditer(text):
            if match.end() > doubtful:
                break
            if match.group() in self._borders:
                end = match.end()
        return text[:end]

    def _begins_longer_token(self, text: str) -> bool:
        return any(
            len(token) > len(text) and token.startswith(text) for token in self._longest_first
        )

    def encode(self, segments: Sequence[str]) -> list[np.ndarray]:
        """Encode each segment, ``uint32``, in this thread. Slow: a second for 300,000 tokens."""
        encode = self._tokenizer.encode_batch_fast  # of one: many would take all processors
        return [_ids(encode([text], add_special_tokens=False)[0].ids) for text in segments]

    def wrap(
        self, parts: Sequence[np.ndarray], special_tokens: bool, *, ends: bool
    ) -> np.ndarray | None:
        """Join a prompt's parts.

        Args:
            special_tokens: Add what the tokenizer adds to a prompt, its beginning mostly.
            ends: The parts are the whole prompt.

        Returns:
            All ids; None if what is added is unknown.
        """
        before, after = (_NONE, _NONE) if not special_tokens else self._wrapping or (None, None)
        if before is None or after is None:
            return None
        joined: np.ndarray = np.concatenate([before, *parts, after if ends else _NONE])
        return joined


def _ids(numbers: Sequence[int]) -> np.ndarray:
    return np.frombuffer(array("I", numbers), dtype=np.uint32)


_NONE = _ids([])

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_numbers = itertools.count(1)


class NoTokenizer(Exception):
    """There is no tokenizer that can be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's tokenizer and templates.

    Attributes:
        number: Unique among all that were read.
        directory: Where they came from.
        text: Tokenizer of text.
        chat: Template of chats; None: the model has none.
        chat_with_tools: Template of chats with tools, often the same.
    """

    number: int
    directory: Path
    text: TextTokenizer
    chat: ChatTemplate | None
    chat_with_tools: ChatTemplate | None


def find_directory(source: str) -> Path | None:
    """Find the directory of a model: a local path, or a name in the Hugging Face cache.

    Nothing is downloaded.
    """
    directory = Path(source)
    if (directory / "tokenizer.json").is_file():
        return directory
    try:
        found = huggingface_hub.try_to_load_from_cache(source, "tokenizer.json")
    except ValueError:  # this cannot be a name
        return None
    return Path(found).parent if isinstance(found, str) else None


def read_files(directory: Path, strftime_now: Callable[[str], str]) -> ModelFiles:
    """Read a model's tokenizer and chat templates.

    Raises:
        NoTokenizer: They are missing or cannot be used.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(os.fspath(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise NoTokenizer(f"{directory / 'tokenizer.json'}: {error}") from error
    try:
        config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(config) or _special_tokens(
            _read_json(directory / "special_tokens_map.json")
        )
        tokenizer.add_special_tokens(
            [token for token in special.values() if tokenizer.token_to_id(token) is None]
        )
        sources = _templates(directory, config)
        made = {
            name: ChatTemplate(source, special, strftime_now) for name, source in sources.items()
        }
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise NoTokenizer(f"{directory}: {error}") from error
    chat = made.get("default")
    text = TextTokenizer(tokenizer)
    return ModelFiles(next(_numbers), directory, text, chat, made.get("tool_use", chat))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Find the named special tokens: text, or an object that has it as ``content``."""
    found = {}
    for name in _NAMED_TOKENS:
        token = config.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[f"{name}_token"] = token
    return found


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Find the chat templates by name; the one without a name is ``default``."""
    found: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        found["default"] = template
    elif isinstance(template, list):
        found = {entry["name"]: entry["template"] for entry in template}
    processor = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        found.setdefault("tool_use", found.get("default", processor))
        found["default"] = processor
    files = {"default": directory / "chat_template.jinja"}
    more = directory / "additional_chat_templates"
    if more.is_dir():
        files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    in_files = {name: path.read_text() for name, path in files.items() if path.is_file()}
    return in_files or found
