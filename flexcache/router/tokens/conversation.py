"""Turns the messages of a chat request into what the chat template gets, as vLLM does.

vLLM's chat_utils (0.32) is the source of the rules: a template that loops over a message's content
gets a list of parts ("openai"), any other a string; media become placeholders there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from flexcache.router.tokens.body import UnknownPrompt

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
_BILLING_HEADER = "x-anthropic-billing-header"


def has_media(messages: list[Message]) -> bool:
    """Tell whether any message has a part that is not text."""
    return any(
        isinstance(part, dict) and part.get("type") not in _TEXT_PARTS
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
        kind = part.get("type")
        if kind in _TEXT_PARTS:
            text = part.get(_TEXT_PARTS[kind])
            if text is None and kind in ("text", "refusal"):
                continue
            if not isinstance(text, str):
                raise UnknownPrompt("content")
            if message.get("role") == "system" and text.startswith(_BILLING_HEADER):
                text = text.partition("\n")[2]
                if not text:
                    continue
            parts.append({"type": "text", "text": text})
        elif kind in _MEDIA:
            found = True
            if media == "keep":
                parts.append({"type": _MEDIA[kind]})
        else:
            raise UnknownPrompt("content")
    return parts, found


def _message(message: Message, parts: list[Message], content_format: ContentFormat) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise UnknownPrompt("role")
    content: Any = parts
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if content_format == "string":
        content = "\n".join(text for text in texts if text)
    elif role == "tool" and len(texts) == len(parts):
        content = "\n".join(texts)
    result: Message = {"role": role, "content": content}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            result["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = message.get("tools")
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
