"""Chat templates: rendered as transformers does, within bounds, from messages as vLLM makes them.

vLLM's chat_utils (0.32) is the source of the rules: a template that loops over a message's content
gets a list of parts ("openai"), any other a string; media become placeholders there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
from jinja2 import nodes

from flexcache.router.tokens.body import ChatBody, UnknownPrompt

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]

CUT = "\ue0f7flexcache:cut\ue0f7"
"""Stands where the known part of a prompt with media ends."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
_REFERENCE = "tool_reference"
BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a line of Claude Code's that changes with each request; engines leave it out."""


def has_media(messages: list[Message]) -> bool:
    """Tell whether any message has a part that is not text."""
    return any(
        isinstance(part, dict) and part.get("type") not in (*_TEXT_PARTS, _REFERENCE)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def conversation(
    messages: list[Message],
    content_format: ContentFormat,
    *,
    developer_role: bool,
    media: Literal["keep", "drop"] = "keep",
) -> list[Message]:
    """Make the template's messages.

    The first message with media begins with `CUT`.

    Args:
        messages: The request's.
        developer_role: The template knows it; otherwise developers become the system.
        media: Whether the template sees the media at all.

    Raises:
        UnknownPrompt: The engine refuses such messages, or they are of no known shape.
    """
    cut = False
    result = []
    for message in messages:
        parts, found = _parts(message, media)
        if found and not cut:
            parts.insert(0, {"type": "text", "text": CUT})
            cut = True
        result.append(_message(message, parts, content_format))
    if not developer_role and any(message["role"] == "developer" for message in result):
        result = _one_system([_as_system(message) for message in result])
    return result


def _parts(message: Message, media: str) -> tuple[list[Message], bool]:
    content = message.get("content")
    if content is None:
        return [], False
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise UnknownPrompt("content")
    parts: list[Message] = []
    found = False
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise UnknownPrompt("content")
        made = _part(part, is_system=message.get("role") == "system")
        is_medium = part.get("type") in _MEDIA
        found = found or is_medium
        if made is not None and (media == "keep" or not is_medium):
            parts.append(made)
    return parts, found


def _part(part: Message, *, is_system: bool) -> Message | None:
    """Return what the template gets of a part; None: the engine leaves it out."""
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        text = _text(part, is_system=is_system)
        return None if text is None else {"type": "text", "text": text}
    if kind == _REFERENCE and isinstance(part.get("name"), str):
        return {"type": _REFERENCE, "name": part["name"]}
    if kind in _MEDIA:
        return {"type": _MEDIA[kind]}
    raise UnknownPrompt("content")


def _text(part: Message, *, is_system: bool) -> str | None:
    """Return the text of a part; None: the engine leaves it out."""
    kind = part["type"]
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise UnknownPrompt("content")
    if is_system and kind == "text" and text.startswith(BILLING_HEADER):
        return text.partition("\n")[2] or None
    return text


def _message(message: Message, parts: list[Message], content_format: ContentFormat) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise UnknownPrompt("role")
    result: Message = {"role": role, "content": _content(role, parts, content_format)}
    if role == "assistant":
        result |= _of_assistant(message)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _content(role: str, parts: list[Message], content_format: ContentFormat) -> str | list[Message]:
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if content_format == "string":
        shown = (part.get("text") or part.get("name") for part in parts)
        return "\n".join(text for text in shown if text)
    if role == "tool" and len(texts) == len(parts):
        return "\n".join(texts)
    return parts


def _of_assistant(message: Message) -> Message:
    """Return the fields that only the model's own messages have."""
    result: Message = {}
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    return result


def _tool_call(call: Any) -> Message:
    """Arguments come as JSON text and templates want a mapping. What is none becomes empty."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise UnknownPrompt("tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**{k: v for k, v in message.items() if k != "tools"}, "role": "system"}


def _one_system(messages: list[Message]) -> list[Message]:
    """Merge system messages into one at the front, unless there is only that one."""
    texts = []
    others = []
    for message in messages:
        if message["role"] != "system":
            others.append(message)
            continue
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    systems = len(messages) - len(others)
    if systems == 0 or (systems == 1 and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def tools_for_template(tools: list[Message] | None) -> list[Message] | None:
    """Make the template's tools: the fields in the engine's order, absent ones as None.

    Raises:
        UnknownPrompt: The engine refuses them.
    """
    if tools is None:
        return None
    result = []
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise UnknownPrompt("tools")
        made = {key: function.get(key) for key in ("name", "description", "parameters")}
        defer = tool.get("defer_loading")
        optional = {
            "strict": function.get("strict"),
            "defer_loading": function.get("defer_loading", defer),
        }
        made |= {key: value for key, value in optional.items() if value is not None}
        entry: Message = {"type": "function", "function": made}
        if defer is not None:
            entry["defer_loading"] = defer
        result.append(entry)
    return result


def content_format(template: nodes.Template) -> ContentFormat:
    """Tell the form of content for a parsed template, by vLLM's rule.

    A template that loops over ``message.content`` (under any name, also inside a macro that is
    given it) expects parts; so does one that loops over a variable called ``content`` outside
    macros.
    """
    messages = _loops_over(template, _names_of(template))
    over_content = any(_is_over_content(template, loop, messages) for loop in _fors(template))
    return "openai" if over_content else "string"


def _fors(root: nodes.Node) -> Iterator[nodes.For]:
    return root.find_all(nodes.For)


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Strip filters, tests and slices."""
    while isinstance(node, (nodes.Filter, nodes.Test, nodes.Getitem)):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    node = _bare(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _is_content_of(node: nodes.Node | None, names: set[str]) -> bool:
    node = _bare(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, names)
    if isinstance(node, nodes.Getitem):
        return (
            isinstance(node.arg, nodes.Const)
            and node.arg.value == "content"
            and _is_name(node.node, names)
        )
    return False


def _names_of(template: nodes.Template) -> set[str]:
    """Find the names under which the template knows the messages."""
    names = {"messages"}
    while True:
        more = {
            assign.target.name
            for assign in template.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_name(assign.node, names)
        }
        if more <= names:
            return names
        names |= more


def _loops_over(template: nodes.Template, names: set[str]) -> set[str]:
    """Find the loop variables that hold one message."""
    return {
        loop.target.name
        for loop in _fors(template)
        if isinstance(loop.target, nodes.Name) and _is_name(loop.iter, names)
    }


def _is_over_content(template: nodes.Template, loop: nodes.For, messages: set[str]) -> bool:
    if _is_content_of(loop.iter, messages):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    around = [
        macro
        for macro in template.find_all(nodes.Macro)
        if any(inner is loop for inner in _fors(macro))
    ]
    if not around:
        return loop.iter.name == "content"
    return any(loop.iter.name in _content_arguments(template, macro, messages) for macro in around)


def _content_arguments(
    template: nodes.Template, macro: nodes.Macro, messages: set[str]
) -> set[str]:
    """Find the parameters of a macro that are given a message's content."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given |= {
            name
            for name, value in zip(names, call.args, strict=False)
            if _is_content_of(value, messages)
        }
        given |= {
            keyword.key
            for keyword in call.kwargs
            if isinstance(keyword, nodes.Keyword)
            and keyword.key in names
            and _is_content_of(keyword.value, messages)
        }
    return given


_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError, RuntimeError,
)  # fmt: skip
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
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

    @cached_property
    def wants_one_system(self) -> bool:
        """Whether the template refuses a system message that is not the first, by vLLM's rule.

        Where clients have some in the midst of a conversation, the engine moves them to the front.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        roles = ("system", "user", "system", "user")
        messages = [{"role": role, "content": "t"} for role in roles]
        try:
            trial = environment.from_string(self._source)
            self._joined(trial.generate(messages=messages, add_generation_prompt=False))
        except (UnknownPrompt, *_FAULTS):  # also of functions that vLLM does not define here
            return True
        return False

    @cached_property
    def disabled_effort(self) -> str:
        """The effort of reasoning as which the engine passes on that it is switched off."""
        none = self._of_effort("none")
        is_known = none is not None and none not in map(self._of_effort, _EFFORTS)
        return "none" if is_known else "low"

    def _of_effort(self, effort: str) -> str | None:
        messages = [{"role": "user", "content": "Hi"}]
        try:
            return self.render(ChatBody(messages=messages, reasoning_effort=effort))[0]
        except UnknownPrompt:
            return None

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
        except _FAULTS as error:
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
        return self._joined(self._template.generate(messages=messages, tools=tools, **variables))

    def _joined(self, generated: Iterable[str]) -> str:
        pieces = []
        length = 0
        for piece in generated:
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
