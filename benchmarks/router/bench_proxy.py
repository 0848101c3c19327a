"""The router's proxy: its CPU time per token and per request, beside other proxies.

    python benchmarks/router/bench_proxy.py [--peers DIR] [--rounds 3] [--aborts 100000]

Each proxy stands before engines without a model and chooses in turn (Dynamo's frontend: its KV
router, before workers of its own, and it tokenises). CPU times are those of the proxy's processes
alone. Rounds go over all proxies, so that other load on the machine affects all alike.

* tokens: 64 streams of 50 tokens a second, an event of about 230 bytes each;
* requests: one token each, not streamed, 8 at a time;
* bodies: 500 kB and one token;
* waiting: 8 tokens at once, one request at a time, on a kept connection, where the client
  acknowledges at once and where it leaves that to the kernel: a proxy that leaves Nagle's algorithm
  on stalls by 40 ms;
* aborts: clients leave at random moments; nothing may stay counted as running.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import router_path  # noqa: F401
import typer
from fake_openai_engine import FakeEngine
from proxy_client import Load, Measured, leave
from proxy_systems import System, direct, dynamo, ours, vllm_router
from reporting import Say, run_and_show

from flexcache.bench.suite import Case, Result, Unsupported

NUM_STREAMS = 64
TOKEN_INTERVAL_S = 0.02
TOKENS_PER_STREAM = 250
EVENT_PADDING = 85
SHORT_REQUESTS = 2000
LARGE_REQUESTS = 200
LARGE_PROMPT = [100_000] * 62_500  # 500 kB of JSON
LARGE_PROMPT_OF_DYNAMO = [999] * 100_000
WAITING_REQUESTS = 200
PATIENCE_S = 60.0
MAX_TOKEN_US = 33.0
MAX_REQUEST_US = 300.0
OURS, PEERS = "FlexCache", ("vllm-router", "Dynamo frontend")


@dataclass
class Samples:
    """What was measured of one proxy, a value per round."""

    token_us: list[float] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)
    body_ms: list[float] = field(default_factory=list)
    ttft_ms: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    total_ms: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    bytes_per_token: float = 0.0


def cpu_of(system: System, load: Callable[[], Measured]) -> tuple[float, Measured]:
    """Return the CPU seconds of a proxy under a load, and what the load saw."""
    before = system.cpu_s()
    measured = load()
    return system.cpu_s() - before, measured


def measure(system: System, samples: Samples, name: str) -> None:
    """Measure one round of a proxy."""
    load = Load(system.port, quick_acks=True)
    body: dict[str, Any] = {"model": "fake", "prompt": [20, 21, 22], "max_tokens": 1}
    stream = {**body, "stream": True, "max_tokens": TOKENS_PER_STREAM}
    cpu_s, seen = cpu_of(system, lambda: load.run(stream, NUM_STREAMS, NUM_STREAMS))
    num_tokens = NUM_STREAMS * TOKENS_PER_STREAM
    if seen.num_tokens < num_tokens:
        raise AssertionError(f"{name}: {seen.num_tokens} of {num_tokens} tokens")
    samples.token_us.append(cpu_s / num_tokens * 1e6)
    samples.bytes_per_token = seen.num_bytes / num_tokens

    cpu_s, _ = cpu_of(system, lambda: load.run(body, SHORT_REQUESTS, 8))
    samples.request_us.append(cpu_s / SHORT_REQUESTS * 1e6)

    prompt = LARGE_PROMPT_OF_DYNAMO if name == PEERS[1] else LARGE_PROMPT
    cpu_s, _ = cpu_of(system, lambda: load.run({**body, "prompt": prompt}, LARGE_REQUESTS, 4))
    samples.body_ms.append(cpu_s / LARGE_REQUESTS * 1e3)


def measure_waiting(system: System, samples: Samples) -> None:
    body = {"model": "fake", "prompt": [20, 21, 22], "max_tokens": 8, "stream": True}
    for quick_acks in (True, False):
        seen = Load(system.port, quick_acks).run(body, WAITING_REQUESTS, 1)
        samples.ttft_ms[quick_acks] += seen.ttft_ms
        samples.total_ms[quick_acks] += seen.total_ms


def compare(rounds: int, peers: Path, directory: Path, say: Say) -> Iterator[Result]:
    """CPU times of all proxies that run here."""
    found: dict[str, Samples] = {}
    missing: list[str] = []
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        fakes = [stack.enter_context(FakeEngine(token_bytes=EVENT_PADDING)) for _ in range(2)]
        starts: dict[str, Callable[[], AbstractContextManager[System]]] = {
            "no proxy": lambda: direct(fakes),
            OURS: lambda: ours(fakes),
            PEERS[0]: lambda: vllm_router(fakes, peers),
            PEERS[1]: lambda: dynamo(TOKEN_INTERVAL_S, peers, work / "paced"),
        }
        systems: dict[str, System] = {}
        work.joinpath("paced").mkdir()
        for name, start in starts.items():
            say(f"starting {name}")
            try:
                systems[name] = stack.enter_context(start())
                found[name] = Samples()
            except Unsupported as error:
                missing.append(f"{name} is missing: {error}")
        for number in range(rounds):
            for name, system in systems.items():
                say(f"round {number + 1} of {rounds}: {name}")
                for fake in fakes:
                    fake.behave(token_interval_s=TOKEN_INTERVAL_S)
                measure(system, found[name], name)
                for fake in fakes:
                    fake.behave(token_interval_s=0.0)
                if name != PEERS[1]:  # its tokens are paced
                    measure_waiting(system, found[name])
        if PEERS[1] in systems:
            work.joinpath("at once").mkdir()
            with dynamo(0.0, peers, work / "at once") as system:
                measure_waiting(system, found[PEERS[1]])
    yield from results(found, "; ".join(missing))


def results(found: dict[str, Samples], note: str) -> Iterator[Result]:
    bound = found.get(PEERS[0])
    for name, samples in found.items():
        if name == "no proxy":
            continue
        is_ours = name == OURS
        figures = (
            ("CPU per token", "us", "token_us", MAX_TOKEN_US),
            ("CPU per request", "us", "request_us", MAX_REQUEST_US),
            ("CPU per request of 500 kB", "ms", "body_ms", None),
        )
        for title, unit, key, limit in figures:
            values = getattr(samples, key)
            peer = Result("", unit, getattr(bound, key)).median if bound and is_ours else None
            yield Result(
                f"{name}: {title}", unit, values, bound=peer, bound_name=PEERS[0],
                limit=limit if is_ours else None,
                note=f"{samples.bytes_per_token:.0f} bytes a token; {note}".strip("; "),
            )  # fmt: skip
    for name, samples in found.items():
        for quick_acks, how in ((True, "quick ACKs"), (False, "the kernel's ACKs")):
            yield Result(f"{name}: first byte, {how}", "ms", samples.ttft_ms[quick_acks])
            yield Result(f"{name}: whole answer, {how}", "ms", samples.total_ms[quick_acks])


def abort(num_clients: int, say: Say) -> Iterator[Result]:
    """Clients that leave; checks that nothing is left of them."""
    say(f"{num_clients} clients leave")
    with ExitStack() as stack:
        fakes = [
            stack.enter_context(FakeEngine(token_interval_s=TOKEN_INTERVAL_S)) for _ in range(2)
        ]
        system = stack.enter_context(ours(fakes))
        before = system.cpu_s()
        took = leave(system.port, num_clients, concurrency=64, seed=0)
        leaks = system.leaks
        assert leaks is not None
        wait_for(lambda: leaks() == 0)
        wait_for(lambda: all(fake.stats()["running"] == 0 for fake in fakes))
        cpu_us = (system.cpu_s() - before) / num_clients * 1e6
        aborted = sum(fake.stats()["aborted"] for fake in fakes)
        load = Load(system.port, quick_acks=False)
        load.run({"prompt": [1], "max_tokens": 1}, 100, 4)
        assert leaks() == 0
    note = f"{took:.0f} s; {aborted:,} aborts reached the engines; 0 requests left"
    yield Result(f"{num_clients:,} clients that leave: CPU each", "us", [cpu_us], note=note)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what ends by itself.

    Raises:
        AssertionError: It did not.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("requests of clients that left still run")
        time.sleep(0.05)


def main(
    peers: Annotated[Path, typer.Option(help="Directory of the peers' environments.")] = Path(
        "peers"
    ),
    rounds: Annotated[int, typer.Option(help="Over all proxies.")] = 3,
    aborts: Annotated[int, typer.Option(help="Clients that leave; 0: none.")] = 10_000,
    directory: Annotated[Path, typer.Option("--dir", help="For temporary files.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(say: Say) -> dict[str, list[Case]]:
        cases = []
        if rounds:
            cases.append(Case("CPU", partial(compare, rounds, peers, directory, say)))
        if aborts:
            cases.append(Case("aborts", partial(abort, aborts, say)))
        return {"proxy": cases}

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
