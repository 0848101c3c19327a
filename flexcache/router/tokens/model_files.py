"""Finds and reads a model's tokenizer files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import msgspec
import tokenizers

from flexcache.router.tokens.template import ChatTemplate
from flexcache.router.tokens.text_tokenizer import TextTokenizer

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
