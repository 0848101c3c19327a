"""Bodies of ``/v1/messages`` and ``/v1/responses`` become the tokens that vLLM renders.

vLLM's renderer is asked in this process, without an engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from make_models import make_model
from make_tokenizers import make_tokenizer
from paths import MODELS

pytest.importorskip("aiohttp")

from flexcache.router.chooser import Arrival
from flexcache.router.tokens import Tokenizers

Body = dict[str, Any]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NUM_BODIES = 120
TEXTS = (
    "",
    "x",
    "block\n\n",
    "<|im_end|>",
    " cache has ",
    "数字 🙂",
    "x-anthropic-billing-header: 1",
)
ONE_SYSTEM = (
    "{%- for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message') }}{% endif %}{% endfor -%}"
)
"""As Qwen's templates begin."""
REFERENCES = (
    "{%- for message in messages if message.content is not string %}"
    "{%- for part in message.content %}{{ part.type + (part.name or part.text or '') }}"
    "{%- endfor %}{%- endfor %}"
)
"""A template that wants parts, and shows references to tools."""


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randrange(1, 4)))


def _some(rng: random.Random, *makers: Callable[[], Body], most: int = 3) -> list[Body]:
    return [rng.choice(makers)() for _ in range(rng.randrange(most + 1))]


# -- bodies ----------------------------------------------------------------------------------------


def _text_block(rng: random.Random) -> Body:
    block = {"type": "text", "text": _text(rng)}
    return block | ({"cache_control": {"type": "ephemeral"}} if rng.random() < 0.3 else {})


def _tool_result(rng: random.Random) -> Body:
    content: Any = rng.choice([_text(rng), [_text_block(rng), _text_block(rng)], [], None])
    if rng.random() < 0.2:
        content = [_text_block(rng), {"type": "tool_reference", "tool_name": "look"}]
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    return block | ({"is_error": True} if rng.random() < 0.2 else {})


def _agent_message(rng: random.Random, role: str) -> Body:
    if rng.random() < 0.3:
        return {"role": role, "content": _text(rng)}
    if role == "system":
        return {"role": role, "content": [_text_block(rng), _text_block(rng)]}
    if role == "user":
        makers = [lambda: _text_block(rng), lambda: _tool_result(rng)]
    else:
        arguments = rng.choice([{}, {"b": "ü <x>", "a": [1, 2.5, None]}])
        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": arguments}
        thought = {"type": "thinking", "thinking": _text(rng), "signature": "s"}
        redacted = {"type": "redacted_thinking", "data": "eA=="}
        blocks = (call, thought, redacted, _tool_result(rng))
        makers = [lambda: _text_block(rng), *(lambda block=block: block for block in blocks)]
    return {"role": role, "content": _some(rng, *makers)}


def _agent_tool(name: str, **more: Any) -> Body:
    return {"name": name, "description": "Löök <up>", "input_schema": {"properties": {}}, **more}


def make_messages(rng: random.Random) -> Body:
    """Make a body as Claude Code and others send them."""
    roles = ["user"]
    for _ in range(rng.randrange(4)):
        roles += [*rng.choice([[], ["system"]]), "assistant", "user"]
    body: Body = {
        "model": "tiny", "max_tokens": 4096,
        "messages": [_agent_message(rng, role) for role in roles],
    }  # fmt: skip
    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": _agent_tool("new", strict=True)},
        },
    ]
    tools = [_agent_tool("look"), _agent_tool("late", defer_loading=True)]
    for field, values in {
        "system": [_text(rng), [_text_block(rng), _text_block(rng)]],
        "tools": [tools, []],
        "thinking": [{"type": "disabled"}, {"type": "adaptive"},
                     {"type": "enabled", "budget_tokens": 1024}],
        "output_config": [{"effort": "high"}],
        "chat_template_kwargs": [{"enable_thinking": False}],
        "metadata": [{"user_id": "u"}],
        "cache_salt": ["salt"],
    }.items():  # fmt: skip
        if rng.random() < 0.3:
            body[field] = rng.choice(values)
    if body.get("tools") and rng.random() < 0.4:
        body["messages"].insert(1, {"role": "system", "content": _some(rng, *map(_maker, changes))})
    return body


def _maker(block: Body) -> Callable[[], Body]:
    return lambda: dict(block)


def _input_item(rng: random.Random) -> Body:
    role = rng.choice(["user", "developer", "system"])
    parts = [{"type": "input_text", "text": _text(rng)} for _ in range(rng.randrange(1, 3))]
    said = [{"type": "output_text", "text": _text(rng)} for _ in range(rng.randrange(1, 3))]
    thought = rng.choice([
        {"content": [{"type": "reasoning_text", "text": _text(rng)}], "summary": []},
        {"summary": [{"type": "summary_text", "text": _text(rng)}]},
        {"summary": [], "encrypted_content": None},
    ])  # fmt: skip
    call = {"type": "function_call", "call_id": "call_1", "name": "look"}
    return rng.choice([
        {"type": "message", "role": role, "content": parts, "id": "msg_1"},
        {"role": role, "content": _text(rng)},
        {"role": "assistant", "content": _text(rng)},
        {"type": "message", "role": "assistant", "content": said},
        {"type": "message", "role": "assistant", "content": said, "status": "completed"},
        {"type": "reasoning", "id": "rs_1", **thought},
        {**call, "arguments": rng.choice(['{"a": [1, "ü"]}', "", "[]"]), "id": "fc_1"},
        {**call, "arguments": "{}", "namespace": "far"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": _text(rng)},
        {"type": "function_call_output", "call_id": "call_1", "output": _text(rng)},
        {"type": "function_call_output", "call_id": "call_1", "output": parts},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": _text(rng)},
    ])  # fmt: skip


def make_responses(rng: random.Random) -> Body:
    """Make a body as Codex and others send them."""
    function = {
        "type": "function", "name": "look", "description": "Löök <up>", "strict": False,
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }  # fmt: skip
    tools = [
        function,
        {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}},
        {"type": "namespace", "name": "far", "description": "f", "tools": [function]},
        {"type": "web_search", "external_web_access": False},
    ]
    items = [_input_item(rng) for _ in range(rng.randrange(1, 7))]
    body: Body = {"model": "tiny", "input": rng.choice([_text(rng), items, items, items])}
    for field, values in {
        "instructions": [_text(rng)],
        "tools": [tools, tools[3:], []],
        "reasoning": [{"effort": "none"}, {"effort": "high"}, {"summary": "auto"}],
        "chat_template_kwargs": [{"enable_thinking": False}],
        "store": [False],
        "cache_salt": ["salt"],
        "prompt_cache_key": ["key"],
    }.items():
        if rng.random() < 0.4:
            body[field] = rng.choice(values)
    if rng.random() < 0.1:
        last = {"type": "output_text", "text": "go on", "annotations": []}
        body["input"] = [
            {"role": "user", "content": "x"},
            {"type": "message", "role": "assistant", "content": [last], "status": "incomplete"},
        ]
    return body


# -- the engine's --------------------------------------------------------------------------------


def make_renderer(tokenizer: Path) -> Callable[[str, Body], Awaitable[list[int] | None]]:
    """Return a function that has vLLM render a body; None: it refuses it."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    arguments = AsyncEngineArgs(str(MODELS / "tiny"), tokenizer=str(tokenizer), max_model_len=4096)
    model = arguments.create_model_config()
    paths = [BaseModelPath(name="tiny", model_path=str(MODELS / "tiny"))]
    renderer = OnlineRenderer(
        model_config=model,
        renderer=renderer_from_config(VllmConfig(model_config=model)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    serving = ServingRender(OpenAIModelRegistry(model, paths), renderer)

    async def render(path: str, body: Body) -> list[int] | None:
        try:
            if path == MESSAGES:
                asked = AnthropicMessagesRequest(**body)
                rendered = await serving.render_messages_request(asked)
            else:
                rendered = await serving.render_responses_request(ResponsesRequest(**body))
        except (VLLMValidationError, ValueError, AttributeError, TypeError, LookupError):
            return None
        ids: list[int] | None = getattr(rendered, "token_ids", None)
        return ids

    return render


@pytest.mark.parametrize("prefix", ["", ONE_SYSTEM, REFERENCES], ids=["chatml", "one", "parts"])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_bodies_of_agents_become_the_engines_tokens(path: str, prefix: str, tmp_path: Path) -> None:
    make_model(MODELS, "tiny")
    tokenizer = make_tokenizer(tmp_path, "headers" if prefix == REFERENCES else "chatml")
    name = "chat_template.jinja" if prefix == REFERENCES else "tokenizer_config.json"
    if prefix == REFERENCES:
        (tokenizer / name).write_text(prefix + (tokenizer / name).read_text())
    else:
        config = json.loads((tokenizer / name).read_text())
        config["chat_template"] = prefix + config["chat_template"]
        (tokenizer / name).write_text(json.dumps(config))
    render = make_renderer(tokenizer)

    async def main() -> None:
        rng = random.Random(f"{path} {prefix}")
        readers = Tokenizers(tokenizer=str(tokenizer))
        await readers.start()
        refused = unknown = 0
        for _ in range(NUM_BODIES):
            body = (make_messages if path == MESSAGES else make_responses)(rng)
            raw = json.dumps(body).encode()
            theirs = await render(path, json.loads(raw))
            arrival = Arrival(request_id="r", method="POST", path=f"{path}?beta=true", body=raw)
            request = await readers.read(arrival)
            if theirs is None:
                refused += 1
            elif request.token_ids is None:
                unknown += 1
                assert request.turns, body
            else:
                assert list(request.token_ids) == theirs, body
                assert request.num_tokens == len(theirs) and not request.turns
        assert refused < NUM_BODIES // 3, refused
        assert unknown == 0, readers.stats().unknown
        await readers.close()

    asyncio.run(main())
