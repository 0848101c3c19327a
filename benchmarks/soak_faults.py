"""Faults that the soak strikes its parts with, one after the other."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from soak_fleet import Fleet
from soak_parts import TOKEN, Part
from stores import StoreServer

WORKERS = {
    "disk": "flexcache.transfer.disk_worker", "remote": "flexcache.transfer.remote_worker",
    "peer": "flexcache.server.peer_worker",
}  # fmt: skip
STOPPED_S = 6.0
AFTER_S = 10.0
"""An engine that is back may still be tried in vain for this long, until the router knows."""


@dataclass(frozen=True)
class Outage:
    """A time in which requests may fail.

    Attributes:
        models: Whose requests may fail; empty: none may.
    """

    what: str
    began: float
    ended: float
    models: frozenset[str]


class Faults:
    """Chooses faults by a seed, so that each comes equally often, and notes when they were.

    Args:
        store: The remote store of the cache servers; None: one that is not struck.
        small_disk: Directory to fill; None fills none.
    """

    def __init__(
        self, fleet: Fleet, store: StoreServer | None, small_disk: Path | None, seed: int
    ) -> None:
        self.outages: list[Outage] = []
        self._fleet = fleet
        self._store = store
        self._small_disk = small_disk
        self._random = random.Random(seed)
        self._due: list[tuple[str, Callable[[], None]]] = []

    def one(self) -> str:
        """Do the next fault, and return its name once what it broke is back."""
        if not self._due:
            self._due = self._all()
            self._random.shuffle(self._due)
        what, do = self._due.pop()
        do()
        return what

    def _all(self) -> list[tuple[str, Callable[[], None]]]:
        found: list[tuple[str, Callable[[], None]]] = []
        for serving in self._fleet.servings:
            name = f"cache of {serving.name}"
            cache = self._fleet.parts[name]
            found += [
                (f"kill {name}", partial(self._kill, cache)),
                (f"stop {name}", partial(self._stop, cache)),
                (f"clear {name}", partial(self._clear, serving.name)),
            ]
            if serving.host is not None:
                found.append((f"cut {serving.name}", partial(self._cut, serving.host)))
            for worker in WORKERS if serving.host is not None else ("disk", "remote"):
                what = f"kill {worker} worker, {name}"
                found.append((what, partial(self._kill_child, cache, worker, what)))
            engine = self._fleet.parts[serving.name]
            found.append((f"kill {serving.name}", partial(self._kill, engine)))
        found.append(("kill router", partial(self._kill, self._fleet.parts["router"])))
        if (store := self._store) is not None:
            found.append(("kill store", partial(self._restart_store, store)))
            found.append(("stop store", partial(self._stop_store, store)))
        if self._small_disk is not None:
            found.append(("full disk", self._fill_disk))
        return found

    @contextmanager
    def _outage(self, what: str, part: Part | None = None) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            models = self._models_of(part)
            ended = time.monotonic() + (AFTER_S if models else 0)
            self.outages.append(Outage(what, began, ended, models))

    def _models_of(self, part: Part | None) -> frozenset[str]:
        """Models whose requests may fail while a part is away: a cache's absence fails none."""
        servings = self._fleet.servings
        if part is self._fleet.parts["router"]:
            return frozenset(serving.model for serving in servings)
        return frozenset(s.model for s in servings if part is self._fleet.parts[s.name])

    def _kill(self, part: Part) -> None:
        with self._outage(f"kill {part.name}", part):
            part.kill()
            part.start()
            part.wait_ready()

    def _kill_child(self, part: Part, worker: str, what: str) -> None:
        with self._outage(what):
            part.kill_child(WORKERS[worker])

    def _stop(self, part: Part) -> None:
        with self._outage(f"stop {part.name}"):
            part.stop()
            time.sleep(STOPPED_S)
            part.go_on()

    def _cut(self, host: int) -> None:
        network = self._fleet.network
        assert network is not None
        with self._outage(f"cut host {host}", self._fleet.parts[f"host-{host}"]):
            network.cut(host)
            time.sleep(STOPPED_S)
            network.heal(host)

    def _clear(self, name: str) -> None:
        tier = self._random.choice(["CPU", "SSD", "REMOTE"])
        request = urllib.request.Request(
            f"{self._fleet.http[name]}/cache/clear", json.dumps({"tier": tier}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
        )  # fmt: skip
        with (
            self._outage(f"clear {tier} of {name}"),
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=30),
        ):
            pass

    def _restart_store(self, store: StoreServer) -> None:
        with self._outage("kill store"):
            store.restart()

    def _stop_store(self, store: StoreServer) -> None:
        with self._outage("stop store"):
            store.stop()
            time.sleep(STOPPED_S)
            store.resume()

    def _fill_disk(self) -> None:
        assert self._small_disk is not None
        filler = self._small_disk / "filler"
        with self._outage("full disk"):
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            time.sleep(STOPPED_S)
            filler.unlink()


class FaultThread:
    """Does a fault every so often until the end of the block."""

    def __init__(self, faults: Faults, interval_s: float, say: Callable[[str], None]) -> None:
        self.counts: dict[str, int] = {}
        self.error: BaseException | None = None
        self._faults = faults
        self._interval_s = interval_s
        self._say = say
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")

    def __enter__(self) -> FaultThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._interval_s):
                what = self._faults.one()
                self.counts[what] = self.counts.get(what, 0) + 1
                self._say(what)
        except BaseException as error:
            self.error = error
