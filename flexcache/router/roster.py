"""Roster of workers: which there are, and which of them take requests.

A probe that is refused or answered with an error takes the engine out at once; one without an
answer counts only after several, because a busy engine answers late. Requests that fail open a
circuit breaker even while probes succeed; further probes are its trials. Pure: time is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from urllib.parse import urlsplit

from flexcache.errors import InternalError
from flexcache.ids import BreakerState
from flexcache.logs import log_event
from flexcache.router.chooser import Outcome
from flexcache.router.fleet import WorkerSpec, WorkerState
from flexcache.router.router import KVRouter
from flexcache.transfer.breaker import CircuitBreaker

_PATIENCE = 3
"""Probes without an answer, one after the other, that take an engine out."""


class Probe(Enum):
    """How a probe ended."""

    GOOD = "good"
    BAD = "bad"
    """Refused, or answered with an error."""
    LATE = "late"


class Health:
    """The health of one engine.

    Attributes:
        is_up: Whether the last probes found it serving; False before the first.
        circuit: Opened by failing requests.
        num_failures: Probes that failed since startup.
        was_probed: Whether a probe has ended.
    """

    def __init__(self) -> None:
        self.is_up = False
        self.circuit = CircuitBreaker()
        self.num_failures = 0
        self.was_probed = False
        self._num_late = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests end well there, as far as is known."""
        return self.circuit.state is BreakerState.CLOSED

    def probed(self, probe: Probe, now: float) -> None:
        """Take note of a probe."""
        self.was_probed = True
        if probe is Probe.GOOD:
            self._num_late = 0
            self.is_up = True
            if self.circuit.wants_trial(now):
                self.circuit.succeeded(now)
            return
        self.num_failures += 1
        self._num_late += 1
        if probe is Probe.BAD or self._num_late >= _PATIENCE:
            self.is_up = False
        if self.circuit.wants_trial(now):
            self.circuit.failed("probe", now)

    def ended(self, outcome: Outcome, now: float) -> bool:
        """Take note of the end of a request.

        Returns:
            Whether the engine should be probed at once.
        """
        if not self.is_trusted:  # only probes are trials: they cost no client anything
            return False
        if outcome in (Outcome.REFUSED, Outcome.BROKEN):
            self.circuit.failed(outcome.value, now)
            return True
        if outcome is Outcome.DONE:
            self._num_late = 0  # it answers, if not its probes
            self.circuit.succeeded(now)
        return False

    def check(self) -> None:
        """
        Raises:
            InternalError: It is up without a probe.
        """
        if self.is_up and not self.was_probed:
            raise InternalError("an engine is up that was never probed")


logger = logging.getLogger(__name__)


class Roster:
    """Workers that are listed, those added and removed by hand, and the health of their engines.

    Ranks of one URL share an engine, its models and its health. If no engine that serves a model is
    both up and trusted, those that are merely up get requests: a circuit must not turn an overload
    into an outage.

    Args:
        book: Is kept up to date.
        on_change: Called with all workers when there are others than before.
        on_state: Called when workers take requests that did not before, or the reverse, or serve
            other models.
        on_doubt: Called with the URL of an engine that should be probed at once.
    """

    def __init__(
        self,
        book: KVRouter,
        *,
        on_change: Callable[[tuple[WorkerSpec, ...]], None] = lambda specs: None,
        on_state: Callable[[], None] = lambda: None,
        on_doubt: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._book = book
        self._on_change = on_change
        self._on_state = on_state
        self._on_doubt = on_doubt
        self._listed: dict[str, WorkerSpec] = {}
        self._added: dict[str, WorkerSpec] = {}
        self._removed: set[str] = set()
        self._draining: set[str] = set()
        self._health: dict[str, Health] = {}
        self._models: dict[str, frozenset[str]] = {}
        self._cards: dict[str, Mapping[str, bytes]] = {}
        self._adapters: dict[str, frozenset[str]] = {}
        """By URL; those that are known."""
        self._states: dict[str, WorkerState] = {}
        self._specs: dict[str, WorkerSpec] = {}

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        return tuple(self._specs.values())

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._health)

    @property
    def is_known(self) -> bool:
        """Whether every engine was probed."""
        return all(health.was_probed for health in self._health.values())

    @property
    def num_up(self) -> int:
        return sum(state is WorkerState.UP for state in self._states.values())

    def __contains__(self, worker: object) -> bool:
        return worker in self._specs

    def spec(self, worker: str) -> WorkerSpec:
        return self._specs[worker]

    def state(self, worker: str) -> WorkerState:
        return self._states[worker]

    def is_up(self, worker: str) -> bool:
        return self._states[worker] is WorkerState.UP

    def at(self, addresses: Collection[str]) -> list[str]:
        """Return the workers whose URLs have one of these ``HOST:PORT``."""
        return [spec.name for spec in self.specs if urlsplit(spec.url).netloc in addresses]

    def health(self, worker: str) -> Health:
        return self._health[self._specs[worker].url]

    def models(self, worker: str) -> frozenset[str]:
        """Return the names of the models and adapters that a worker serves; empty: unknown."""
        return self._models.get(self._specs[worker].url, frozenset())

    # -- which there are ---------------------------------------------------------------------------

    def set_listed(self, specs: Iterable[WorkerSpec]) -> None:
        """Replace the workers that were found by listing; those added by hand stay."""
        self._listed = {spec.name: spec for spec in specs}
        self._removed &= self._listed.keys()
        self._update()

    def add(self, specs: Iterable[WorkerSpec]) -> None:
        """Add workers by hand, or change them."""
        for spec in specs:
            self._added[spec.name] = spec
            self._removed.discard(spec.name)
            self._draining.discard(spec.name)
        self._update()

    def remove(self, workers: Iterable[str]) -> None:
        """Remove workers, listed ones too; those stay away until they are added."""
        for worker in workers:
            self._added.pop(worker, None)
            self._draining.discard(worker)
            if worker in self._listed:
                self._removed.add(worker)
        self._update()

    def drain(self, workers: Iterable[str], is_draining: bool = True) -> None:
        """Give workers no new requests, or give them some again."""
        change = self._draining.add if is_draining else self._draining.discard
        for worker in workers:
            change(worker)
        self._update_states()

    def named(self, text: str) -> list[str]:
        """Return the workers with this name or URL."""
        return [spec.name for spec in self.specs if text in (spec.name, spec.url)]

    def _update(self) -> None:
        specs = {k: v for k, v in self._listed.items() if k not in self._removed} | self._added
        if specs == self._specs:
            return
        for name in self._specs.keys() - specs.keys():
            log_event(logger, logging.INFO, "worker_removed", worker=name)
        for name in specs.keys() - self._specs.keys():
            log_event(logger, logging.INFO, "worker_added", worker=name)
        self._specs = specs
        self._draining &= specs.keys()
        urls = dict.fromkeys(spec.url for spec in specs.values())
        self._health = {url: self._health.get(url) or Health() for url in urls}
        self._models = {k: v for k, v in self._models.items() if k in urls}
        self._adapters = {k: v for k, v in self._adapters.items() if k in urls}
        self._cards = {k: v for k, v in self._cards.items() if k in urls}
        self._states = {k: v for k, v in self._states.items() if k in specs}
        self._book.set_workers(self.specs)
        for name in specs.keys() - self._states.keys():
            self._states[name] = WorkerState.DOWN
            self._book.set_state(name, WorkerState.DOWN)
            url = specs[name].url
            self._book.set_models(name, self.models(name), self._adapters.get(url, frozenset()))
        self._update_states()
        self._on_change(self.specs)

    # -- which take requests -----------------------------------------------------------------------

    def probed(self, url: str, probe: Probe, now: float) -> None:
        """Take note of a probe of an engine; one that is gone is ignored."""
        if url in self._health:
            self._health[url].probed(probe, now)
            self._update_states()

    def set_models(self, url: str, models: Collection[str], adapters: Collection[str] = ()) -> None:
        """Take note of what an engine serves; one that is gone is ignored."""
        if url not in self._health or self._models.get(url) == frozenset(models):
            return
        self._models[url], self._adapters[url] = frozenset(models), frozenset(adapters)
        for spec in self.specs:
            if spec.url == url:
                self._book.set_models(spec.name, models, adapters)
        self._update_states()
        self._on_state()

    def set_cards(self, url: str, cards: Mapping[str, bytes]) -> None:
        """Keep what an engine says of each model that it serves; one that is gone is ignored."""
        if url in self._health:
            self._cards[url] = cards

    def cards(self) -> dict[str, bytes]:
        """Return what the engines that take requests say of the models that they serve."""
        up = dict.fromkeys(spec.url for spec in self.specs if self.is_up(spec.name))
        return {name: card for url in up for name, card in self._cards.get(url, {}).items()}

    def ended(self, worker: str, outcome: Outcome, now: float) -> None:
        """Take note of how a request ended."""
        if worker not in self._specs:
            return
        url = self._specs[worker].url
        if self._health[url].ended(outcome, now):
            self._update_states()
            self._on_doubt(url)

    def _update_states(self) -> None:
        up = {name: self.health(name) for name in self._specs if self.health(name).is_up}
        takes = {name for name in up if name not in self._draining}
        trusted = {name for name in takes if up[name].is_trusted}
        served = frozenset[str]().union(*map(self.models, trusted))
        needed = {name for name in takes if not self.models(name) <= served}
        chosen = trusted | needed or takes
        is_changed = False
        for name in self._specs:
            state = WorkerState.UP if name in chosen else WorkerState.DOWN
            if name in up and name in self._draining:
                state = WorkerState.DRAINING
            if state is self._states[name]:
                continue
            log_event(
                logger, logging.INFO, "worker_changed", worker=name, state=state.value,
                circuit=self.health(name).circuit.state.value,
            )  # fmt: skip
            self._states[name] = state
            self._book.set_state(name, state)
            is_changed = True
        if is_changed:
            self._on_state()

    def check(self) -> None:
        """
        Raises:
            InternalError: Its tables do not fit together.
        """
        urls = {spec.url for spec in self.specs}
        if self._states.keys() != self._specs.keys() or self._health.keys() != urls:
            raise InternalError(f"roster: {self._states.keys()}, {self._health.keys()}")
        if not self._draining <= self._specs.keys() or not self._removed <= self._listed.keys():
            raise InternalError(f"roster: draining {self._draining}, removed {self._removed}")
        for health in self._health.values():
            health.check()
