"""Bodies of coding agents' requests: ``/v1/messages`` (Anthropic) and ``/v1/responses`` (OpenAI).

An engine makes a chat of either and goes on as with a chat. The rules are those of vLLM 0.32, in
``entrypoints/anthropic/serving`` and ``entrypoints/openai/responses/utils``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from flexcache.router.chooser import Turn
from flexcache.router.tokens.body import (
    CHARS_PER_TOKEN,
    CHAT_PATH,
    COMPLETION_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TOKENS_PER_MEDIUM,
    Body,
    ChatBody,
    CompletionBody,
    Kind,
    UnknownPrompt,
    check_transfer,
)
from flexcache.router.tokens.template import BILLING_HEADER, ChatTemplate

Item = dict[str, Any]


class MessagesChat(ChatBody):
    """A chat that came as a body of ``/v1/messages``."""

    @property
    def kind(self) -> Kind:
        return Kind.MESSAGES


class ResponsesChat(ChatBody):
    """A chat that came as a body of ``/v1/responses``."""

    @property
    def kind(self) -> Kind:
        return Kind.RESPONSES


class AgentBody(Body, kw_only=True):
    """Fields that both have."""

    tools: list[Item] | None = None
    chat_template_kwargs: Item | None = None
    kv_transfer_params: dict[str, msgspec.Raw] | None = None

    def check_cacheable(self) -> None:
        super().check_cacheable()
        check_transfer(self.kv_transfer_params)

    def as_chat(self, templates: Sequence[ChatTemplate | None]) -> ChatBody:
        """Make the chat that the engine makes of it.

        Args:
            templates: The model's, without and with tools; empty: unknown.

        Raises:
            UnknownPrompt: The engine refuses it, or makes something that is not known here.
        """
        raise NotImplementedError

    def _items(self) -> Iterator[Any]:
        """Yield what a later request of the same conversation begins with, piece by piece."""
        yield self.tools

    def turns(self, seed: int) -> list[Turn]:
        key = xxhash.xxh3_128_digest(repr((self.model, self.cache_salt)).encode(), seed)
        num_tokens, turns = 0, []
        for item in self._items():
            texts, more = _texts(item)
            if texts:
                key = xxhash.xxh3_128_digest(key + "\0".join(texts).encode(errors="replace"), seed)
                num_tokens += more
                turns.append(Turn(key, num_tokens))
        return turns

    def estimate(self, num_bytes: int) -> int:
        return sum(_texts(item)[1] for item in self._items())


_NOT_SAID = frozenset({"type", "id", "status", "cache_control", "annotations", "signature"})
"""Fields that clients change or leave out when they repeat what was said."""
_MEDIA = frozenset(
    {"image", "document", "image_url", "input_image", "input_file", "file", "input_audio"}
)


def _texts(item: Any) -> tuple[list[str], int]:
    """Return all texts in a part of a body, in order, and an estimate of their tokens. Images and
    files are there by their hash."""
    texts: list[str] = []
    num_tokens = 0
    waiting = [item]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            fields = {key: inner for key, inner in value.items() if key not in _NOT_SAID}
            if value.get("type") in _MEDIA:
                texts.append(xxhash.xxh3_128_hexdigest(repr(fields).encode()))
                num_tokens += TOKENS_PER_MEDIUM
            else:
                waiting.extend(reversed(fields.values()))
        elif isinstance(value, list):
            waiting.extend(reversed(value))
        elif isinstance(value, str):
            if value and not value.startswith(BILLING_HEADER):
                texts.append(value)
                num_tokens += len(value) // CHARS_PER_TOKEN + 1
        elif value is not None:
            texts.append(repr(value))
    return texts, num_tokens


def _blocks(content: Any) -> list[Item]:
    """Return content as blocks.

    Raises:
        UnknownPrompt: It is none.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise UnknownPrompt("content")
    return content


def _text_of(block: Item, key: str = "text") -> str:
    """
    Raises:
        UnknownPrompt: It is no text.
    """
    text = block.get(key) or ""
    if not isinstance(text, str):
        raise UnknownPrompt("content")
    return text


# -- /v1/messages ------------------------------------------------------------------------------


class MessagesBody(AgentBody, kw_only=True):
    messages: list[Item]
    system: str | list[Item] | None = None
    thinking: Item | None = None
    output_config: Item | None = None
    metadata: Item | None = None

    def __post_init__(self) -> None:
        user = (self.metadata or {}).get("user_id")  # Claude Code's names the session, too
        self.session_id = self.session_id or (user if isinstance(user, str) else None)

    def as_chat(self, templates: Sequence[ChatTemplate | None]) -> ChatBody:
        known = [each for each in templates if each is not None]
        effort = (self.output_config or {}).get("effort")
        if (self.thinking or {}).get("type") == "disabled":
            effort = known[0].disabled_effort if known else "none"
        one_system = not known or any(each.wants_one_system for each in known)
        return MessagesChat(
            model=self.model,
            cache_salt=self.cache_salt,
            messages=list(self._messages(one_system)),
            tools=self._tools(),
            reasoning_effort=effort,
            chat_template_kwargs=self.chat_template_kwargs,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _items(self) -> Iterator[Any]:
        yield from super()._items()
        yield self.system
        yield from self.messages

    def _messages(self, one_system: bool) -> Iterator[Item]:
        system = self.system or ""
        if not isinstance(system, str):
            system = _system_text(system)
        inline = [_system_text(each.get("content")) for each in self.messages if _is_system(each)]
        if one_system:
            system += "".join(inline)
        if system:
            yield {"role": "system", "content": system}
        for message in self.messages:
            if not _is_system(message):
                yield from _converted(message)
            elif not one_system and (text := _system_text(message.get("content"))):
                yield {"role": "system", "content": text}

    def _tools(self) -> list[Item] | None:
        """Return the tools that hold at the conversation's end."""
        changes = list(_tool_changes(self.messages))
        if not changes:
            return None if self.tools is None else [_tool(tool) for tool in self.tools]
        tools = {_name(tool): tool for tool in self.tools or ()}
        removed: set[str] = set()
        for block in changes:
            _change(tools, removed, block)
        return [_tool(tool) for name, tool in tools.items() if name not in removed]


def _tool_changes(messages: list[Item]) -> Iterator[Item]:
    for message in filter(_is_system, messages):
        content = message.get("content")
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") in ("tool_addition", "tool_removal"):
                yield block


def _change(tools: dict[str, Item], removed: set[str], block: Item) -> None:
    change = block.get("tool")
    if not isinstance(change, dict):
        raise UnknownPrompt("tools")
    if change.get("type") == "tool_definition":
        name = _name(change.get("definition"))
        tools[name] = change["definition"]
    else:
        name = _name(change)
        if name not in tools:
            raise UnknownPrompt("tools")
        if block["type"] == "tool_addition":
            tools[name] = {**tools[name], "defer_loading": None}
    (removed.add if block["type"] == "tool_removal" else removed.discard)(name)


def _is_system(message: Item) -> bool:
    return message.get("role") == "system"


def _system_text(content: Any) -> str:
    """Return the text of a system message without the line by which a client bills itself."""
    texts = (_text_of(block) for block in _blocks(content) if block.get("type") == "text")
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _converted(message: Item) -> Iterator[Item]:
    """Yield the chat's messages for one: results of tools become messages before it.

    Raises:
        UnknownPrompt: The engine refuses it.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise UnknownPrompt("role")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    made: Item = {"role": role}
    parts: list[Item] = []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            yield from _results(block)
        else:
            parts += _part(block, made)
    if len(parts) == 1 and parts[0]["type"] == "text":
        made["content"] = parts[0]["text"]
    elif parts:
        made["content"] = parts
    if role == "assistant" or parts:
        yield made


def _part(block: Item, made: Item) -> list[Item]:
    """Return the chat's part for a block; there is none for what has a field of its own.

    Args:
        made: The message that gets such fields.
    """
    kind = block.get("type")
    if kind == "tool_use":
        call = _call(block.get("id"), block.get("name", ""), block.get("input") or {})
        made.setdefault("tool_calls", []).append(call)
        return []
    if kind == "thinking":
        made["reasoning"] = made.get("reasoning", "") + _text_of(block, "thinking")
        return []
    if kind == "text":
        return [{"type": "text", "text": text}] if (text := _text_of(block)) else []
    if kind == "image":
        return [{"type": "image_url"}] if block.get("source") else []
    if kind == "tool_result":  # in a message of the assistant
        result = block.get("content")
        return [{"type": "text", "text": f"Tool result: {result or ''}"}]
    if kind in ("redacted_thinking", "tool_reference"):
        return []
    raise UnknownPrompt("content")


def _results(block: Item) -> Iterator[Item]:
    """Yield the messages for a tool's result: its texts, images and references, each in one."""
    asked = block.get("tool_use_id") or ""
    items = _blocks(block.get("content") or "")
    texts = [_text_of(item) for item in items if item.get("type") == "text"]
    yield {"role": "tool", "tool_call_id": asked, "content": "\n".join(texts)}
    if images := [{"type": "image_url"} for item in items if _has_image(item)]:
        yield {"role": "user", "content": images}
    if references := list(_references(items)):
        yield {"role": "tool", "tool_call_id": asked, "content": references}


def _references(items: list[Item]) -> Iterator[Item]:
    for item in items:
        name = item.get("tool_name") or item.get("name")
        if item.get("type") == "tool_reference" and name:
            yield {"type": "tool_reference", "name": name}


def _has_image(item: Item) -> bool:
    source = item.get("source")
    is_empty = isinstance(source, dict) and source.get("type") == "url" and not source.get("url")
    return item.get("type") == "image" and not is_empty


def _call(name_of_call: Any, name: Any, arguments: Any) -> Item:
    if not isinstance(name_of_call, str) or not name_of_call:
        raise UnknownPrompt("tool_calls")  # the engine makes a name of the time
    function = {"name": name, "arguments": arguments}
    return {"id": name_of_call, "type": "function", "function": function}


def _name(tool: Any) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        raise UnknownPrompt("tools")
    return name


def _tool(tool: Item) -> Item:
    """Return a tool in a chat's form."""
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise UnknownPrompt("tools")
    function = {
        "name": _name(tool),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


# -- /v1/responses -----------------------------------------------------------------------------

_CUSTOM_INPUT = "input"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {
        _CUSTOM_INPUT: {
            "type": "string",
            "description": "The freeform text payload for this tool.",
        }
    },
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}
"""Parameters of the function as which a model sees a tool that takes free text."""
_OPEN = ("in_progress", "incomplete")


class ResponsesBody(AgentBody, kw_only=True):
    input: str | list[Item]
    instructions: str | None = None
    reasoning: Item | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        self.session_id = self.session_id or self.prompt_cache_key

    def check_cacheable(self) -> None:
        super().check_cacheable()
        if self.truncation not in (None, "disabled"):
            raise UnknownPrompt("truncated")
        if self.previous_response_id is not None:
            raise UnknownPrompt("previous_response_id")

    def as_chat(self, templates: Sequence[ChatTemplate | None]) -> ChatBody:
        items = self.input if isinstance(self.input, list) else []
        last = items[-1] if items else {}
        is_open = last.get("type", "message") in ("message", "reasoning")
        is_open = is_open and last.get("status") in _OPEN
        return ResponsesChat(
            model=self.model,
            cache_salt=self.cache_salt,
            messages=self._messages(),
            tools=self._tools(),
            reasoning_effort=(self.reasoning or {}).get("effort"),
            add_generation_prompt=not is_open,
            continue_final_message=is_open,
            add_special_tokens=True,  # unlike for chats
            chat_template_kwargs=self.chat_template_kwargs,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _items(self) -> Iterator[Any]:
        yield from super()._items()
        yield self.instructions
        yield from self.input if isinstance(self.input, list) else [self.input]

    def _messages(self) -> list[Item]:
        messages: list[Item] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        made: list[Item] = []  # what stands before is not gone on with
        for item in self.input:
            _add_item(made, item)
        return messages + made

    def _tools(self) -> list[Item] | None:
        if not self.tools:
            return None
        tools: list[Item] = []
        for tool in self.tools:
            kind = tool.get("type")
            if kind == "function":
                tools.append(_function(tool, _name(tool)))
            elif kind == "custom":
                custom = {**tool, "parameters": _CUSTOM_PARAMETERS, "strict": None}
                tools.append(_function(custom, _name(tool)))
            elif kind == "namespace":
                tools += [
                    _function(each, f"{_name(tool)}__{_name(each)}")
                    for each in tool.get("tools") or ()
                    if isinstance(each, dict) and each.get("type") == "function"
                ]
        return tools


def _function(tool: Item, name: str) -> Item:
    fields = ("description", "parameters", "strict", "defer_loading")
    return {
        "type": "function",
        "function": {"name": name, **{key: tool.get(key) for key in fields}},
    }


def _add_item(messages: list[Item], item: Item) -> None:
    """Add the message for an item, or go on with the assistant's last one.

    Raises:
        UnknownPrompt: The engine refuses it.
    """
    kind = item.get("type")
    before = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call_of_item(item)
        if before is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            before.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        _add(messages, before, "reasoning", _reasoning(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
    elif kind in (None, "message") and item.get("role") == "assistant":
        _add(messages, before, "content", _said(item.get("content")))
    elif kind in (None, "message") and item.get("role") in ("user", "system", "developer"):
        messages.append(item)
    else:
        raise UnknownPrompt("input")


def _said(content: Any) -> str:
    """Return the text of an assistant's message, of which the engine keeps the first part."""
    if isinstance(content, list):
        content = content[0].get("text") if content and isinstance(content[0], dict) else None
    if not isinstance(content, str):
        raise UnknownPrompt("content")
    return content


def _add(messages: list[Item], before: Item | None, field: str, text: str) -> None:
    if before is not None and before.get(field) is None:
        before[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _call_of_item(item: Item) -> Item:
    name, asked = item.get("name"), item.get("call_id")
    if item["type"] == "custom_tool_call":
        return _call(asked, name, {_CUSTOM_INPUT: item.get("input") or ""})
    if not isinstance(item.get("arguments"), str):
        raise UnknownPrompt("tool_calls")
    if item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    return _call(asked, name, item["arguments"])


def _reasoning(item: Item) -> str:
    if item.get("encrypted_content"):
        raise UnknownPrompt("encrypted")
    for texts in (item.get("content"), item.get("summary")):
        if texts:
            first = texts[0] if isinstance(texts, list) and isinstance(texts[0], dict) else {}
            text = first.get("text")
            if not isinstance(text, str):
                raise UnknownPrompt("content")
            return text
    return ""


_DECODERS: dict[str, Callable[[bytes], Body]] = {
    COMPLETION_PATH: msgspec.json.Decoder(CompletionBody).decode,
    CHAT_PATH: msgspec.json.Decoder(ChatBody).decode,
    MESSAGES_PATH: msgspec.json.Decoder(MessagesBody).decode,
    RESPONSES_PATH: msgspec.json.Decoder(ResponsesBody).decode,
}
_decode_any = msgspec.json.Decoder(Body).decode


def read_body(path: str, raw: bytes) -> Body:
    """Read the body of any request.

    Raises:
        msgspec.DecodeError: It is no JSON object, or not what the path wants.
    """
    return _DECODERS.get(path, _decode_any)(raw)
