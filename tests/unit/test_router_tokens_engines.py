"""Tokens are compared with engines', and engines are asked where the router's own would differ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from make_tokenizers import make_tokenizer

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("jinja2")
from aiohttp import web  # noqa: E402

from flexcache.router.chooser import Arrival, RouteRequest  # noqa: E402
from flexcache.router.fleet import ModelCard  # noqa: E402
from flexcache.router.tokens import Tokenizers, TokenLimits  # noqa: E402
from flexcache.router.tokens.body import Kind  # noqa: E402
from flexcache.router.tokens.local import TokenMemo  # noqa: E402
from flexcache.router.tokens.models import AGREEMENTS_TO_RETURN, TokenWay, Ways  # noqa: E402

CHAT = "/v1/chat/completions"


class FakeEngine:
    """Renders with a router's own tokenizer.

    Attributes:
        cards: What it serves.
        shift: Added to every token id: 0 renders as the router does.
        has_render: Otherwise 403, as vLLM answers without ``--enable-scale-out``.
        has_tokenize: Otherwise 404.
        gate: Renders wait for it.
        seen: Bodies that were to be rendered.
        keys: Authorization headers that came.
    """

    def __init__(self, root: str, adapters: tuple[str, ...] = (), name: str = "m") -> None:
        self.cards = [ModelCard(name, root)]
        self.cards += [ModelCard(each, f"/lora/{each}", name) for each in adapters]
        self.shift = 0
        self.has_render = True
        self.has_tokenize = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""

    @asynccontextmanager
    async def serving(self, tokenizer: str) -> AsyncIterator[FakeEngine]:
        self._own = Tokenizers(tokenizer=tokenizer)
        await self._own.start()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/{path:.*}/render", self._render)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield self
        self.gate.set()
        await runner.cleanup()
        await self._own.close()

    async def _render(self, request: web.Request) -> web.Response:
        if not self.has_render:
            await self._note(request)
            return web.json_response({"error": {}}, status=403)
        path = "/" + request.match_info["path"]
        ids = await self._ids(path, request)
        if ids is None:
            return web.json_response({"error": {}}, status=400)
        one = {"request_id": "x", "token_ids": ids, "sampling_params": {}, "features": None}
        return web.json_response([one] if path.endswith("/v1/completions") else one)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.has_tokenize:
            await self._note(request)
            return web.json_response({"detail": "Not Found"}, status=404)
        path = CHAT if "messages" in await request.json() else "/v1/completions"
        ids = await self._ids(path, request)
        if ids is None:
            return web.json_response({"error": {}}, status=400)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 1})

    async def _note(self, request: web.Request) -> bytes:
        self.keys.add(request.headers.get("authorization"))
        raw = await request.read()
        self.seen.append(json.loads(raw))
        await self.gate.wait()
        return raw

    async def _ids(self, path: str, request: web.Request) -> list[int] | None:
        raw = await self._note(request)
        own = await self._own.read(Arrival(request_id="r", method="POST", path=path, body=raw))
        if own.token_ids is None:
            return None
        return [int(i) + self.shift for i in own.token_ids]


Scenario = Callable[[FakeEngine, Tokenizers], Awaitable[None]]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(make_tokenizer(tmp_path, "chatml"))


def run(source: str, scenario: Scenario, *, root: str = "/nowhere", tokenizer: str | None = None,
        adapters: tuple[str, ...] = (), **limits: Any) -> None:  # fmt: skip
    """Run a scenario with one engine and a router's readers.

    Args:
        source: Tokenizer that the engine uses.
        root: Where the engine says that its model is.
        tokenizer: What the router is given.
    """

    async def main() -> None:
        async with FakeEngine(root, adapters).serving(source) as engine:
            readers = Tokenizers(
                tokenizer=tokenizer, headers={"authorization": "Bearer secret"},
                limits=TokenLimits(**limits),
            )  # fmt: skip
            readers.set_cards(engine.url, engine.cards)
            await readers.start()
            try:
                await scenario(engine, readers)
            finally:
                await readers.close()

    asyncio.run(main())


async def read(readers: Tokenizers, path: str = CHAT, **body: Any) -> RouteRequest:
    raw = json.dumps(body).encode()
    request = await readers.read(Arrival(request_id="r", method="POST", path=path, body=raw))
    readers.check()
    return request


async def compared(readers: Tokenizers, checks: int) -> None:
    while readers.stats().checks < checks:
        await asyncio.sleep(0.005)


def says(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_the_model_that_the_engine_reports_is_used_and_its_first_prompts_are_compared(
    source: str,
) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        stats = readers.stats()
        assert stats.models == {f"m {kind.value}": "local" for kind in Kind}
        assert set(stats.reasons.values()) == {"unchecked"}
        request = await read(readers, messages=says("hi"), model="m")
        assert request.token_ids is not None
        assert (request.model, request.adapter) == ("m", None)
        await compared(readers, 1)
        await read(readers, "/v1/completions", prompt="hello", model="m")
        await compared(readers, 2)
        await read(readers, "/v1/messages", messages=says("hi"), model="m")
        await compared(readers, 3)
        stats = readers.stats()
        assert stats.requests["local"] == 3 and stats.mismatches == 0
        assert stats.reasons == {
            "m completion": "checked", "m chat": "checked", "m tools": "unchecked",
            "m messages": "checked", "m responses": "unchecked",
        }  # fmt: skip
        assert engine.keys == {"Bearer secret"}
        assert all(body["mm_payload"] == "none" for body in engine.seen)
        await read(readers, messages=says("hi"), model="m")
        assert len(engine.seen) == 3, "once in a while"

    run(source, scenario, root=source)


def test_adapters_are_told_from_models(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        assert (await read(readers, messages=says("hi"), model="lora")).adapter == "lora"
        assert (await read(readers, messages=says("hi"), model="m")).adapter is None
        assert (await read(readers, messages=says("hi"))).adapter is None
        # Loaded a moment ago, perhaps: must not be taken for the model itself.
        assert (await read(readers, messages=says("hi"), model="newer")).adapter == "newer"

    run(source, scenario, root=source, adapters=("lora",))


def test_models_are_told_apart(source: str, tmp_path: Path) -> None:
    other_source = str(make_tokenizer(tmp_path, "headers"))

    async def main() -> None:
        one, two = FakeEngine(source), FakeEngine(other_source, name="n")
        two.cards.append(ModelCard("alias", other_source))
        async with one.serving(source), two.serving(other_source):
            readers = Tokenizers()
            for engine in (one, two):
                readers.set_cards(engine.url, engine.cards)
            await readers.start()
            ids = {}
            for name in ("m", "n", "alias"):
                request = await read(readers, messages=says("hi"), model=name)
                assert request.token_ids is not None
                assert request.model == name
                ids[name] = list(request.token_ids)
            assert ids["m"] != ids["n"] == ids["alias"]
            assert (await read(readers, messages=says("hi"))).token_ids is None  # of which?
            assert (await read(readers, messages=says("hi"), model="who")).token_ids is None
            assert (await read(readers, "/v1/completions", prompt=[1], model="m")).model == "m"
            readers.follow([one.url])
            await readers.update()
            assert (await read(readers, messages=says("hi"))).token_ids is not None
            await readers.close()

    asyncio.run(main())


@pytest.mark.parametrize(("owner", "is_read"), [("vllm", True), (None, True), ("sglang", False)])
def test_agents_requests_are_read_as_vllm_does(
    source: str, owner: str | None, is_read: bool
) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.cards = [ModelCard("m", source, owner=owner)]
        readers.set_cards(engine.url, engine.cards)
        await readers.update()
        for path, body in (
            ("/v1/messages", {"messages": says("a"), "system": "s"}),
            ("/v1/responses", {"input": "a"}),
        ):
            request = await read(readers, path, model="m", **body)
            assert (request.token_ids is not None, bool(request.turns)) == (is_read, not is_read)
        assert (await read(readers, model="m", messages=says("a"))).token_ids is not None

    run(source, scenario)


def test_an_engine_that_differs_is_asked(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.shift = 1
        prompt = says("hi", "yes", "go")
        own = await read(readers, messages=prompt, model="m")
        await compared(readers, 1)
        stats = readers.stats()
        assert (stats.models["m chat"], stats.models["m completion"]) == ("render", "local")
        assert stats.reasons["m chat"] == "differs from the engine"
        assert (stats.checks, stats.mismatches) == (1, 1)
        request = await read(readers, messages=prompt, model="m")
        assert request.token_ids is not None and own.token_ids is not None
        assert list(request.token_ids) == [i + 1 for i in own.token_ids]
        assert readers.stats().requests["render"] == 1

    run(source, scenario, root=source, render_deadline_s=30.0)


@pytest.mark.parametrize("shift", [-(10**6), 1 << 40])
def test_impossible_token_ids_of_an_engine_are_no_tokens(source: str, shift: int) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.shift = shift
        for _ in range(2):
            assert (await read(readers, messages=says("hi"), model="m")).token_ids is not None
            while not engine.seen:
                await asyncio.sleep(0.005)
        assert readers.stats().models["m chat"] == "local"

    run(source, scenario, root=source)


def test_an_engine_whose_tokenizer_is_not_here_is_asked(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        assert set(readers.stats().reasons.values()) == {"no tokenizer here for /nowhere"}
        request = await read(readers, "/v1/completions", prompt="hello", model="m")
        assert request.token_ids is not None and request.num_tokens == len(request.token_ids)
        assert readers.stats().requests["render"] == 1

    run(source, scenario, render_deadline_s=30.0)


def test_without_render_and_tokenizer_requests_go_by_load(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.has_render = False
        for _ in range(3):
            request = await read(readers, messages=says("word " * 400), model="m")
            assert request.token_ids is None and 400 <= request.num_tokens <= 600
        assert len(engine.seen) == 2  # once for each way
        assert set(readers.stats().models.values()) == {"unknown"}
        assert readers.stats().unknown == {"not rendered": 1, "no tokenizer": 2}

    run(source, scenario, render_deadline_s=30.0)


def test_without_render_tokenize_does(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.has_render, engine.has_tokenize = False, True
        await read(readers, messages=says("hi"), model="m")
        await compared(readers, 1)
        assert readers.stats().reasons["m chat"] == "checked"
        engine.shift = 1
        asked = len(engine.seen)
        other = Tokenizers(limits=TokenLimits(render_deadline_s=30.0))
        other.set_cards(engine.url, engine.cards)
        await other.start()
        body = {
            "messages": says("hi"),
            "model": "m",
            "reasoning_effort": "none",
            "add_generation_prompt": True,
        }
        ours, theirs = await read(readers, **body), await read(other, **body)
        assert ours.token_ids is not None and theirs.token_ids is not None
        assert [i + 1 for i in ours.token_ids] == list(theirs.token_ids)
        assert len(engine.seen) == asked + 2  # /render was tried once more
        prompt = await read(other, "/v1/completions", prompt="hello", model="m")
        assert prompt.token_ids is not None
        await other.close()

    run(source, scenario, tokenizer=source)


def test_without_either_a_tokenizer_is_used_unchecked(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.has_render = False
        assert (await read(readers, messages=says("hi"), model="m")).token_ids is not None
        while set(readers.stats().reasons.values()) != {"unchecked: no /tokenize"}:
            await asyncio.sleep(0.005)
        assert (await read(readers, messages=says("hi"), model="m")).token_ids is not None

    run(source, scenario, root=source)


def test_a_slow_engine_is_not_waited_for_nor_asked_without_bound(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        engine.gate.clear()
        reads = [read(readers, messages=says(f"{i}"), model="m") for i in range(5)]
        assert all(request.token_ids is None for request in await asyncio.gather(*reads))
        assert len(engine.seen) <= 2
        assert readers.stats().unknown == {"engine too slow": 2, "busy": 3}
        engine.gate.set()
        while (await read(readers, messages=says("hi"), model="m")).token_ids is None:
            pass

    run(source, scenario, render_deadline_s=0.1, rendering=2)


def test_images_are_not_matched_by_what_an_engine_rendered(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
        messages = [{"role": "user", "content": [image]}]
        assert (await read(readers, messages=messages, model="m")).token_ids is None
        assert engine.seen == []
        assert readers.stats().unknown == {"media": 1}

    run(source, scenario, render_deadline_s=30.0)


def test_real_requests_are_compared_from_time_to_time(source: str) -> None:
    async def scenario(engine: FakeEngine, readers: Tokenizers) -> None:
        await read(readers, messages=says("hi"), model="m")
        engine.shift = 1  # it was started again with another template, say
        while readers.stats().models["m chat"] == "local":
            await read(readers, messages=says("hi"), model="m")
            await asyncio.sleep(0.01)
        assert readers.stats().models["m completion"] == "local"
        engine.shift = 0
        while readers.stats().models["m chat"] == "render":
            await read(readers, messages=says("hi"), model="m")
            await asyncio.sleep(0.01)
        assert readers.stats().checks >= 1 + AGREEMENTS_TO_RETURN

    run(source, scenario, root=source, check_every_s=0.0, render_deadline_s=30.0)


def test_an_engine_that_comes_later_is_found(source: str) -> None:
    async def main() -> None:
        async with FakeEngine(source).serving(source) as engine:
            readers = Tokenizers()
            await readers.start()
            assert (await read(readers, messages=says("hi"), model="m")).token_ids is None
            readers.set_cards(engine.url, engine.cards)
            while (await read(readers, messages=says("hi"), model="m")).token_ids is None:
                await asyncio.sleep(0.01)
            await readers.close()

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    async def main(source: Path) -> None:
        readers = Tokenizers(tokenizer=str(source))
        await readers.start()
        assert (await read(readers, messages=says("hi"))).token_ids is None
        await readers.close()

    for name, content in (
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("chat_template.jinja", "{% for %}"),
    ):
        source = make_tokenizer(tmp_path / name, "chatml")
        (source / name).write_text(content)
        asyncio.run(main(source))
    asyncio.run(main(tmp_path / "missing"))


class WaysAgainstAModel(RuleBasedStateMachine):
    """A kind is made here unless the last comparisons say otherwise."""

    @initialize(local=st.frozensets(st.sampled_from(Kind)))
    def make(self, local: frozenset[Kind]) -> None:
        self.ways = Ways(local, "missing")
        self.local = local
        self.history: dict[Kind, list[bool]] = {kind: [] for kind in Kind}
        self.renders: bool | None = None

    @rule(kind=st.sampled_from(Kind), equal=st.booleans())
    def compare(self, kind: Kind, equal: bool) -> None:
        self.ways.compared(kind, equal)
        self.history[kind].append(equal)
        self.renders = True

    @rule(renders=st.booleans())
    def learn(self, renders: bool) -> None:
        self.ways.engine_renders(renders)
        self.renders = renders

    @invariant()
    def agrees(self) -> None:
        self.ways.check()
        for kind, history in self.history.items():
            bad = [i for i, equal in enumerate(history) if not equal]
            returned = not bad or len(history) - bad[-1] > AGREEMENTS_TO_RETURN
            expected = TokenWay.UNKNOWN if self.renders is False else TokenWay.RENDER
            if kind in self.local and returned:
                expected = TokenWay.LOCAL
            assert self.ways.way(kind) is expected
        assert self.ways.checks == sum(map(len, self.history.values()))


class MemoAgainstAModel(RuleBasedStateMachine):
    """Least recently used out first, never more bytes than allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.memo = TokenMemo(3000, seed=7)
        self.model: dict[bytes, int] = {}

    @rule(text=st.sampled_from("abcdefgh"), space=st.sampled_from([1, 2]), size=st.integers(0, 700))
    def put(self, text: str, space: int, size: int) -> None:
        key = self.memo.key(text, space)
        self.memo.put(key, np.zeros(size, dtype=np.uint32))
        self.model.pop(key, None)
        self.model[key] = size
        while sum(4 * n + 300 for n in self.model.values()) > 3000:
            self.model.pop(next(iter(self.model)))

    @rule(text=st.sampled_from("abcdefgh"), space=st.sampled_from([1, 2]))
    def get(self, text: str, space: int) -> None:
        key = self.memo.key(text, space)
        found = self.memo.get(key)
        assert (None if found is None else len(found)) == self.model.get(key)
        if found is not None:
            self.model[key] = self.model.pop(key)

    @invariant()
    def agrees(self) -> None:
        self.memo.check()
        assert len(self.memo) == len(self.model)


TestWays = WaysAgainstAModel.TestCase
TestMemo = MemoAgainstAModel.TestCase
