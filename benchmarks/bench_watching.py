"""The cost of observation: vLLM's throughput with FlexCache's KV events, trace and metrics on,
beside the same engine without.

    python benchmarks/bench_watching.py [--model mid] [--rounds 9] [--json FILE]

The cache is DRAM and SSD, and small: every prompt is new, so every block is stored in both and
evicted again, which is as much as there can be to tell. A subscriber takes the events, and
`/metrics` is scraped every second. In a round the engine serves four batches of prompts of the same
lengths: watched, twice with events and trace taken out, and watched again (or the other way round),
so that drift cancels. The scraping goes on in both: the time that a scrape takes stands by itself.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
import zmq
from bench_overhead import LOADS, NUM_GENERATED, rounds_of
from driven_engine import DrivenEngine, running
from engines import Settings
from ports import free_port
from reporting import Say, run_and_show

from flexcache.bench.suite import Case, Result

TO_REACH = 0.98
DRAM_GB = 0.1
SCRAPE_INTERVAL_S = 1.0
WARM_UP_ROUNDS = 1
ROUNDS = 9


class Watchers:
    """A subscriber and a scraper, each on a thread, until `close`."""

    def __init__(self, events: str, metrics: str) -> None:
        self.num_events = 0
        self.scrapes_s: list[float] = []
        self._metrics = metrics
        self._stopped = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.rcvtimeo = 100
        self._events.connect(events)
        self._threads = [threading.Thread(target=self._take), threading.Thread(target=self._scrape)]
        for thread in self._threads:
            thread.start()

    def _take(self) -> None:
        while not self._stopped.is_set():
            try:
                self._events.recv_multipart()
                self.num_events += 1
            except zmq.Again:
                continue
        self._events.close()

    def _scrape(self) -> None:
        while not self._stopped.wait(SCRAPE_INTERVAL_S):
            started = time.perf_counter()
            with urllib.request.urlopen(self._metrics, timeout=10) as answer:
                text = answer.read()
            self.scrapes_s.append(time.perf_counter() - started)
            assert b"flexcache_" in text

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._context.term()


@contextmanager
def watched_engine(model: str, work_dir: str, say: Say) -> Iterator[tuple[DrivenEngine, Watchers]]:
    port, events = free_port(), f"tcp://127.0.0.1:{free_port()}"
    more = {
        "kv_events_endpoint": events,
        "trace_dir": str(Path(work_dir, "trace")),
        "http_endpoint": str(port),
    }
    settings = Settings("FlexCache", model, str(Path(work_dir, "ssd")), DRAM_GB, more=more)
    say(f"{model} model: starting vLLM")
    with ExitStack() as stack:
        engine = DrivenEngine(settings, Path(work_dir, "engine.log"), sys.executable)
        stack.enter_context(running(engine))
        watchers = Watchers(events, f"http://127.0.0.1:{port}/metrics")
        stack.callback(watchers.close)
        yield engine, watchers


def run(model: str, rounds: int, directory: Path, say: Say) -> Iterator[Result]:
    """Throughput watched as a ratio to unwatched, round by round."""
    ratios: list[float] = []
    more_cpu_s = 0.0
    source = rounds_of(LOADS[model], seed=6)
    with (
        tempfile.TemporaryDirectory(dir=directory) as work_dir,
        watched_engine(model, work_dir, say) as (engine, watchers),
    ):
        for number in range(-WARM_UP_ROUNDS, rounds):
            say(f"round {number + 1} of {rounds}")
            took, cpu = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
            first = bool(number % 2)
            for watched, prompts in zip([first, not first, not first, first], next(source),
                                        strict=True):  # fmt: skip
                without = None if watched else "watchers"
                batch = engine.serve(prompts, NUM_GENERATED, without)
                took[watched] += batch["wall_s"]
                cpu[watched] += batch["cpu_s"]
            if number >= 0:
                ratios.append(took[False] / took[True])
                more_cpu_s += cpu[True] - cpu[False]
        stats = engine.stats()
    events, trace = stats["events"], stats["trace"]
    assert watchers.num_events and trace["lines"], "nothing was watched"
    low, _, high = statistics.quantiles(ratios, n=4)
    num_requests = 2 * LOADS[model].num_prompts * len(ratios)
    note = (
        f"half of the rounds between {low:.3f} and {high:.3f}; per request "
        f"{more_cpu_s / num_requests * 1e3:.2f} ms more of CPU time; "
        f"{watchers.num_events:,} batches of events "
        f"({events['dropped_batches']} dropped), {trace['lines']:,} lines of trace "
        f"({trace['dropped_lines']} dropped)"
    )
    yield Result("throughput watched, of unwatched", "", ratios, limit=TO_REACH, note=note)
    yield Result("a scrape of /metrics", "ms", [s * 1e3 for s in watchers.scrapes_s])


def main(
    model: Annotated[list[str], typer.Option(help="tiny, mid.")] = list(LOADS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = ROUNDS,
    directory: Annotated[Path, typer.Option("--dir", help="For SSD tier and trace.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(say: Say) -> dict[str, list[Case]]:
        return {
            "watching": [
                Case(f"distinct prompts, {name} model", partial(run, name, rounds, directory, say))
                for name in model
            ]
        }

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
