"""Time to the first token where one vLLM engine computes a prompt and another answers.

    python benchmarks/bench_hand_over.py [--tokens 2013] [--rounds 5] [--json FILE]

Two engines, whose caches are peers on loopback, are asked one after the other or both at once,
beside one that does all of it alone and beside vLLM's NixlConnector (if NIXL_PATH names where the
nixl wheels are unpacked). Then conversations of three turns, whose prompts are always computed by
the first engine: it reads what the second has generated from its DRAM, or computes it again.

Each round has new prompts. Where two cores have four engines, the one that computes may be silent
for seconds, and is not waited for then. The notes count prompts that were not handed over whole.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import search_path  # noqa: F401
import typer
from api_server import ApiServer, serving
from engines import FLEXCACHE, fast_dtype, make_prompt
from make_models import make_model
from paths import MODELS
from ports import free_port, free_range
from reporting import Say, run_and_show

from flexcache.bench.suite import Case, Result

BLOCK, MODEL = 32, "mid"
FIRST, ANSWER, NEW, TURNS = 400, 200, 50, 3  # tokens of a conversation
ATTEMPTS = 10
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
           "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip


class Pair:
    """An engine that computes prompts and one that answers.

    Attributes:
        addresses: Of their caches, for peers.
        num_short: How many prompts were not handed over whole.
    """

    def __init__(self, directory: Path, transfer: dict[str, Any], packages: Sequence[str]) -> None:
        self.addresses = [f"127.0.0.1:{free_range(2)}" for _ in range(2)]
        self.servers = []
        self.num_short = 0
        for number, address in enumerate(self.addresses):
            variables = {
                "FLEXCACHE_PEER_ENDPOINT": f"tcp://{address}", "FLEXCACHE_CPU_CACHE_GB": "1",
                "FLEXCACHE_SKIP_SLOW_LOADS": "false", "OMP_NUM_THREADS": "1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }  # fmt: skip
            options = ["--max-num-batched-tokens", "512", "--dtype", fast_dtype()]
            self.servers.append(
                ApiServer(
                    directory / f"log-{transfer['kv_connector']}-{number}",
                    variables,
                    options,
                    model=MODEL,
                    transfer=transfer,
                    kv_cache_bytes=320 << 20,
                    python_path=packages,
                )
            )

    def compute(self, prompt: list[int], **params: Any) -> None:
        self.servers[0].complete(
            prompt, max_tokens=1, kv_transfer_params={"flexcache_hands_over": True, **params}
        )

    def at_once(self, prompt: list[int], num_tokens: int = 1, **params: Any) -> list[int]:
        """Hand over, both legs at once; the answer."""
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(self.compute, prompt, **params)
            answer, cached = self._waiting(1, prompt, num_tokens)
            computed.result()
        self._check(cached, prompt)
        return answer

    def meet(self) -> None:
        """Ask until the caches are in touch: their workers may still start."""
        for number in range(ATTEMPTS):
            prompt = make_prompt(2 * BLOCK, 10_000 + number)
            self.servers[1].complete(prompt, max_tokens=1)
            _, there = self._waiting(0, prompt)
            prompt = make_prompt(2 * BLOCK, 20_000 + number)
            self.compute(prompt)
            _, here = self._waiting(1, prompt)
            if there and here:
                return
        raise SystemExit("the caches do not reach each other")

    def one_by_one(self, prompt: list[int]) -> None:
        self.compute(prompt)
        _, cached = self._waiting(1, prompt)
        self._check(cached, prompt)

    def _waiting(
        self, number: int, prompt: list[int], num_tokens: int = 1
    ) -> tuple[list[int], int]:
        """Have an engine answer once it has what the other one has of the prompt."""
        told = {"flexcache_source": self.addresses[1 - number], "flexcache_wait_s": 60}
        return self.servers[number].complete(prompt, max_tokens=num_tokens, kv_transfer_params=told)

    def _check(self, cached: int, prompt: Sequence[int]) -> None:
        self.num_short += cached < (len(prompt) - 1) // BLOCK * BLOCK

    def by_nixl(self, prompt: list[int]) -> None:
        params = self.servers[0].transferred(prompt, COMPUTE)
        self.servers[1].complete(prompt, max_tokens=1, kv_transfer_params=params)


def told_of(pair: Pair) -> str:
    return f"{pair.num_short} prompts of FlexCache not handed over whole until now"


def took_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def prompts(ours: Pair, nixl: Pair | None, tokens: int, rounds: int) -> Iterator[Result]:
    arms: dict[str, Callable[[list[int]], object]] = {
        "one engine": lambda prompt: ours.servers[0].complete(prompt, max_tokens=1),
        "FlexCache, both at once": ours.at_once,
        "FlexCache, one after the other": ours.one_by_one,
    }
    if nixl is not None:
        arms["NIXL, one after the other"] = nixl.by_nixl
    ms: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds + 1):
        for position, (arm, call) in enumerate(arms.items()):
            prompt = make_prompt(tokens, 10 * number + position)
            took = took_ms(lambda call=call, prompt=prompt: call(prompt))  # type: ignore[misc]
            if number:
                ms[arm].append(took)
    alone = statistics.median(ms["one engine"])
    for arm, samples in ms.items():
        yield Result(arm, "ms", samples, alone, "one engine", note=told_of(ours))


def conversations(ours: Pair, rounds: int) -> Iterator[Result]:
    ways = {"computed again": {}, "read from where it was generated": {
        "flexcache_source": ours.addresses[1]}}  # fmt: skip
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for position, (way, params) in enumerate(ways.items()):
            seed = 1000 + 10 * number + position
            history = make_prompt(FIRST, seed)
            for turn in range(TURNS):
                if turn:
                    took = took_ms(lambda: ours.at_once(history, 1, **params))  # noqa: B023
                    if number:
                        ms[way].append(took)
                history += ours.at_once(history, ANSWER, **params)
                history += make_prompt(NEW, 100 * seed + turn)
                ours.servers[1].complete(make_prompt(40, 100 * seed + turn))  # stores the answer
    again = statistics.median(ms["computed again"])
    for way, samples in ms.items():
        yield Result(
            way, "ms", samples, again, "computed again", note=f"turns 2 to {TURNS}, {told_of(ours)}"
        )


def main(
    tokens: Annotated[int, typer.Option(help="length of the prompts")] = 2013,
    rounds: Annotated[int, typer.Option(help="measured rounds")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to keep samples")] = None,
) -> None:
    make_model(MODELS, MODEL)
    packages = os.environ.get("NIXL_PATH")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        ours = Pair(Path(name), FLEXCACHE, ())
        nixl = None if packages is None else Pair(Path(name), NIXL, (packages,))
        pairs = [pair for pair in (ours, nixl) if pair is not None]
        stack.enter_context(serving(*(each for pair in pairs for each in pair.servers)))
        ours.meet()

        def cases(_: Say) -> dict[str, list[Case]]:
            return {
                f"{tokens} tokens to the first of the answer": [
                    Case("hand-over", lambda: prompts(ours, nixl, tokens, rounds))
                ],
                "conversations": [
                    Case("what the answering engine generated", lambda: conversations(ours, rounds))
                ],
            }

        raise typer.Exit(run_and_show(cases, Path(name), json_file))


if __name__ == "__main__":
    typer.run(main)
