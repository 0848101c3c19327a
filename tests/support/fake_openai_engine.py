"""An OpenAI-compatible engine without a model: streams tokens, fails on command, counts aborts.

    with FakeEngine(tokens=8, token_interval_s=0.01) as engine:
        ...                                   # requests to engine.url
        engine.behave(fail="502", times=2)    # the next two requests get a 502
        engine.stats()["aborted"]

The engine is a process of its own, with a second port for commands, so that it can be given them
while its own port refuses connections. Token ids of a prompt are the ids themselves if it is a list
of ids, and otherwise the UTF-8 bytes of its text (`/render` and `/tokenize` agree). With ``events``
the engine publishes vLLM's KV events of a prefix cache in blocks of 16 tokens, and reports what it
found there as ``cached_tokens``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import OrderedDict, deque
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from paths import ROOT

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
)

BLOCK_SIZE = 16
_KEPT_REQUESTS = 1000
_SHOWN_BODY_BYTES = 16 << 10

FAILURES = (
    "none", "close", "close_midway", "hang", "hang_midway", "garbage", "refuse",
    "400", "429", "500", "502", "503",
)  # fmt: skip
"""`close`: the connection is closed before any byte of the answer; `garbage`: the answer is not
HTTP; `refuse`: nothing listens. The numbers are statuses."""


class Behaviour(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How requests are answered.

    Attributes:
        tokens: Length of an answer; None: the request's ``max_tokens``, or 16.
        ttft_s: Time before the first token.
        prefill_s_per_token: Further time for each token that is not cached; one prompt at a time.
        token_interval_s: Time between tokens.
        token_bytes: Padding of each token's text.
        reports_usage: Answers contain ``usage``, streams only if asked for it, like vLLM's.
        fail: One of `FAILURES`.
        times: Number of requests that fail; None: all from now on. Not for ``refuse``.
        retry_after: Header ``Retry-After`` of failures with a status.
        healthy: Whether ``/health`` answers 200.
    """

    tokens: int | None = None
    ttft_s: float = 0.0
    prefill_s_per_token: float = 0.0
    token_interval_s: float = 0.0
    token_bytes: int = 1
    reports_usage: bool = True
    fail: str = "none"
    times: int | None = None
    retry_after: str | None = None
    healthy: bool = True


class FakeEngine:
    """The engine's process, as tests see it.

    Args:
        port: 0: any.
        events: Endpoint at which KV events are published.
        replay: Endpoint at which they are replayed.
        gpu_blocks: Capacity of the prefix cache.
        keepalive_s: How long an idle connection is kept.
        behaviour: Fields of `Behaviour`.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        events: str | None = None,
        replay: str | None = None,
        gpu_blocks: int = 4096,
        model: str = "fake",
        keepalive_s: float = 60.0,
        **behaviour: Any,
    ) -> None:
        self._options = {
            "port": port,
            "events": events,
            "replay": replay,
            "gpu_blocks": gpu_blocks,
            "model": model,
            "keepalive_s": keepalive_s,
        }
        self._behaviour = behaviour
        self.port = port
        self.events, self.replay = events, replay
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeEngine:
        arguments = [sys.executable, __file__]
        for name, value in {**self._options, "behaviour": json.dumps(self._behaviour)}.items():
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.port = self._options["port"] = ports["port"]  # the same after a restart
        self._commands = f"http://127.0.0.1:{ports['commands']}"
        return self

    def behave(self, **changes: Any) -> None:
        """Change some fields of the behaviour; returns when they hold."""
        self._command("/behave", changes)

    def stats(self) -> dict[str, Any]:
        """Return counts: ``requests``, ``finished``, ``failed``, ``aborted``, ``running``,
        ``connections`` (made to it ever), ``held_blocks``."""
        stats: dict[str, Any] = self._command("/stats")
        return stats

    def requests(self) -> list[dict[str, Any]]:
        """Return the last requests: ``method``, ``target`` (as it came), ``headers`` (pairs),
        ``length`` and ``sha256`` of the body, and the body itself (latin-1) if it is short."""
        requests: list[dict[str, Any]] = self._command("/requests")
        return requests

    def hold(self, token_ids: list[int], medium: str = "GPU") -> None:
        """Put a prompt's blocks into the prefix cache, as if it had been computed."""
        self._command("/hold", {"token_ids": token_ids, "medium": medium})

    def clear(self) -> None:
        """Empty the prefix cache; published as AllBlocksCleared."""
        self._command("/clear", {})

    def kill(self) -> None:
        """End the process at once. `start` may follow."""
        assert self.process is not None
        self.process.kill()
        self._wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self._wait()

    def _wait(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.wait()
        self.process.stdout.close()

    def _command(self, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(self._commands + path, data, timeout=60) as answer:
            return json.load(answer)

    def __enter__(self) -> FakeEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


# -- the process ----------------------------------------------------------------------------------


class PrefixCache:
    """Blocks of prompts by chained hash, least recently used first; publishes events of them."""

    def __init__(self, capacity: int, endpoint: str | None, replay: str | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, str] = OrderedDict()
        self._publisher: BatchPublisher[Event] | None = None
        if endpoint is not None:
            self._publisher = BatchPublisher(
                Address(endpoint, replay, "kv-events"),
                encode_batch,
                num_kept=10_000,
                num_queued=100_000,
            )
            self._publisher.start()

    def __len__(self) -> int:
        return len(self._held)

    def matched_tokens(self, token_ids: list[int]) -> int:
        """Return the tokens that need no prefill; one is always computed, as in vLLM."""
        matched = 0
        for key in _block_hashes(token_ids[: len(token_ids) - 1]):
            if key not in self._held:
                break
            matched += BLOCK_SIZE
        return matched

    def hold(self, token_ids: list[int], medium: str = "GPU") -> None:
        keys = _block_hashes(token_ids)
        known = 0
        while known < len(keys) and keys[known] in self._held:
            known += 1
        for key in keys:
            self._held[key] = medium
            self._held.move_to_end(key)
        events: list[Event] = []
        if known < len(keys):
            stored = BlockStored(
                block_hashes=list(keys[known:]),
                parent_block_hash=keys[known - 1] if known else None,
                token_ids=token_ids[known * BLOCK_SIZE : len(keys) * BLOCK_SIZE],
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium=medium,
                lora_name=None,
            )
            events.append(stored)
        while len(self._held) > self._capacity:
            key, evicted_from = self._held.popitem(last=False)
            events.append(BlockRemoved([key], evicted_from))
        self._publish(events)

    def clear(self) -> None:
        self._held.clear()
        self._publish([AllBlocksCleared()])

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self, events: list[Event]) -> None:
        if self._publisher is not None and events:
            self._publisher.publish(events)


def _block_hashes(token_ids: list[int]) -> list[int]:
    keys: list[int] = []
    digest = b""
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = repr(token_ids[start : start + BLOCK_SIZE]).encode()
        digest = hashlib.blake2b(block, key=digest, digest_size=8).digest()
        keys.append(int.from_bytes(digest, "big"))
    return keys


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content or "")


def _token_ids(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        lines = [f"<|{m.get('role')}|>{_text_of(m.get('content'))}" for m in body["messages"]]
        return list("\n".join(lines).encode())
    prompt = body.get("prompt", body.get("input", ""))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (int, list)):
        return list(prompt) if isinstance(prompt[0], int) else list(prompt[0])
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt else ""
    return list(str(prompt).encode())


def _chunk(body: dict[str, Any], text: str, usage: Any, finish: str | None) -> dict[str, Any]:
    is_chat = "messages" in body
    is_stream = bool(body.get("stream"))
    kind = "chat.completion" if is_chat else "text_completion"
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if is_chat:
        choice["delta" if is_stream else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    chunk = {
        "id": "cmpl-0",
        "object": kind + (".chunk" if is_chat and is_stream else ""),
        "created": 0,
        "model": body.get("model", "fake"),
        "choices": [choice],
    }
    return chunk if usage is None else {**chunk, "usage": usage}


def _transport(request: web.Request) -> asyncio.Transport:
    assert request.transport is not None
    return request.transport


class Engine:
    """Answers requests inside the process."""

    def __init__(self, behaviour: Behaviour, cache: PrefixCache, model: str, capacity: int) -> None:
        self.behaviour = behaviour
        self.cache = cache
        self.model = model
        self.capacity = capacity
        self.counts = dict.fromkeys(
            ("requests", "finished", "failed", "aborted", "running", "connections"), 0
        )
        self.seen: deque[dict[str, Any]] = deque(maxlen=_KEPT_REQUESTS)
        self._prefill = asyncio.Lock()
        self._connections: set[tuple[str, int]] = set()

    def apply(self, changes: dict[str, Any]) -> None:
        if "fail" in changes:
            assert changes["fail"] in FAILURES
            changes = {"times": None, **changes}
        self.behaviour = msgspec.convert(
            {**msgspec.structs.asdict(self.behaviour), **changes}, Behaviour
        )

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer any request; counts it and its abort."""
        self.counts["requests"] += 1
        self.counts["running"] += 1
        peer = _transport(request).get_extra_info("peername")
        if peer not in self._connections:
            self._connections.add(peer)
            self.counts["connections"] += 1
        try:
            answer = await self._answer(request)
            self.counts["finished"] += 1
            return answer
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            raise
        except ConnectionError:
            self.counts["aborted"] += 1
            return web.Response()
        finally:
            self.counts["running"] -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self._remember(request, body)
        failure = self._next_failure()
        if failure is not None:
            self.counts["failed"] += 1
        if failure == "hang":
            await asyncio.Event().wait()
        if failure in ("close", "garbage"):
            if failure == "garbage":
                _transport(request).write(b"this is not HTTP\r\n\r\n")
            _transport(request).close()
            return web.Response()
        if failure is not None and failure.isdigit():
            headers = {}
            if self.behaviour.retry_after is not None:
                headers["Retry-After"] = self.behaviour.retry_after
            error = {"message": f"failing with {failure}", "type": "fake", "code": int(failure)}
            return web.json_response({"error": error}, status=int(failure), headers=headers)
        try:
            parsed = json.loads(body) if body else {}
        except ValueError:
            parsed = {}
        if request.method != "POST" or not isinstance(parsed, dict):
            return web.json_response({"path": request.raw_path, "method": request.method})
        if request.path.endswith("/render"):
            return web.json_response([{"token_ids": _token_ids(parsed)}])
        return await self._generate(request, parsed, failure)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], failure: str | None
    ) -> web.StreamResponse:
        behaviour = self.behaviour
        token_ids = _token_ids(body)
        async with self._prefill:
            cached = self.cache.matched_tokens(token_ids)
            wait_s = behaviour.prefill_s_per_token * (len(token_ids) - cached)
            if wait_s:
                await asyncio.sleep(wait_s)
        if behaviour.ttft_s:
            await asyncio.sleep(behaviour.ttft_s)
        self.cache.hold(token_ids)
        count = behaviour.tokens
        if count is None:
            count = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        usage = {
            "prompt_tokens": len(token_ids),
            "completion_tokens": count,
            "total_tokens": len(token_ids) + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", "none")}
        text = "x" * behaviour.token_bytes
        if not body.get("stream"):
            await asyncio.sleep(behaviour.token_interval_s * (count - 1))
            shown = usage if behaviour.reports_usage else None
            answer = _chunk(body, text * count, shown, "length")
            if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
                answer["kv_transfer_params"] = {"remote_block_ids": [1, 2], "remote_port": 5600}
            return web.json_response(answer, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        event = b"data: " + json.dumps(_chunk(body, text, None, None)).encode() + b"\n\n"
        for number in range(count):
            if number:
                await asyncio.sleep(behaviour.token_interval_s)
            if number == count // 2 and failure == "close_midway":
                _transport(request).close()
                return response
            if number == count // 2 and failure == "hang_midway":
                await asyncio.Event().wait()
            await response.write(event)
        if behaviour.reports_usage and (body.get("stream_options") or {}).get("include_usage"):
            last = {**_chunk(body, "", usage, "length"), "choices": []}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _next_failure(self) -> str | None:
        behaviour = self.behaviour
        if behaviour.fail in ("none", "refuse") or behaviour.times == 0:
            return None
        if behaviour.times is not None:
            behaviour.times -= 1
        return behaviour.fail

    def _remember(self, request: web.Request, body: bytes) -> None:
        self.seen.append(
            {
                "method": request.method,
                "target": request.raw_path,
                "headers": [[n.decode(), v.decode("latin-1")] for n, v in request.raw_headers],
                "length": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
                "body": body.decode("latin-1") if len(body) <= _SHOWN_BODY_BYTES else None,
            }
        )

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.behaviour.healthy else 503)

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "fake"}
        return web.json_response({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        tokens = _token_ids(await request.json())
        answer = {"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens}
        return web.json_response(answer)

    async def metrics(self, _: web.Request) -> web.Response:
        label = f'model_name="{self.model}"'
        usage = len(self.cache) / self.capacity
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{label}}} {self.counts['running']}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{label}}} 0",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{{{label}}} {usage}",
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",enable_prefix_caching="True",'
            f'num_gpu_blocks="{self.capacity}"}} 1.0',
        ]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


async def _run(options: argparse.Namespace) -> None:
    cache = PrefixCache(options.gpu_blocks, options.events, options.replay)
    behaviour = msgspec.json.decode(options.behaviour, type=Behaviour)
    engine = Engine(behaviour, cache, options.model, options.gpu_blocks)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_route("*", "/{path:.*}", engine.serve)
    runner = web.AppRunner(
        app,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=options.keepalive_s,
        access_log=None,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", options.port)
    await listening.start()
    site: web.TCPSite | None = listening
    port = runner.addresses[0][1]

    async def behave(request: web.Request) -> web.Response:
        nonlocal site
        engine.apply(await request.json())
        if engine.behaviour.fail == "refuse" and site is not None:
            await site.stop()
            site = None
            assert runner.server is not None
            for connection in runner.server.connections:
                connection.force_close()
        elif engine.behaviour.fail != "refuse" and site is None:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
        return web.json_response({})

    async def stats(_: web.Request) -> web.Response:
        return web.json_response({**engine.counts, "held_blocks": len(cache)})

    async def requests(_: web.Request) -> web.Response:
        return web.json_response(list(engine.seen))

    async def hold(request: web.Request) -> web.Response:
        content = await request.json()
        cache.hold(content["token_ids"], content["medium"])
        return web.json_response({})

    async def clear(_: web.Request) -> web.Response:
        cache.clear()
        return web.json_response({})

    commands = web.Application(client_max_size=1 << 30)
    commands.router.add_post("/behave", behave)
    commands.router.add_get("/stats", stats)
    commands.router.add_get("/requests", requests)
    commands.router.add_post("/hold", hold)
    commands.router.add_post("/clear", clear)
    commands_runner = web.AppRunner(commands, access_log=None, shutdown_timeout=0.1)
    await commands_runner.setup()
    await web.TCPSite(commands_runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": port, "commands": commands_runner.addresses[0][1]}), flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await runner.cleanup()
    await commands_runner.cleanup()
    cache.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events")
    parser.add_argument("--replay")
    parser.add_argument("--gpu-blocks", type=int, default=4096)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--keepalive-s", type=float, default=60.0)
    parser.add_argument("--behaviour", default="{}", help="JSON of the fields of Behaviour")
    options = parser.parse_args()
    uvloop.run(_run(options))


if __name__ == "__main__":
    main()
