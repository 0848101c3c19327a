"""Roster of workers: which there are, and which of them take requests.

A probe that is refused or answered with an error takes the engine out at once; one without an
answer counts only after several, because a busy engine answers late. Requests that fail open a
circuit breaker even while probes succeed; further probes are its trials. Pure: time is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from urllib.parse import urlsplit

from flexcache.breaker import CircuitBreaker
from flexcache.errors import InternalError
from flexcache.ids import BreakerState
from flexcache.logs import log_event
from flexcache.router.chooser import Outcome
from flexcache.router.fleet import ModelCard, WorkerSpec, WorkerState
from flexcache.router.router import KVRouter

_PATIENCE = 3
"""Probes without an answer, one after the other, that take an engine out."""


class Probe(Enum):
    """How a probe ended."""

    GOOD = "good"
    BAD = "bad"
    """Refused, or answered with an error."""
    LATE = "late"


class KnownEngine:
    """An engine's health, and what it serves.

    Attributes:
        is_up: Whether the last probes found it serving; False before the first.
        circuit: Opened by failing requests.
        num_failures: Probes that failed since startup.
        was_probed: Whether a probe has ended.
        cards: Its models and adapters; empty: unknown.
        models: Their names.
        adapters: Those of them that are adapters.
    """

    def __init__(self) -> None:
        self.is_up = False
        self.circuit = CircuitBreaker()
        self.num_failures = 0
        self.was_probed = False
        self.serves(())
        self._num_late = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests end well there, as far as is known."""
        return self.circuit.state is BreakerState.CLOSED

    def serves(self, cards: Sequence[ModelCard]) -> None:
        """Take note of what it serves."""
        self.cards = cards
        self.models = frozenset(card.id for card in cards)
        self.adapters = frozenset(card.id for card in cards if card.parent is not None)

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
        if not self.is_trusted:  # only probes are trials: a failed one costs no client anything
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
    """Workers that are listed, those added and removed by hand, and their engines.

    Ranks of one URL share an engine, its models and its health. If no engine that serves a model is
    both up and trusted, those that are merely up get requests: a circuit must not turn an overload
    into an outage.

    Args:
        routing: Is kept up to date; its fleet has each worker's state.
        on_change: Called with all workers when there are others than before.
        on_state: Called when workers take requests that did not before, or the reverse, or serve
            other models.
        on_doubt: Called with the URL of an engine that should be probed at once.
    """

    def __init__(
        self,
        routing: KVRouter,
        *,
        on_change: Callable[[tuple[WorkerSpec, ...]], None] = lambda specs: None,
        on_state: Callable[[], None] = lambda: None,
        on_doubt: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._routing = routing
        self._fleet = routing.fleet
        self._on_change = on_change
        self._on_state = on_state
        self._on_doubt = on_doubt
        self._listed: dict[str, WorkerSpec] = {}
        self._added: dict[str, WorkerSpec] = {}
        self._removed: set[str] = set()
        self._draining: set[str] = set()
        self._engines: dict[str, KnownEngine] = {}
        """By URL."""

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        return tuple(member.spec for member in self._fleet)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._engines)

    @property
    def is_known(self) -> bool:
        """Whether every engine was probed."""
        return all(engine.was_probed for engine in self._engines.values())

    @property
    def up(self) -> list[WorkerSpec]:
        """Workers that take requests."""
        return [member.spec for member in self._fleet if member.state is WorkerState.UP]

    def __contains__(self, worker: str) -> bool:
        return worker in self._fleet

    def spec(self, worker: str) -> WorkerSpec:
        return self._fleet[worker].spec

    def at(self, addresses: Collection[str]) -> list[str]:
        """Return the workers whose URLs have one of these ``HOST:PORT``."""
        return [spec.name for spec in self.specs if urlsplit(spec.url).netloc in addresses]

    def named(self, text: str) -> list[str]:
        """Return the workers with this name or URL."""
        return [spec.name for spec in self.specs if text in (spec.name, spec.url)]

    def engine(self, worker: str) -> KnownEngine:
        return self._engines[self._fleet[worker].spec.url]

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

    def _update(self) -> None:
        specs = {k: v for k, v in self._listed.items() if k not in self._removed} | self._added
        before = {spec.name: spec for spec in self.specs}
        if specs == before:
            return
        for name in before.keys() - specs.keys():
            log_event(logger, logging.INFO, "worker_removed", worker=name)
        self._draining &= specs.keys()
        urls = dict.fromkeys(spec.url for spec in specs.values())
        self._engines = {url: self._engines.get(url) or KnownEngine() for url in urls}
        self._routing.set_workers(tuple(specs.values()))
        for name in specs.keys() - before.keys():
            log_event(logger, logging.INFO, "worker_added", worker=name)
            engine = self.engine(name)
            self._routing.set_state(name, WorkerState.DOWN)  # until a probe has found its engine
            self._routing.set_models(name, engine.models, engine.adapters)
        self._update_states()
        self._on_change(self.specs)

    # -- which take requests -----------------------------------------------------------------------

    def probed(self, url: str, probe: Probe, now: float) -> None:
        """Take note of a probe of an engine; one that is gone is ignored."""
        if url in self._engines:
            self._engines[url].probed(probe, now)
            self._update_states()

    def set_cards(self, url: str, cards: Sequence[ModelCard]) -> None:
        """Take note of what an engine serves; one that is gone is ignored."""
        engine = self._engines.get(url)
        if engine is None:
            return
        before = engine.models
        engine.serves(cards)
        if engine.models == before:
            return
        for spec in self.specs:
            if spec.url == url:
                self._routing.set_models(spec.name, engine.models, engine.adapters)
        self._update_states()
        self._on_state()

    def cards(self) -> dict[str, bytes]:
        """Return what the engines that take requests say of the models that they serve."""
        up = dict.fromkeys(spec.url for spec in self.up)
        return {card.id: card.raw for url in up for card in self._engines[url].cards}

    def ended(self, worker: str, outcome: Outcome, now: float) -> None:
        """Take note of how a request ended."""
        if worker not in self._fleet:
            return
        url = self._fleet[worker].spec.url
        if self._engines[url].ended(outcome, now):
            self._update_states()
            self._on_doubt(url)

    def _update_states(self) -> None:
        up = {spec.name for spec in self.specs if self.engine(spec.name).is_up}
        chosen = self._chosen(up - self._draining)
        is_changed = False
        for member in self._fleet:
            name, state = member.spec.name, WorkerState.DOWN
            if name in chosen:
                state = WorkerState.UP
            elif name in up and name in self._draining:
                state = WorkerState.DRAINING
            if state is member.state:
                continue
            log_event(
                logger, logging.INFO, "worker_changed", worker=name, state=state.value,
                circuit=self.engine(name).circuit.state.value,
            )  # fmt: skip
            self._routing.set_state(name, state)
            is_changed = True
        if is_changed:
            self._on_state()

    def _chosen(self, able: set[str]) -> set[str]:
        """Return those of some workers that get requests: the trusted ones, and others where a
        model would be without."""
        trusted = {name for name in able if self.engine(name).is_trusted}
        served = frozenset[str]().union(*(self.engine(name).models for name in trusted))
        needed = {name for name in able if not self.engine(name).models <= served}
        return trusted | needed or able

    def check(self) -> None:
        """
        Raises:
            InternalError: Its tables do not fit together.
        """
        names = {spec.name for spec in self.specs}
        if self._engines.keys() != {spec.url for spec in self.specs}:
            raise InternalError(f"roster: {names}, engines {self._engines.keys()}")
        if not self._draining <= names or not self._removed <= self._listed.keys():
            raise InternalError(f"roster: draining {self._draining}, removed {self._removed}")
        for engine in self._engines.values():
            engine.check()
