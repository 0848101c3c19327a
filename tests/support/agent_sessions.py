"""Sessions of coding agents: Claude Code's and Codex's requests, and their answers' usage.

`agent_transcripts.json` has the last of 20 requests of a session with either command line
(2.1.332 and 0.171.0), whose model was a script. Texts are made up or shortened. The requests before
were its beginnings, but for the place of the ``cache_control`` marker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRANSCRIPTS = json.loads((Path(__file__).parent / "agent_transcripts.json").read_text())
MESSAGES, RESPONSES = TRANSCRIPTS
ENDS = ("message_delta", "response.completed", "response.incomplete")
ITEMS = {MESSAGES: "messages", RESPONSES: "input"}
"""The field with the conversation."""
OF_THE_MODEL = ("reasoning", "function_call")


def requests_of(target: str) -> list[dict[str, Any]]:
    """Return the bodies of a session, as the client sent them."""
    body = TRANSCRIPTS[target]["body"]
    field = ITEMS[target]
    items = body[field]
    said = [each.get("role") == "assistant" or each.get("type") in OF_THE_MODEL for each in items]
    ends = [i for i in range(1, len(items)) if said[i] and not said[i - 1]]
    made = [json.loads(json.dumps({**body, field: items[:end]})) for end in [*ends, len(items)]]
    if target == MESSAGES:
        for each in made:
            last = each[field][-1]
            if isinstance(last["content"], str):
                last["content"] = [{"type": "text", "text": last["content"]}]
            last["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return made


def session_of(target: str, name: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the headers and the bodies of a session whose user asks for something else."""
    headers, bodies = dict(TRANSCRIPTS[target]["headers"]), requests_of(target)
    for field in headers:
        if "session" in field.lower() or "thread" in field:
            headers[field] = name
    for body in bodies:
        items = body[ITEMS[target]]
        asked = next(item for item in items if item.get("role") == "user")
        asked["content"][-1]["text"] += f" for {name}"
        if "prompt_cache_key" in body:
            body["prompt_cache_key"] = name
    return headers, bodies


def compacted(target: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a client asks once a summary stands for the conversation so far."""
    text = (
        "The session goes on from one that was too long. Summary: the change is made, tests pass."
    )
    if target == MESSAGES:
        reminder = body["messages"][0]["content"][0]
        said = {"role": "user", "content": [reminder, {"type": "text", "text": text}]}
        return {**body, "messages": [said, body["messages"][1]]}  # the second is the system's
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {**body, "input": [*body["input"][:2], said]}


def of_length(target: str, num_tokens: int) -> dict[str, int]:
    """Return the fields that bound an answer."""
    return {"max_tokens" if target == MESSAGES else "max_output_tokens": num_tokens}


def usage_of(target: str, text: str) -> tuple[int, int]:
    """Return how many tokens of the prompt were cached, and all of them, by an answer's usage."""
    if text.startswith("{"):
        last = json.loads(text)
    else:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        last = [each for each in events if each["type"] in ENDS][-1]
    usage = last.get("response", last)["usage"]
    if target == RESPONSES:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    cached = usage["cache_read_input_tokens"]
    return cached, cached + usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
