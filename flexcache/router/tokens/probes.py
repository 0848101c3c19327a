"""Requests by which the router compares its tokens with an engine's, before real ones come."""

from __future__ import annotations

from typing import Any

import msgspec

from flexcache.router.tokens.body import CHAT_PATH, COMPLETION_PATH, Kind

_TEXT = (
    "  Ünïcode, 数字 1234567 and\ttabs;\n\n  def f(x):\n      return x ** 2  # 'quoted' \"text\"\n"
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "Oslo"]}},
            "required": ["city"],
        },
    },
}
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": f"An answer. {_TEXT}"},
    {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]},
]
_CHATS = [
    [{"role": "system", "content": f"You are a system.{_TEXT}"}, *_TURNS],
    _TURNS,
    _TURNS[:1],
]


def probes(kind: Kind, model: str) -> tuple[str, list[bytes]]:
    """Make requests of a kind.

    Returns:
        Their path, and bodies, the most telling first. Not every template takes each of them.
    """
    if kind is Kind.COMPLETION:
        return COMPLETION_PATH, [_body(model, prompt=_TEXT)]
    if kind is Kind.CHAT:
        return CHAT_PATH, [_body(model, messages=chat) for chat in _CHATS]
    with_tools = {"tools": [_TOOL], "tool_choice": "none"}
    return CHAT_PATH, [_body(model, messages=chat, **with_tools) for chat in _CHATS]


def _body(model: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": model, "max_tokens": 1, **fields})
