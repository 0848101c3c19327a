"""Renders chat templates as transformers does, within bounds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from flexcache.router.tokens.body import ChatBody, UnknownPrompt
from flexcache.router.tokens.content_format import content_format
from flexcache.router.tokens.conversation import (
    CUT,
    Message,
    conversation,
    has_media,
    tools_for_template,
)

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "tools", "return_dict", "self"}
)


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, which only mark text for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled chat template.

    It comes with the model, never with a request. It cannot reach beyond its variables, and what
    it puts out is bounded; loops that put out nothing are not.

    Args:
        source: Jinja.
        special_tokens: Passed to the template: ``bos_token`` and so on.
        strftime_now: Formats the present time, for templates that tell the date.
        max_chars: A longer text is not made.
        max_pieces: Nor one of more pieces: a bound on the time.

    Raises:
        jinja2.TemplateError: The source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        strftime_now: Callable[[str], str],
        *,
        max_chars: int = 8 << 20,
        max_pieces: int = 1 << 19,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._template = environment.from_string(source)
        self._content_format = content_format(environment.parse(source))
        self._developer_role = '"developer"' in source or "'developer'" in source
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_pieces = max_pieces

    def render(self, body: ChatBody) -> tuple[str, bool]:
        """Render a request's prompt.

        Returns:
            The text, and whether it is all of it. A prompt with media is cut before the first
            message that has any.

        Raises:
            UnknownPrompt: The template or the engine refuses the request, or it goes beyond the
                bounds.
        """
        if not body.messages:
            raise UnknownPrompt("no messages")
        if not has_media(body.messages):
            return self._render(body, self._conversation(body, "keep")), True
        # Where a template puts media is its affair. What comes out alike with and without them,
        # before the message that has the first, is free of them.
        seen, unseen = (
            _before_cut(self._render(body, self._conversation(body, media)))
            for media in ("keep", "drop")
        )
        return _common_prefix(seen, unseen), False

    def _conversation(self, body: ChatBody, media: Any) -> list[Message]:
        return conversation(
            body.messages,
            self._content_format,
            developer_role=self._developer_role,
            media=media,
        )

    def _render(self, body: ChatBody, messages: list[Message]) -> str:
        variables = self._variables(body)
        continued = variables.pop("continue_final_message", False)
        if continued:
            if variables.get("add_generation_prompt"):
                raise UnknownPrompt("continue_final_message")
            messages, final = _marked(messages)
        try:
            text = self._generate(messages, tools_for_template(body.tools), variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise UnknownPrompt("template") from error
        except (LookupError, AttributeError, RecursionError, RuntimeError) as error:
            raise UnknownPrompt("template") from error
        return _up_to_mark(text, final) if continued else text

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """Return all that the template gets besides messages and tools."""
        if body.chat_template is not None or _RESERVED & (body.chat_template_kwargs or {}).keys():
            raise UnknownPrompt("chat_template")
        return {**self._special_tokens, "documents": None, **body.template_variables()}

    def _generate(
        self, messages: list[Message], tools: list[Message] | None, variables: dict[str, Any]
    ) -> str:
        pieces = []
        length = 0
        for piece in self._template.generate(messages=messages, tools=tools, **variables):
            pieces.append(piece)
            length += len(piece)
            if length > self._max_chars or len(pieces) > self._max_pieces:
                raise UnknownPrompt("too long")
        return "".join(pieces)


def _marked(messages: list[Message]) -> tuple[list[Message], str]:
    """Mark the end of the final message's text, which stays open for the model to go on."""
    final = copy.deepcopy(messages[-1])
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE
        return [*messages[:-1], final], content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE
            return [*messages[:-1], final], text
    raise UnknownPrompt("continue_final_message")


def _up_to_mark(text: str, final: str) -> str:
    mark = text.rfind(_CONTINUE.strip())
    if mark < 0:
        if CUT in text:
            return text
        raise UnknownPrompt("continue_final_message")
    if final.strip() not in text:
        raise UnknownPrompt("continue_final_message")
    if text[mark : mark + len(_CONTINUE)] == _CONTINUE:
        return text[:mark]
    return text[:mark].rstrip()


def _before_cut(text: str) -> str:
    known, cut, _ = text.partition(CUT)
    if not cut:
        raise UnknownPrompt("media")
    return known


def _common_prefix(first: str, second: str) -> str:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return first[:low]
