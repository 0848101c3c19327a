"""TTFT of two real vLLM engines with FlexCache behind FlexCache's router, round robin, and
vllm-router; predicted against actual cached tokens.

    python benchmarks/router/bench_engines.py [--seeds 3] [--load 0.6] [--venvs DIR] [--json FILE]
    python benchmarks/router/bench_engines.py --agents --load 0.5 --sessions 12 --model tiny

The engines run on the CPU, with one thread each. Conversations of several turns arrive at random
(Poisson) at a share of the rate that round robin reaches when an engine never waits for the next
request. All routers get the same conversations at the same times, one router after the other, and
each seed has conversations of its own. Those of one seed need 1.5 times the GPU blocks of an
engine. With ``--agents`` they are sessions of Claude Code and Codex, of 20 requests each.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import router_path  # noqa: F401
import typer
from agent_conversations import AgentConversations
from api_server import ApiServer, serving
from conversations import Answer, Conversations, Session, Shape
from engines import FLEXCACHE
from make_models import make_model
from make_tokenizers import make_tokenizer
from paths import MODELS
from ports import free_port, free_ports
from rich.console import Console
from rich.table import Table
from venvs import peer_python

BLOCK = 32  # the only size of the CPU backend
WORKING_SET = 1.5  # in GPU caches of one engine
DRAM_GB = 1.0
READY_S = 120.0
AGENT_TOKENS = 4500  # of a session's last request
OURS, ROUND_ROBIN, PEER = "FlexCache", "round robin", "vllm-router cache_aware"


@dataclass(frozen=True)
class Fleet:
    """Two engines, and where each publishes KV events."""

    engines: tuple[ApiServer, ...]
    events: tuple[str, ...]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]


@contextmanager
def running_fleet(
    directory: Path, model: str, session_tokens: int, options: Sequence[str]
) -> Iterator[Fleet]:
    """Start the engines, with caches for so many tokens of conversations."""
    gpu_bytes = int(session_tokens / WORKING_SET) * kv_bytes_per_token(model)
    engines, events = [], []
    for number in range(2):
        publish, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        transfer = {**FLEXCACHE, "kv_connector_extra_config": {"cpu_cache_gb": DRAM_GB}}
        engines.append(
            ApiServer(
                directory / f"engine-{number}.log",
                {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
                options,
                model=model,
                transfer=transfer,
                kv_events={
                    "endpoint": publish.replace("127.0.0.1", "*"),
                    "replay_endpoint": replay,
                },
                block_size=BLOCK,
                kv_cache_bytes=gpu_bytes,
            )
        )
        events.append(f"{publish},{replay}")
    with serving(*engines):
        yield Fleet(tuple(engines), tuple(events))


@contextmanager
def running_router(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Start a router that answers at ``port``; yields its URL."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LOG_LEVEL": "warn"},
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_S
    try:
        while True:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def our_command(fleet: Fleet, port: int, policy: str, tokenizer: str | None) -> list[str]:
    command = [sys.executable, "-m", "flexcache.cli", "router", "--port", str(port)]
    command += ["--control-port", str(free_port()), "--policy", policy]
    for url, events in zip(fleet.urls, fleet.events, strict=True):
        command += ["--worker", url, "--events", f"{url}={events}"]
    return command if tokenizer is None else [*command, "--tokenizer", tokenizer]


def peer_command(fleet: Fleet, port: int, python: str) -> list[str]:
    return [
        str(Path(python).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(port),
        "--policy", "cache_aware", "--prometheus-port", str(free_port()),
        "--worker-urls", *fleet.urls,
    ]  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Requests of one router with one seed."""

    router: str
    seed: int
    answers: list[Answer]

    @property
    def ttft_s(self) -> list[float]:
        return sorted(answer.ttft_s for answer in self.answers)

    def summary(self) -> dict[str, float]:
        ttft = self.ttft_s
        reported = [a for a in self.answers if a.cached is not None and a.prompt_tokens]
        return {
            "requests": len(ttft),
            "failed": sum(a.status != 200 for a in self.answers),
            "ttft_mean_s": statistics.mean(ttft),
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p99_s": ttft[int(0.99 * (len(ttft) - 1))],
            "e2e_mean_s": statistics.mean(a.e2e_s for a in self.answers),
            "hit_rate": sum(a.cached or 0 for a in reported)
            / max(1, sum(a.prompt_tokens or 0 for a in reported)),
        }


def prediction_errors(answers: Sequence[Answer]) -> tuple[int, list[Answer]]:
    """Return the number of answers with a prediction and a report, and those that differ."""
    both = [a for a in answers if a.predicted is not None and a.cached is not None]
    return len(both), [a for a in both if a.predicted != a.cached]


def ask(conversations: Conversations, rate: float | None) -> tuple[list[Answer], float]:
    took_s = asyncio.run(conversations.run(rate))
    return conversations.answers, took_s


def share_that_stayed(answers: Sequence[Answer]) -> float:
    """Return the share of later turns that went to the engine of their session's turn before."""
    last: dict[int, str] = {}
    stayed = []
    for answer in sorted(answers, key=lambda each: each.turn):
        if answer.turn:
            stayed.append(last[answer.session] == answer.worker)
        last[answer.session] = answer.worker
    return sum(stayed) / max(1, len(stayed))


def show(seen: Sequence[Seen], console: Console) -> None:
    table = Table("router", "seed", "requests", "TTFT mean", "p50", "p99", "E2E mean", "hit rate")
    for each in seen:
        s = each.summary()
        table.add_row(
            each.router, str(each.seed), f"{s['requests']:.0f}", f"{s['ttft_mean_s']:.3f} s",
            f"{s['ttft_p50_s']:.3f} s", f"{s['ttft_p99_s']:.3f} s", f"{s['e2e_mean_s']:.3f} s",
            f"{s['hit_rate']:.3f}",
        )  # fmt: skip
    console.print(table)
    ours = [each.summary()["ttft_mean_s"] for each in seen if each.router == OURS]
    for name in dict.fromkeys(each.router for each in seen):
        theirs = [each.summary()["ttft_mean_s"] for each in seen if each.router == name]
        if name != OURS and ours and theirs:
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            mean = statistics.mean(ours) / statistics.mean(theirs)
            console.print(f"TTFT mean beside {name}: {mean:.2f} ({shown})")
    num, wrong = prediction_errors(
        [a for each in seen if each.router == OURS for a in each.answers]
    )
    if num:
        console.print(f"cached tokens predicted exactly: {num - len(wrong)} of {num} requests")
        shares = [share_that_stayed(each.answers) for each in seen if each.router == OURS]
        shown = ", ".join(f"{share:.3f}" for share in shares)
        console.print(f"turns on the engine of the turn before: {shown}")
        for answer in wrong[:10]:
            console.print(
                f"  session {answer.session} turn {answer.turn}: predicted {answer.predicted}, "
                f"actual {answer.cached} of {answer.prompt_tokens}"
            )


def main(
    seeds: Annotated[int, typer.Option(help="Runs, each with conversations of its own.")] = 3,
    load: Annotated[float, typer.Option(help="Share of round robin's capacity.")] = 0.6,
    sessions: Annotated[int, typer.Option(help="Conversations.")] = 24,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 6,
    first_words: Annotated[int, typer.Option(help="Words of a first prompt.")] = 800,
    next_words: Annotated[int, typer.Option(help="Words that each later turn adds.")] = 120,
    model: Annotated[str, typer.Option(help="A model of `make_models`.")] = "mid",
    agents: Annotated[bool, typer.Option(help="Sessions of Claude Code and Codex.")] = False,
    only_ours: Annotated[bool, typer.Option(help="Leave out the other routers.")] = False,
    venvs: Annotated[
        Path | None, typer.Option(help="Environments of peers; without, no vllm-router.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every answer.")] = None,
) -> None:
    """Compare the routers and print a table."""
    console = Console(width=140)
    make_model(MODELS, model)
    shape = Shape(
        num_sessions=sessions, num_turns=turns, first_words=first_words, next_words=next_words
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kind, tokenizer, options = Conversations, None, ["--max-model-len", "2048"]
        num_tokens = session_tokens(model, shape)
        if agents:
            kind, tokenizer = AgentConversations, str(make_tokenizer(directory, "chatml"))
            num_tokens = sessions * AGENT_TOKENS
            options = ["--max-model-len", "8192", "--tokenizer", tokenizer]
            options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        fleet = stack.enter_context(running_fleet(directory, model, num_tokens, options))
        commands: dict[str, Callable[[int], list[str]]] = {
            ROUND_ROBIN: lambda port: our_command(fleet, port, "round_robin", tokenizer),
            OURS: lambda port: our_command(fleet, port, "ours", tokenizer),
        }
        if venvs is not None and not only_ours:
            python = peer_python(venvs, "vllm-router")
            commands[PEER] = lambda port: peer_command(fleet, port, python)
        urls = {}
        for name, command in commands.items():
            port = free_port()
            log = directory / f"{name.replace(' ', '-')}.log"
            urls[name] = stack.enter_context(running_router(command(port), port, log))
        warm_up, took_s = ask(kind(urls[ROUND_ROBIN], model, shape, 0, 0), None)
        capacity = len(warm_up) / took_s
        console.print(
            f"capacity of round robin: {capacity:.2f} requests/s; arrivals {load:.0%} of it"
        )
        seen: list[Seen] = []
        compared = [OURS] if only_ours else list(urls)
        for seed in range(seeds):
            first = seed % len(compared)
            names = compared[first:] + compared[:first]
            for name in names:
                # Other texts for each router, so that none finds what another left behind.
                text_seed = len(seen) + 1
                conversations = kind(urls[name], model, shape, seed, text_seed)
                answers, _ = ask(conversations, capacity * load)
                seen.append(Seen(name, seed, answers))
                console.print(f"seed {seed}, {name}: {seen[-1].summary()}")
    show(sorted(seen, key=lambda each: (each.router, each.seed)), console)
    if json_file is not None:
        rows = [
            {"router": s.router, "seed": s.seed, "answers": [asdict(a) for a in s.answers]}
            for s in seen
        ]
        json_file.write_text(json.dumps({"capacity_rps": capacity, "runs": rows}))


def kv_bytes_per_token(model: str) -> int:
    """Return the KV of one token, keys and values of all layers, in 16 bits each."""
    config = json.loads((MODELS / model / "config.json").read_text())
    numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(2 * 2 * numbers)


def session_tokens(model: str, shape: Shape) -> int:
    """Return the tokens of all conversations at their end, as the small tokenizer counts them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / model / "tokenizer.json"))
    text = Session.whole_text(shape)
    per_session = len(tokenizer.encode(text)) + shape.num_turns * shape.output_tokens
    return per_session * shape.num_sessions


if __name__ == "__main__":
    typer.run(main)
