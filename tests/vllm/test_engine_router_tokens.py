"""The router makes the tokens that vLLM makes, and notices where it would not."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_server import ApiServer, serving
from engines import FLEXCACHE
from make_tokenizers import ask_for_models, make_tokenizer
from paths import MODELS
from predictions import Predictions, predicting

aiohttp = pytest.importorskip("aiohttp")

from flexcache.router.chooser import Arrival, RouteRequest  # noqa: E402
from flexcache.router.fleet import EventSource  # noqa: E402
from flexcache.router.tokens import Tokenizers, TokenLimits  # noqa: E402
from flexcache.router.tokens.template import content_format  # noqa: E402

pytestmark = pytest.mark.whole


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PIECES = (
    "<|im_start|>", "<|im_end|>", "<|im_start|>x", "<|im", "<think>", "<|eot_id|>", " ", "  ", "\n",
    "\n\n", "\t", "\u00a0", "block", " cache has", "7", "123", "ü", "数字", "🙂", "\u0301",
    "{{ x }}", '"', "'s", "",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Löök <up>", "parameters": {"type": "object"}},
    },
    {
        "type": "function",
        "function": {"name": "b", "strict": True, "extra": 1},
        "defer_loading": True,
    },
]


@pytest.fixture(scope="module", params=["chatml", "headers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers"), request.param)


@pytest.fixture(scope="module")
def server(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Run a server, one of the two without ``/render``, as is usual."""
    from make_models import make_model

    make_model(MODELS, "tiny")
    log = tmp_path_factory.mktemp("server") / "log"
    scale_out = ["--enable-scale-out"] if tokenizer.name == "chatml" else []
    made = ApiServer(log, arguments=["--tokenizer", str(tokenizer), *scale_out])
    with serving(made):
        yield made


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(8)))


def _message(rng: random.Random, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _text(rng)}
    if rng.random() < 0.3:
        message["content"] = [{"type": "text", "text": _text(rng)} for _ in range(rng.randrange(3))]
    if rng.random() < 0.2:
        message["name"] = "Ada"
    if role == "assistant" and rng.random() < 0.4:
        arguments = rng.choice(['{"b": "ü <x>", "a": [1, 2.5, null]}', "", "no JSON", "[1]"])
        function = {"name": "look", "arguments": arguments}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        if rng.random() < 0.3:
            message["content"] = None
    if role == "assistant" and rng.random() < 0.3:
        message[rng.choice(["reasoning", "reasoning_content"])] = _text(rng)
    if role == "tool":
        message["tool_call_id"] = "c1"
    return message


def make_chat(rng: random.Random) -> dict[str, Any]:
    """Make the body of a request with the oddities that vLLM smooths out."""
    first = rng.choice([[], ["system"], ["developer"], ["system", "system"]])
    roles = [*first, "user"]
    for _ in range(rng.randrange(3)):
        roles += ["assistant", *rng.choice([["tool"], []]), "user"]
    body: dict[str, Any] = {"messages": [_message(rng, role) for role in roles], "max_tokens": 1}
    for field, values in {
        "tools": [TOOLS],
        "chat_template_kwargs": [{"enable_thinking": False}, {"date_string": "today"}, {"x": 1}],
        "reasoning_effort": ["none", "high"],
        "add_special_tokens": [True],
        "add_generation_prompt": [False],
        "documents": [[{"title": "t", "text": "x"}]],
        "n": [2],
        "cache_salt": ["salt"],
    }.items():
        if rng.random() < 0.2:
            body[field] = rng.choice(values)
    if "tools" in body:
        body["tool_choice"] = "none"
    if rng.random() < 0.1:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body


async def computed(
    session: Any, server: ApiServer, path: str, body: dict[str, Any]
) -> list[int] | None:
    """Return the tokens that the engine computes; None: it refuses the request."""
    asked = {**body, "max_tokens": 1, "return_token_ids": True}
    async with session.post(f"{server.url}{path}", json=asked) as answer:
        content = await answer.json()
        if answer.status != 200:
            assert answer.status == 400, content
            return None
        holder = content["choices"][0] if path == COMPLETIONS else content
        ids: list[int] = holder["prompt_token_ids"]
        return ids


async def read(readers: Tokenizers, path: str, body: dict[str, Any]) -> RouteRequest:
    raw = json.dumps(body).encode()
    request = await readers.read(Arrival(request_id="r", method="POST", path=path, body=raw))
    readers.check()
    return request


def test_chats_and_texts_become_the_engines_tokens(server: ApiServer, tokenizer: Path) -> None:
    async def main() -> None:
        rng = random.Random(tokenizer.name)
        readers = Tokenizers(tokenizer=str(tokenizer))
        await ask_for_models(readers, server.url)
        refused = 0
        async with aiohttp.ClientSession() as session:
            for i in range(150):
                path, body = CHAT, make_chat(rng)
                if i % 5 == 0:
                    text = _text(rng) + "x"
                    body = {"prompt": rng.choice([text, [text]]), "add_special_tokens": i % 2 == 0}
                    path = COMPLETIONS
                theirs = await computed(session, server, path, body)
                request = await read(readers, path, body)
                if theirs is None:
                    refused += 1
                    continue
                assert request.token_ids is not None, (body, readers.stats().unknown)
                assert list(request.token_ids) == theirs, body
                assert request.num_tokens == len(theirs)
        assert refused < 75
        stats = readers.stats()
        assert stats.checks and not stats.mismatches, stats
        await readers.close()

    asyncio.run(main())


def test_a_generating_request_has_the_tokens_that_were_rendered(
    server: ApiServer, tokenizer: Path
) -> None:
    async def main() -> None:
        readers = Tokenizers(tokenizer=str(tokenizer))
        await ask_for_models(readers, server.url)
        cached = []
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "block of a prompt " * 60}],
            "max_tokens": 4, "return_token_ids": True, "model": server.model,
            "cache_salt": "new",
        }  # fmt: skip
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(f"{server.url}{CHAT}", json=body) as response:
                    answer = await response.json()
                request = await read(readers, CHAT, body)
                assert request.token_ids is not None
                assert list(request.token_ids) == answer["prompt_token_ids"]
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] > len(request.token_ids) - 2 * 32
        await readers.close()

    asyncio.run(main())


def test_routers_that_come_later_expect_of_chats_what_the_engine_finds(tmp_path: Path) -> None:
    """Chats with tools and a date. One router is there from the beginning, one is restarted midway,
    and one has no replay: the parents of the blocks that it hears of are unknown to it."""
    tokenizer = make_tokenizer(tmp_path, "chatml")
    dated = tokenizer / "tokenizer_config.json"
    config = json.loads(dated.read_text())
    config["chat_template"] = "{{ strftime_now('%d %B %Y') }}" + config["chat_template"]
    dated.write_text(json.dumps(config))
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("kv", "again"))
    made = ApiServer(
        tmp_path / "log", arguments=["--tokenizer", str(tokenizer)],
        transfer={**FLEXCACHE, "kv_connector_extra_config": {"cpu_cache_gb": 0.05}},
        kv_events={"endpoint": events, "replay_endpoint": replay},
    )  # fmt: skip
    source = EventSource(events, replay)
    messages = [{"role": "user", "content": "block of a prompt " * 40}]

    async def main() -> None:
        readers = Tokenizers(tokenizer=str(tokenizer))
        await ask_for_models(readers, made.url)
        asked: list[int] = []

        async def turn(*routers: Predictions) -> list[int]:
            """Ask on. Return the tokens that each router expects to be found, then those found."""
            for router in routers:
                await router.come_to((len(asked) - 1) // 32 * 32 if asked else 0, "engine", asked)
            body = {
                "messages": messages, "max_tokens": 1, "temperature": 0, "tools": TOOLS[:1],
                "tool_choice": "none", "model": made.model,
            }  # fmt: skip
            asked[:] = map(int, (await read(readers, CHAT, body)).token_ids)  # type: ignore[arg-type]
            expected = [router.total("engine", asked) for router in routers]
            async with session.post(f"{made.url}{CHAT}", json=body) as response:
                answer = await response.json()
            said = answer["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"and tier {len(messages)} " * 20})
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(asked)
            return [*expected, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0]

        async with aiohttp.ClientSession() as session, predicting(engine=(source,)) as first:
            assert await turn(first) == [0, 0]
            expected, found = await turn(first)
            assert expected == found > 0
            async with predicting(engine=(EventSource(events, None),)) as deaf:
                for _ in range(2):
                    async with predicting(engine=(source,)) as restarted:
                        one, other, found = await turn(first, restarted)
                        assert one == other == found > 0
                assert deaf.total("engine", asked) == 0
        await readers.close()

    with serving(made):
        asyncio.run(main())


def test_another_tokenizer_than_the_engines_is_noticed(server: ApiServer) -> None:
    async def main() -> None:
        readers = Tokenizers(limits=TokenLimits(render_deadline_s=60))
        await ask_for_models(readers, server.url)
        # The model's directory has a tokenizer, which the engine does not use.
        async with aiohttp.ClientSession() as session:
            for kind, path, body in (
                ("completion", COMPLETIONS, {"prompt": "block of ü"}),
                ("chat", CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                name = f"{server.model} {kind}"
                while readers.stats().models[name] != "render":
                    await read(readers, path, body)
                    await asyncio.sleep(0.05)
                why = "differs from the engine" if kind == "completion" else "no chat template here"
                assert readers.stats().reasons[name] == why
                request = await read(readers, path, body)
                assert request.token_ids is not None
                assert list(request.token_ids) == await computed(session, server, path, body)
        await readers.close()

    asyncio.run(main())


def test_the_form_of_content_is_detected_as_in_vllm() -> None:
    import jinja2
    import jinja2.ext
    import vllm
    from vllm.renderers.hf import _detect_content_format

    sources = [path.read_text() for path in Path(vllm.__file__).parent.rglob("*.jinja")]
    loops = ("messages", "messages[1:]", "loop_messages", "messages | list", "other")
    contents = (
        "message.content",
        "message['content']",
        "content",
        "message.content | list",
        "x.content",
    )
    sources += [
        f"{{% set loop_messages = messages %}}{{% for message in {loop} %}}"
        f"{{% for part in {content} %}}{{% endfor %}}{{% endfor %}}"
        for loop in loops
        for content in contents
    ]
    sources += [
        "{% macro show(body) %}{% for part in body %}{% endfor %}{% endmacro %}"
        "{% for message in messages %}{{ show(" + argument + ") }}{% endfor %}"
        for argument in ("message.content", "body=message['content']", "message.role", "1")
    ]
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    for source in sources:
        expected = _detect_content_format(source, default="string")
        assert content_format(environment.parse(source)) == expected, source


def test_the_engine_lists_its_model_and_where_it_is(server: ApiServer) -> None:
    async def main() -> None:
        readers = Tokenizers(limits=TokenLimits(render_deadline_s=60))
        await ask_for_models(readers, server.url)
        assert {name.split()[0] for name in readers.stats().models} == {server.model}
        request = await read(readers, COMPLETIONS, {"prompt": [5, 6], "model": server.model})
        assert request.token_ids is not None and np.asarray(request.token_ids).tolist() == [5, 6]
        await readers.close()

    asyncio.run(main())
