"""Workers by number: their addresses, states and served models.

Load, service time and policy keep arrays with an entry per worker, so each worker has a number. The
number of a removed worker is given to the next new one. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec
import numpy as np

from flexcache.errors import ConfigError, InternalError


class Tier(str, Enum):
    """Where an engine finds a block, fastest first."""

    GPU = "gpu"
    DRAM = "dram"
    DISK = "disk"
    """SSD and remote store together, which KV events tell apart on request only."""


Role = Literal["both", "prefill", "decode"]
Transfer = Literal["flexcache", "offloading", "nixl", "sglang"]


class EventSource(msgspec.Struct, frozen=True):
    """A publisher of KV events: an engine, or a cache that several engines share.

    Attributes:
        endpoint: ZMQ endpoint of its PUB socket. It identifies the source.
        replay: Endpoint at which missed batches are requested; None: nowhere.
        topic: Prefix of the topics to follow.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, or one data-parallel rank of an engine.

    Attributes:
        name: Unique: the URL, and for a rank ``URL#RANK``.
        url: Base URL, without a path.
        data_parallel_rank: Sent as ``X-data-parallel-rank``; None: the engine has one rank.
        sources: Publishers of the blocks that this worker can use.
        cache_url: HTTP API of its cache, without a path; None: it is not asked for anything.
        peer_port: Port at the URL's host from which other engines fetch its blocks: that of its
            cache's ``peer_endpoint``, or what ``transfer`` has; None: it has none.
        role: ``prefill``: it computes prompts for others, and serves whole requests only if no
            other can; ``decode``: it also takes what those have computed; ``both``: likewise.
        transfer: How KV comes from one engine to another. ``flexcache``: their caches are peers, or
            share a server or a store; ``offloading``: vLLM's p2p tier; ``nixl``: vLLM's connector;
            ``sglang``: its own, by a bootstrap server.
    """

    name: str
    url: str
    data_parallel_rank: int | None = None
    sources: tuple[EventSource, ...] = ()
    cache_url: str | None = None
    peer_port: int | None = None
    role: Role = "both"
    transfer: Transfer = "flexcache"


class ModelCard(msgspec.Struct, frozen=True):
    """A model or an adapter that an engine serves.

    Attributes:
        id: Served name.
        root: Directory or name of its files; of an adapter, the adapter's.
        parent: The model that an adapter belongs to; None: it is no adapter.
        raw: All that the engine says of it, as JSON.
        owner: Kind of the engine, ``vllm`` or ``sglang`` for example.
    """

    id: str
    root: str | None = None
    parent: str | None = None
    raw: bytes = b""
    owner: str | None = None


class WorkerState(str, Enum):
    """Whether requests are sent to a worker."""

    UP = "up"
    DRAINING = "draining"
    """Finishes its requests and gets no new ones."""
    DOWN = "down"


_MAX_MASKS = 1000
_MAX_REMEMBERED = 1000


@dataclass(slots=True)
class Member:
    """A worker.

    Attributes:
        models: Names of the models and adapters that it serves; empty: unknown.
        adapters: Those of them that are adapters.
    """

    number: int
    spec: WorkerSpec
    state: WorkerState = WorkerState.UP
    models: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()


def listed_name(model: str, listed: Collection[str]) -> str:
    """Return the name under which a model is listed; empty: it is not.

    SGLang's ``MODEL:ADAPTER`` is listed as its ``MODEL``.
    """
    return next((name for name in (model, model.rpartition(":")[0]) if name in listed), "")


class Fleet:
    """Numbers workers and tells which of them may be chosen.

    Attributes:
        models: Names of models and adapters that workers list, and of models that they did before.
        has_stages: Whether some of them compute prompts for others.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._by_number: list[Member | None] = []
        self._free: list[int] = []
        self.models: set[str] = set()
        self._masks: dict[str | None, np.ndarray] = {}
        """By model: which workers may be chosen."""
        self.has_stages = False
        self._once_listed: OrderedDict[str, None] = OrderedDict()
        """Models, no adapters, that workers have listed, the latest last."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    @property
    def num_numbers(self) -> int:
        """Numbers given out so far, those of removed workers included."""
        return len(self._by_number)

    def by_number(self) -> list[WorkerSpec | None]:
        """Return the worker of each number; None: it is free."""
        return [None if member is None else member.spec for member in self._by_number]

    def name(self, number: int) -> str:
        member = self._by_number[number]
        if member is None:
            raise InternalError(f"worker {number} is gone")
        return member.spec.name

    def set_workers(self, specs: Sequence[WorkerSpec]) -> list[int]:
        """Replace the set of workers. Those that stay keep number, state and models.

        Returns:
            Numbers of those that are gone.

        Raises:
            ConfigError: Two have one name; nothing is changed.
        """
        wanted = {spec.name: spec for spec in specs}
        if len(wanted) < len(specs):
            raise ConfigError(f"workers = {[spec.name for spec in specs]!r}: a name is there twice")
        removed = []
        for name in [name for name in self._members if name not in wanted]:
            member = self._members.pop(name)
            self._remember(member)
            number = member.number
            self._by_number[number] = None
            self._free.append(number)
            removed.append(number)
        for name, spec in wanted.items():
            known = self._members.get(name)
            if known is None:
                self._add(spec)
            else:
                known.spec = spec
        self._note_models()
        return removed

    def _remember(self, member: Member) -> None:
        """Remember models that no worker may list any more.

        An adapter is forgotten: an engine may load it when it is asked for.
        """
        for model in member.models - member.adapters:
            self._once_listed[model] = None
            self._once_listed.move_to_end(model)
        while len(self._once_listed) > _MAX_REMEMBERED:
            self._once_listed.popitem(last=False)

    def _add(self, spec: WorkerSpec) -> None:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._by_number)
            self._by_number.append(None)
        self._members[spec.name] = self._by_number[number] = Member(number, spec)

    def set_state(self, name: str, state: WorkerState) -> None:
        self._members[name].state = state
        self._masks.clear()

    def set_models(
        self, name: str, models: Collection[str], adapters: Collection[str] = ()
    ) -> None:
        """Say what a worker serves, and which of it are adapters."""
        member = self._members[name]
        self._remember(member)
        member.models, member.adapters = frozenset(models), frozenset(adapters)
        self._note_models()

    def eligible(
        self,
        model: str | None,
        tried: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> np.ndarray | None:
        """Return which numbers may be chosen, as booleans not to be changed; None: there is none.

        A model is served by those that list it, also if none of them is up: SGLang answers for any
        name, with the model that it has. A name that no worker has ever listed may be a new
        adapter, as may that of an adapter that none lists now; it is left to the engines. Workers
        that were tried are chosen again only if there are no others, and so are those that compute
        prompts for others.

        Args:
            only: Names of those to choose from; None: all.
        """
        mask = self._masks.get(model)
        if mask is None:
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()  # clients may ask for any model
            mask = self._masks[model] = self._able(model)
        if only is not None:
            allowed = np.zeros_like(mask)
            allowed[self._numbers(only)] = True
            mask = mask & allowed
        if not mask.any():
            return None
        numbers = self._numbers(tried)
        if numbers:
            fresh = mask.copy()
            fresh[numbers] = False
            mask = fresh if fresh.any() else mask
        return mask

    def prefilling(self, model: str | None, tried: Collection[str] = ()) -> np.ndarray | None:
        """Return which numbers compute prompts for others, likewise; None: there is none.

        Args:
            tried: Names of those that are not to be chosen.
        """
        if not self.has_stages:
            return None
        able = [m for m in self._serving(model) if m.spec.role == "prefill"]
        mask = self._mask([member for member in able if member.spec.name not in tried])
        return mask if mask.any() else None

    def like(self, number: int) -> np.ndarray:
        """Return which numbers can take KV from a worker's engine."""
        transfer = self[self.name(number)].spec.transfer
        return self._mask([m for m in self if m.spec.transfer == transfer])

    def _numbers(self, names: Collection[str]) -> list[int]:
        return [self._members[name].number for name in names if name in self._members]

    def _able(self, model: str | None) -> np.ndarray:
        able = self._serving(model)
        return self._mask([m for m in able if m.spec.role != "prefill"] or able)

    def _serving(self, model: str | None) -> list[Member]:
        able = [member for member in self._members.values() if member.state is WorkerState.UP]
        if model is not None:
            name = listed_name(model, self.models)
            if name:
                able = [member for member in able if name in member.models]
            else:
                able = [member for member in able if not member.models] or able
        return able

    def _mask(self, members: Sequence[Member]) -> np.ndarray:
        mask = np.zeros(len(self._by_number), dtype=bool)
        mask[[member.number for member in members]] = True
        return mask

    def _note_models(self) -> None:
        self._masks.clear()
        self.has_stages = any(member.spec.role == "prefill" for member in self)
        self.models = {*self._once_listed, *(name for member in self for name in member.models)}

    def check(self) -> None:
        """Verify that each number is free or belongs to one worker.

        Raises:
            InternalError: It is not so.
        """
        numbers = sorted([*self._free, *(member.number for member in self._members.values())])
        if numbers != list(range(len(self._by_number))):
            raise InternalError(f"numbers {numbers} of {len(self._by_number)}")
        for member in self._members.values():
            if self._by_number[member.number] is not member:
                raise InternalError(f"{member.spec.name} has the number of another worker")
