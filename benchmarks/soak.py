"""Everything at once, for an hour: engines, caches, a store and the router, while they are killed.

    python benchmarks/soak.py [--minutes 60] [--sglang-python FILE] [--small-disk DIR] [--hosts 3]
        [--users 8] [--fault-every 10] [--seed 1] [--json FILE]

Two vLLM engines (one has a model with sliding windows) and an SGLang engine run on the CPU, each
with a cache server that has DRAM, SSD and a remote store; the router is in front. Users ask the
turns of conversations that need several times the engines' own caches, and faults come one after
the other: kill -9 of engines, servers, their workers, the router and the store, stops, clearings, a
full disk. Every answer is compared with that of an engine without a cache.

The exit status is 1 if a token is wrong, if a request fails that no engine's or router's death
explains, if a part ends by itself, or if no cache had a hit. `--small-disk` names a directory on a
file system of about 100 MB that you have mounted (`mount -t tmpfs -o size=100m none DIR`).

With `--hosts` (as root): hosts in network namespaces instead, each with a vLLM engine and a cache
server, which read each other's DRAM. The first engine computes prompts for the others. Links are
cut, too. The exit status is also 1 if a loan is left at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from hosts import Network
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from soak_faults import Faults, FaultThread, Outage
from soak_fleet import Fleet
from soak_parts import Part, Use, answers, samples
from soak_users import Failure, Seen, Users, ask_all, conversations
from stores import s3_server

from flexcache.cache.peers import GRACE_S, LOAN_S

NUM_SESSIONS = 40
LOOK_S = 15.0
WARM_UP_LOOKS = 4


def references(
    fleet: Fleet, sessions: dict[str, list[list[str]]], console: Console
) -> dict[str, dict[str, str]]:
    """Return what engines without a cache answer, by the address of the one with a cache."""
    found: dict[str, dict[str, str]] = {}
    alike: dict[tuple[str, bool], str] = {}
    for serving in fleet.servings:
        url, kind = fleet.urls[serving.name], (serving.model, serving.is_sglang)
        if kind in alike:
            found[url] = found[alike[kind]]
            continue
        alike[kind] = url
        console.print(f"asking {serving.name} without a cache")
        part = fleet.reference(serving)
        part.start()
        try:
            part.wait_ready()
            alone = part.url.removesuffix("/health")
            prompts = [prompt for turns in sessions[serving.model] for prompt in turns]
            found[url] = asyncio.run(ask_all(alone, serving.model, prompts))
        finally:
            part.end()
    return found


def unexplained(failures: Sequence[Failure], outages: Sequence[Outage]) -> list[Failure]:
    """Return the failures at times when nothing was away that they needed."""

    def is_explained(failure: Failure) -> bool:
        return any(
            outage.began <= failure.at <= outage.ended and failure.model in outage.models
            for outage in outages
        )

    return [failure for failure in failures if not is_explained(failure)]


def show(
    console: Console, seen: Seen, thread: FaultThread, lost: Sequence[Failure], took_s: float,
    watch: Watch, parts: dict[str, Part],
) -> None:  # fmt: skip
    waits = sorted(seen.waits_s) or [0.0]
    console.print(
        f"\n[b]{took_s / 60:.0f} minutes[/b]: {seen.num_answers:,} answers, "
        f"{seen.num_cached_tokens / max(1, seen.num_prompt_tokens):.0%} of their prompts cached; "
        f"{len(seen.wrong)} wrong; {len(seen.failures)} failed, {len(lost)} of them while all "
        f"that they needed was there; waits: median {waits[len(waits) // 2]:.2f} s, "
        f"longest {waits[-1]:.1f} s; {sum(thread.counts.values())} faults; "
        f"{watch.num_scrapes:,} scrapes of /metrics"
    )
    hits = ", ".join(f"{tier} {count:,}" for tier, count in watch.hits.items())
    console.print(f"Blocks found: {hits}; {seen.num_divided:,} requests were divided")
    for text in seen.wrong[:5]:
        console.print(f"wrong: {text}", markup=False)
    for failure in lost[:5]:
        console.print(f"failed: {failure}", markup=False)
    table = Table("part", "starts", "MB a minute after", "at the end", "files", "at the end")
    for name, found in watch.uses.items():
        first, last = found[min(WARM_UP_LOOKS, len(found) - 1)], found[-1]
        table.add_row(
            name, str(parts[name].num_starts), f"{first.memory_bytes / 1e6:.0f}",
            f"{last.memory_bytes / 1e6:.0f}", str(first.num_files), str(last.num_files),
        )  # fmt: skip
    console.print(table)
    counts = Table("fault", "times")
    for what, count in sorted(thread.counts.items()):
        counts.add_row(what, str(count))
    console.print(counts)


class Watch(threading.Thread):
    """Notes what each part uses, from its latest start on, and reads its metrics."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(name="watch", daemon=True)
        self.uses: dict[str, list[Use]] = {}
        self.died: list[str] = []
        self.num_scrapes = 0
        self.hits: Counter[str] = Counter()
        """Blocks that gets have found, by tier."""
        self.is_over = threading.Event()
        self._fleet = fleet
        self._starts: dict[str, int] = {}
        self._last_hits: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        while not self.is_over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        for name, part in self._fleet.parts.items():
            if part.has_died and name not in self.died:
                self.died.append(name)
            if self._starts.get(name) != part.num_starts:
                self._starts[name] = part.num_starts
                self.uses[name] = []
            self.uses[name].append(part.use())
        for name, url in self._fleet.http.items():
            if name == "router":
                self.num_scrapes += answers(f"{url}/metrics")
                continue
            with contextlib.suppress(OSError):
                found = samples(url, "flexcache_tier_hit_blocks")
                hits = {each.labels["tier"]: int(each.value) for each in found}
                self.num_scrapes += 1
                before = self._last_hits.get(name, {})
                for tier, count in hits.items():
                    since = before.get(tier, 0)
                    self.hits[tier] += count - since if count >= since else count
                self._last_hits[name] = hits


def main(
    minutes: Annotated[float, typer.Option(help="Without the time to start.")] = 60.0,
    users: Annotated[int, typer.Option(help="Who ask at the same time.")] = 8,
    fault_every: Annotated[float, typer.Option(help="Seconds from one to the next.")] = 10.0,
    sglang_python: Annotated[
        Path | None, typer.Option(help="Of an environment with SGLang; none: no SGLang.")
    ] = None,
    small_disk: Annotated[Path | None, typer.Option(help="Directory of a small disk.")] = None,
    hosts: Annotated[int, typer.Option(help="In namespaces; 0: none.")] = 0,
    seed: Annotated[int, typer.Option()] = 1,
    directory: Annotated[Path, typer.Option("--dir", help="For SSD tiers and logs.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    console = Console()
    with ExitStack() as stack:
        # Sockets have short paths only.
        work_dir = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="soak-", dir=directory.absolute())
            )
        )
        network = None
        if hosts:
            network = Network(hosts, has_uplink=True)
            stack.callback(network.close)
        # An object store beyond loopback must have TLS: hosts share a directory.
        store = None if hosts else stack.enter_context(s3_server())
        url = f"file://{work_dir}/store" if store is None else store.url
        fleet = Fleet(work_dir, sglang_python, url, small_disk, network)
        models = sorted({serving.model for serving in fleet.servings})
        # Prompts that no cache has yet are what one engine computes for another.
        num_sessions = NUM_SESSIONS * max(1, hosts)
        sessions = {m: conversations(num_sessions, seed + i) for i, m in enumerate(models)}
        expected = references(fleet, sessions, console)
        for part in fleet.parts.values():
            stack.callback(part.end)
            part.start()
            part.wait_ready()
        crowd = Users(fleet.router_url, sessions, expected, seed)
        faults = Faults(fleet, store, small_disk, seed)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[at]}"))  # fmt: skip
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("asking", total=minutes * 60, at="")
        began = time.monotonic()

        def say(what: str) -> None:
            seen = crowd.seen
            progress.update(
                task, completed=time.monotonic() - began,
                at=f"{seen.num_answers} answers, {len(seen.wrong)} wrong, "
                f"{len(seen.failures)} failed; {what}",
            )  # fmt: skip

        watch = Watch(fleet)
        watch.look()
        watch.start()
        with FaultThread(faults, fault_every, say) as thread:
            asyncio.run(crowd.run(users, began + minutes * 60))
        watch.is_over.set()
        watch.join()
        watch.look()
        left = loans_left(fleet) if hosts else 0
        progress.stop()
        lost = unexplained(crowd.seen.failures, faults.outages)
        show(
            console, crowd.seen, thread, lost, time.monotonic() - began, watch, fleet.parts
        )  # fmt: skip
        if thread.error is not None:
            console.print(f"the faults ended: {thread.error}", markup=False)
        for name in watch.died:
            console.print(f"{name} died by itself")
        if hosts:
            console.print(f"{left} blocks are lent at the end")
        if json_file is not None:
            json_file.write_text(json.dumps(summary(crowd.seen, thread, lost, watch), indent=1))
    is_idle = not sum(watch.hits.values())
    sys.exit(int(bool(crowd.seen.wrong or lost or watch.died or thread.error or left or is_idle)))


def loans_left(fleet: Fleet) -> int:
    """Return how many blocks caches still lend, once what was asked for is over."""
    time.sleep(LOAN_S + GRACE_S)
    total = 0
    for serving in fleet.servings:
        lent = samples(fleet.http[serving.name], "flexcache_peer_lent_blocks")
        total += sum(int(each.value) for each in lent)
    return total


def summary(
    seen: Seen, thread: FaultThread, lost: Sequence[Failure], watch: Watch
) -> dict[str, object]:
    return {
        "answers": seen.num_answers,
        "wrong": seen.wrong,
        "failed": len(seen.failures),
        "failed_otherwise": [vars(failure) for failure in lost],
        "longest_wait_s": max(seen.waits_s, default=0.0),
        "divided": seen.num_divided,
        "hit_blocks": dict(watch.hits),
        "cached_share": seen.num_cached_tokens / max(1, seen.num_prompt_tokens),
        "faults": thread.counts,
        "uses": {name: [vars(use) for use in uses] for name, uses in watch.uses.items()},
        "died": watch.died,
        "scrapes": watch.num_scrapes,
    }


if __name__ == "__main__":
    typer.run(main)
