"""Bodies of requests: the fields that decide the prompt, and no others.

Fields and their defaults are those of vLLM's OpenAI-compatible API.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from enum import Enum
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from flexcache.router.chooser import Arrival, Turn


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What was found of a prompt.

    Attributes:
        ids: Tokens from the start, ``uint32``; not all of them if some are unknown.
        num_tokens: Length of the whole prompt, estimated if ``ids`` are not all.
        remembered: Tokens among ``ids`` that were not made for this request.
    """

    ids: np.ndarray
    num_tokens: int
    remembered: int


CHARS_PER_TOKEN = 4
"""For estimates: English text and code have 3.5 to 4.5 characters a token."""

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
CHAT_PATHS = (CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH)
PROMPT_PATHS = (CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH)
"""Those of requests that may say from where KV comes."""

TOKENS_PER_MEDIUM = 576
"""For estimates: an image of 336 by 336 pixels in patches of 14."""

_UNSET = (None, "auto")
"""Fields of these values do not count as given."""


class Kind(str, Enum):
    """Kinds of prompts that can differ in how well the router reproduces them."""

    COMPLETION = "completion"
    CHAT = "chat"
    TOOLS = "tools"
    """Chat with tools."""
    MESSAGES = "messages"
    """``/v1/messages``, with tools or without."""
    RESPONSES = "responses"
    """``/v1/responses``, likewise."""


class UnknownPrompt(Exception):
    """The prompt's tokens cannot be known; the message is the reason, a word or two."""


class Body(msgspec.Struct, kw_only=True):
    """Fields that all kinds share."""

    model: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprobs: int | bool | None = None
    echo: bool | None = False

    def estimate(self, num_bytes: int) -> int:
        """Estimate the length of the prompt in tokens.

        Args:
            num_bytes: Length of the whole body.
        """
        return num_bytes // CHARS_PER_TOKEN

    def turns(self, seed: int) -> Sequence[Turn]:
        """Return the conversation as text: a key for each of its beginnings, the shortest first.

        Args:
            seed: Secret of the keys.
        """
        return ()

    def check_cacheable(self) -> None:
        """Check that the engine looks the prompt up in its cache, whole.

        Raises:
            UnknownPrompt: It does not.
        """
        if self.truncate_prompt_tokens is not None:
            raise UnknownPrompt("truncated")
        if self.prompt_logprobs is not None:
            raise UnknownPrompt("prompt_logprobs")


class CompletionBody(Body, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw()
    suffix: str | None = None
    prompt_embeds: msgspec.Raw | None = None
    add_special_tokens: bool = True

    @property
    def kind(self) -> Kind:
        """Kind of the prompt."""
        return Kind.COMPLETION

    def estimate(self, num_bytes: int) -> int:
        prompt = bytes(self.prompt)
        if b'"' in prompt:
            return len(prompt) // CHARS_PER_TOKEN
        return prompt.count(b",") + 1

    def for_tokenize(self) -> dict[str, Any]:
        """Return the body of a request to ``/tokenize`` for the same prompt."""
        prompt = read_prompt(self.prompt)
        return {
            "model": self.model,
            "prompt": prompt,
            "add_special_tokens": self.add_special_tokens,
        }

    def check_cacheable(self) -> None:
        super().check_cacheable()
        if self.echo and self.logprobs is not None:
            raise UnknownPrompt("prompt_logprobs")
        if self.suffix is not None:
            raise UnknownPrompt("suffix")
        if self.prompt_embeds is not None:
            raise UnknownPrompt("prompt_embeds")


def check_transfer(params: dict[str, msgspec.Raw] | None) -> None:
    """
    Raises:
        UnknownPrompt: The engine takes the prompt's tokens from elsewhere.
    """
    if params and "prompt_token_ids" in params:
        raise UnknownPrompt("kv_transfer")


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    kv_transfer_params: dict[str, msgspec.Raw] | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the prompt."""
        return Kind.TOOLS if self.tools else Kind.CHAT

    def check_cacheable(self) -> None:
        super().check_cacheable()
        check_transfer(self.kv_transfer_params)

    def template_variables(self) -> dict[str, Any]:
        """Return what the chat template gets besides messages and tools.

        The request's fields win over its ``chat_template_kwargs``.
        """
        given = self.chat_template_kwargs or {}
        fields: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            "reasoning_effort": self.reasoning_effort,
        }
        if self.reasoning_effort is not None and "enable_thinking" not in given:
            fields["enable_thinking"] = self.reasoning_effort != "none"
        return given | {key: value for key, value in fields.items() if value not in _UNSET}

    def for_tokenize(self) -> dict[str, Any]:
        """Return the body of a request to ``/tokenize`` for the same prompt."""
        return {
            "model": self.model,
            "messages": [_with_reasoning(message) for message in self.messages],
            "tools": self.tools,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.template_variables(),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }

    def estimate(self, num_bytes: int) -> int:
        return self.estimate_messages(0)

    def estimate_messages(self, first: int) -> int:
        """Estimate the length of the messages from ``first`` on, in tokens."""
        chars = media = 0
        messages = self.messages[first:]
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            for part in parts:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    chars += len(text)
                elif part is not None:
                    media += 1
        return (
            chars // CHARS_PER_TOKEN + media * TOKENS_PER_MEDIUM + 4 * (len(self.messages) - first)
        )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Rename a field, as is done with chats, but not by ``/tokenize``."""
    if message.get("reasoning_content") is None or message.get("reasoning") is not None:
        return message
    others = {key: value for key, value in message.items() if key != "reasoning_content"}
    return others | {"reasoning": message["reasoning_content"]}


_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])


def count_structure(raw: bytes) -> tuple[int, int]:
    """Count opening braces with brackets, and commas: bounds on what a parser has to make."""
    octets = np.frombuffer(raw, dtype=np.uint8)
    opening = (octets | 0x20) == ord("{")  # "[" is the same without that bit
    return int(np.count_nonzero(opening)), int(np.count_nonzero(octets == ord(",")))


def read_prompt(raw: msgspec.Raw) -> str | np.ndarray:
    """Read a completion's prompt: text, or token ids as ``uint32``.

    Raises:
        UnknownPrompt: There are several prompts, or none.
        msgspec.DecodeError: It is no prompt.
    """
    data = bytes(raw).strip()
    if data.startswith(b'"'):
        return _text.decode(data)
    inner = data[1:-1].strip()
    if not data.startswith(b"[") or not inner:
        raise UnknownPrompt("no prompt")
    if inner.startswith(b'"'):
        texts = _texts.decode(data)
        if len(texts) > 1:
            raise UnknownPrompt("batch")
        return texts[0]
    if inner.startswith(b"["):
        if inner.count(b"[") > 1:
            raise UnknownPrompt("batch")
        inner = inner[1:].removesuffix(b"]").strip()
    return _token_ids(inner)


def _token_ids(data: bytes) -> np.ndarray:
    """Parse numbers between commas, 10 times as fast as a JSON parser makes a list of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # unread rest; counted below
        try:
            numbers = np.fromstring(data, dtype=np.int64, sep=",")
        except ValueError:  # unread rest, by newer NumPy
            raise UnknownPrompt("no prompt") from None
    if len(numbers) != data.count(b",") + 1:
        raise UnknownPrompt("no prompt")
    if numbers.min() < 0 or numbers.max() >= 2**32:
        raise UnknownPrompt("no prompt")
    return numbers.astype(np.uint32)


class _Marker(msgspec.Struct):
    type: Any = None
    ttl: str | None = None


class _Marked(msgspec.Struct):
    """A part of a body that may have Anthropic's ``cache_control``, or parts that do."""

    cache_control: _Marker | None = None
    content: str | list[_Marked] | None = None


class _MarkedBody(msgspec.Struct):
    cache_control: _Marker | None = None
    system: str | list[_Marked] | None = None
    tools: list[_Marked] | None = None
    messages: list[_Marked] = []


_read_marked = msgspec.json.Decoder(_MarkedBody).decode
MARKER = b'"cache_control"'
_PIN = "flexcache_pin_ttl_s"
_TTLS = {None: 300, "5m": 300, "1h": 3600}
"""Seconds that a marker asks for; Anthropic has no others."""


def with_pin(target: str, body: bytes) -> bytes:
    """Translate the ``cache_control`` markers of a chat into FlexCache's pin of its prompt.

    The prompt is pinned for the longest time that a marker names: markers further on cover what
    lies before them. A pin that the body asks for itself stays. Never raises.

    Args:
        target: Path of the request.
        body: One that has `MARKER`.
    """
    if target.partition("?")[0] not in (CHAT_PATH, MESSAGES_PATH):
        return body
    try:
        markers = _markers(_read_marked(body))
        asked = (_TTLS.get(marker.ttl, 0) for marker in markers if marker.type == "ephemeral")
        ttl_s = max(asked, default=0)
    except UNREADABLE:
        return body
    return with_params(body, {_PIN: ttl_s}, lambda names: _PIN not in names) if ttl_s else body


def _markers(marked: _MarkedBody) -> Iterator[_Marker]:
    if marked.cache_control is not None:
        yield marked.cache_control
    waiting = [*(marked.tools or ()), *marked.messages]
    waiting += marked.system if isinstance(marked.system, list) else []
    while waiting:
        part = waiting.pop()
        if part.cache_control is not None:
            yield part.cache_control
        if isinstance(part.content, list):
            waiting += part.content


_MOST_PARTS = 64
_LONGEST = 1024  # bytes of a field with its header
_SEARCHED = 1 << 20  # bytes at either end of a form: half a millisecond each


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def named_model(arrival: Arrival) -> str | None:
    """Return the model that a request names; None: it cannot be told. Never raises.

    Most bodies are JSON. Requests with a file, to be transcribed say, are forms (RFC 7578).
    """
    try:
        content = Message()
        # `email` takes seconds for hundreds of kB of a malformed header.
        content["Content-Type"] = arrival.headers.get("content-type", "")[:_LONGEST]
        if content.get_content_type() == "multipart/form-data":
            return _in_form(arrival.body, content.get_boundary(""))
        return _named.decode(arrival.body).model
    except (ValueError, TypeError, RecursionError):  # `email` raises many for malformed headers
        return None


def _in_form(raw: bytes, boundary: str) -> str | None:
    """Return the form's field of that name. Raises whatever `email` does."""
    if not boundary:
        return None
    for part in islice(_parts(raw, b"\r\n--" + boundary.encode()), _MOST_PARTS):
        header, _, value = part.partition(b"\r\n\r\n")
        fields = BytesHeaderParser().parsebytes(header.lstrip())
        if fields.get_param("name", header="content-disposition") == "model":
            return value.decode()
    return None


def _parts(raw: bytes, delimiter: bytes) -> Iterator[bytes]:
    """Yield the parts at either end of a form; empty in place of one too long to be the field.

    Clients put fields before or after the file. To search all of it would hold the event loop up,
    28 ms for 60 MB, and from a thread too: a search keeps the interpreter's lock.
    """
    size, most = len(raw), _SEARCHED
    for begin, stop in [(0, most), (size - most, size)] if size > 2 * most else [(0, size)]:
        if is_part := not begin and raw.startswith(delimiter[2:]):  # with no line before it
            begin = len(delimiter) - 2
        while (end := raw.find(delimiter, begin, stop)) >= 0:
            yield raw[begin:end] if is_part and end - begin <= _LONGEST else b""
            begin = end + len(delimiter)
            is_part = True


TRANSFER = "kv_transfer_params"
read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
read_params = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)  # the engine says what is wrong


def with_params(
    body: bytes, values: Mapping[str, Any], admits: Callable[[Collection[str]], bool]
) -> bytes:
    """Add fields to a body's ``kv_transfer_params``, if those that are there admit it. Never
    raises."""
    if not values:
        return body
    try:
        fields = read_fields(body)
        params = read_params(fields.get(TRANSFER, b"null")) or {}
    except UNREADABLE:
        return body
    if not admits(params):
        return body
    fields[TRANSFER] = msgspec.Raw(msgspec.json.encode({**params, **values}))
    return msgspec.json.encode(fields)


def are_ours(names: Collection[str]) -> bool:
    """Return whether all fields of ``kv_transfer_params`` are hints for FlexCache."""
    return all(name.startswith("flexcache_") for name in names)


_NOT_DIVIDED = {
    f"flexcache_{name}" for name in ("store", "max_store_tokens", "hands_over", "source", "wait_s")
}


def may_be_divided(method: str, path: str, body: bytes) -> bool:
    """Return whether one engine may compute a request's prompt and another its answer. Never
    raises."""
    if method != "POST" or path.partition("?")[0] not in PROMPT_PATHS:
        return False
    try:
        fields = read_fields(body)
        params = read_params(fields.get(TRANSFER, b"null")) or {}
    except UNREADABLE:
        return False
    # With these an engine computes the prompt, whatever its cache has, or stores nothing.
    is_bound = {"prompt_logprobs", "echo"} & fields.keys() or _NOT_DIVIDED & params.keys()
    return are_ours(params) and not is_bound
