"""Gets: loads of prompts, from vLLM's question until the blocks have arrived.

A request has at most one open get, however often vLLM asks; the get's life:

    matched --blocks allocated--> launched --workers report--> gone
       |
       +--(other prefix, no blocks wanted, request ends)--> cancelled, gone

    matched --promised--> blocks allocated: the ranks are given it with the step, and it is gone
                  |
                  +--(no blocks allocated in this step, or as above)--> cancelled, gone

vLLM counts blocks that are loaded within the step as computed, shares them as soon as they are
allocated, and may have scheduled further steps by the time this one has run. So only loads that
cannot be lost run there (`StepPromises`): they are promised before vLLM is answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexcache.config import CacheConfig
from flexcache.errors import InternalError
from flexcache.ids import TierName
from flexcache.integration.adapter import LayerwiseRule
from flexcache.integration.vllm.calls import CacheCalls, Get, NoMatch, read_hints
from flexcache.integration.vllm.early_loads import EarlyLoads, EarlyLookUps
from flexcache.integration.vllm.engine import find_looked_up, is_served_by_sibling
from flexcache.integration.vllm.groups import BlockTables, Tables
from flexcache.integration.vllm.step_loads import StepBudget
from flexcache.integration.vllm.weights import RequestName
from flexcache.integration.vllm.worker import Load

_IDLE_WAIT_S, _IDLE_COMPUTED_S = 0.001, 0.004
_COMPUTED_AGAIN_S, _ASKED_AT_ONCE = 0.01, 4
"""How soon the cache is asked again for what another engine computes, and for how many requests in
that time."""


def _tell_of_junction(request: Any, get: Get) -> None:
    """Tell vLLM where a prompt parts from others behind its hit: it ends a step there, so that
    there is a tail to store. By itself it notices only what its GPU cache has of the others."""
    if get.num_shared > get.num_computed + get.num_tokens:
        noticed = request.shared_prefix_boundary
        request.shared_prefix_boundary = max(noticed, get.num_shared)


@dataclass(slots=True)
class RequestRecord:
    """A request, until vLLM has finished it.

    Attributes:
        get: Its open get: at most one, however often vLLM asks.
        asked_s: When the remote store was first queried for it; None unless an answer is pending.
        until_s: Until when it waits for what is computed elsewhere; None: it has not asked yet.
        again_s: When the cache is asked again, if it waits for that.
        has_lost_load: A load was lost. No other is offered: each could be lost in turn, endlessly.
    """

    get: Get | None = None
    asked_s: float | None = None
    until_s: float | None = None
    again_s: float = 0.0
    has_lost_load: bool = False


@dataclass(slots=True)
class Step:
    """A step of the engine, from the first load for it until it has ended.

    Attributes:
        loads: Those in its metadata.
        counts_on_ranks: Whether some of them run within it.
        num_tokens: What it computes, once it was scheduled.
        started: Requests whose load between steps has arrived, and that it computes first; False
            for those that have ended instead.
    """

    loads: list[Load] = field(default_factory=list)
    counts_on_ranks: bool = False
    num_tokens: int = 0
    launched_s: float = 0.0
    started: dict[str, bool] = field(default_factory=dict)


class Gets:
    """The gets of one engine.

    Args:
        block_size: Tokens between the positions where prefixes can end.
        has_siblings: Whether other connectors serve requests too.

    Attributes:
        layerwise: Decides which loads run within a step, however long they take.
        budget: Which others are short enough.
        early: Look-ups ahead of vLLM's question.
        early_loads: Loads to DRAM ahead of it.
        has_matched: Whether anything was matched since this was last reset.
    """

    def __init__(
        self, cache: CacheCalls, block_size: int, tables: BlockTables, layerwise: LayerwiseRule,
        budget: StepBudget, config: CacheConfig, has_siblings: bool,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._block_size = block_size
        self._tables = tables
        self.layerwise = layerwise
        self.budget = budget
        self._match_ttl_s = config.match_ttl_s
        self._lookup_timeout_s = config.remote_lookup_timeout_s
        self._has_siblings = has_siblings
        self.early = EarlyLookUps(config.remote_lookup_timeout_s)
        may_begin = config.early_load_share > 0 and config.num_cpu_blocks != 0
        self.early_loads = EarlyLoads(
            cache, may_begin and config.has_workers, not tables.has_groups, self._withdraw
        )
        self._may_load_early = may_begin
        self._has_store = config.remote_url is not None or config.has_peers
        """Whether a store or peers are asked. Of a shared cache, not known before that is first
        waited for."""
        self._requests: dict[str, RequestRecord] = {}
        self._step = Step()
        self._promised: dict[str, None] = {}
        """Requests whose get was promised since the last step was scheduled."""
        self._under_way: deque[Step] = deque()
        """Steps that have not ended, the oldest first."""
        self._arrived: set[str] = set()
        """Requests whose load between steps has ended, and that no step has computed since."""
        self._gone: set[str] = set()
        """Those that ended before."""
        self.has_matched = False

    # -- vLLM's questions ------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Begin to look a new request up, before vLLM has room for it."""
        if not self._may_load(request):
            return
        self.early_loads.arrived(request)
        if self._has_store:
            self.early.arrived(request)
            self._look_up_early()

    def _look_up_early(self) -> None:
        for request in self.early.take_due(time.monotonic()):
            self._cache.look_up(request)

    def _may_load(self, request: Any) -> bool:
        """Return whether loads are to be offered to a request."""
        is_anothers = self._has_siblings and is_served_by_sibling(request)
        return not is_anothers and not getattr(request, "skip_reading_prefix_cache", False)

    def num_matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first ``num_computed`` can be loaded (None: unknown
        yet), and whether the request waits for them (between steps).

        vLLM asks repeatedly for a waiting request: the answer is kept until vLLM acts on it, the
        engine's own prefix changes, or the match has become too old.
        """
        name = self._cache.names.begins(request, num_computed)
        if not (self._may_load(request) and self._cache.names.may_load(request)):
            return 0, False
        self.early.asked(request.request_id)
        self.early_loads.asked(request.request_id)
        record = self._requests.setdefault(request.request_id, RequestRecord())
        get = self._open_get(request, record, num_computed, name)
        if get is None:
            return (0 if record.asked_s is None else None), False
        if self._tables.has_tails:
            _tell_of_junction(request, get)
        if get.launched or get.num_tokens == 0:
            return 0, False
        if not get.sources.keys() <= {TierName.CPU}:
            self.early_loads.found_below(request)
        if get.promised is None and self._may_run_in_step(request, get):
            get.promised = self._cache.promise(get.task_id)
            if get.promised is not None:
                self._promised[request.request_id] = None
        return get.num_tokens, get.promised is None

    def completes_hit(self) -> bool:
        """Return whether the request that vLLM is looking up is to resume behind all that its full
        attention has on the GPU, though the states there are gone: a load brings later ones.

        If so, vLLM asks for what lies behind, and if that is nothing it does not ask again but
        falls back to the last states that it has. So the answer is yes only for a load that is
        matched already.
        """
        if (looked_up := find_looked_up()) is None:
            return False
        manager, request = looked_up
        if not self._tables.has_states or not self._may_load(request):
            return True  # vLLM hears that nothing is found, and a sibling decides
        if self._tables.has_windows:
            return False  # vLLM does not say which blocks of windows are gone
        coordinator = manager.coordinator
        full = getattr(coordinator, "full_attention_group_id", None)
        if full is None:
            return False
        last = request.num_tokens - 1
        _, hits = coordinator.find_longest_cache_hit_per_group(request.block_hashes, last)
        num_on_gpu = hits[full] // self._block_size * self._block_size
        if max(hits) > hits[full] or min(hits) >= num_on_gpu:
            return False
        record = self._requests.get(request.request_id)
        if record is not None and record.get is not None and record.get.num_computed < num_on_gpu:
            return False  # nothing was found behind that
        return bool(self.num_matched_tokens(request, num_on_gpu)[0])

    def _may_run_in_step(self, request: Any, get: Get) -> bool:
        """Return whether a load may run within the step, as far as DRAM and the GPU have room for
        its blocks, and by the time that it takes."""
        num_loaded = get.num_tokens
        num_left = request.num_tokens - get.num_computed - num_loaded
        if not num_left or get.sources.keys() != {TierName.CPU} or get.name.adapter:
            return False
        pool = self.early_loads.block_pool
        num_blocks = (request.num_tokens - get.num_computed) // self._block_size
        if pool is not None and pool.get_num_free_blocks() < num_blocks:
            return False  # vLLM would not allocate them
        if self.layerwise.allows(request.request_id):
            return True
        is_open = self.layerwise.depends_on_times
        return is_open and self.budget.has_room(num_loaded, num_left, time.monotonic())

    def _open_get(
        self, request: Any, record: RequestRecord, num_computed: int, name: RequestName
    ) -> Get | None:
        """Return the request's get for the tokens after ``num_computed``, if it has one."""
        get = record.get
        if get is not None:
            is_fresh = time.monotonic() - get.matched_s < self._match_ttl_s / 2
            is_same = get.num_computed == num_computed and get.name is name
            if get.launched or (is_same and is_fresh):
                return get
            self._cancel(record)
        if record.has_lost_load:
            return None
        # What windows and states need to compute the last token again ends before that token.
        last = request.num_tokens - self._tables.has_tails
        record.get = self._match(request, record, num_computed, last)
        return record.get

    def _match(
        self, request: Any, record: RequestRecord, num_computed: int, num_tokens: int
    ) -> Get | None:
        """Open a get; None if the call failed, or the remote store has yet to answer."""
        now = time.monotonic()
        if now < record.again_s:
            return None
        asked_s = now if record.asked_s is None else record.asked_s
        if record.until_s is None:
            record.until_s = now + read_hints(request).wait_s
        look_up = now - asked_s <= self._lookup_timeout_s  # steps may take longer
        look_up |= now < record.until_s
        get = self._cache.match(request, num_computed, num_tokens, look_up, record.until_s)
        record.asked_s = asked_s if get is NoMatch.UNDECIDED else None
        is_awaited = record.asked_s is not None and now < record.until_s
        if is_awaited:  # else a prefill of seconds costs half a core, and many all of it
            record.again_s = now + _COMPUTED_AGAIN_S * max(
                1.0, len(self._requests) / _ASKED_AT_ONCE
            )
        # What is on its way early delays an answer, too.
        is_early = bool(self.early_loads.num_open) or is_awaited
        self._has_store |= get is NoMatch.UNDECIDED and not is_early
        if isinstance(get, NoMatch):
            return None
        self.has_matched = True
        self.early_loads.is_on |= self._may_load_early and not get.sources.keys() <= {TierName.CPU}
        return get

    def _withdraw(self, request_id: str) -> None:
        """Cancel a request's get, if vLLM has not acted on it."""
        record = self._requests.get(request_id)
        if record is not None and record.get is not None and not record.get.launched:
            self._cancel(record)

    def _cancel(self, record: RequestRecord) -> None:
        if record.get is not None:
            if record.get.num_tokens:  # else it has ended, as nothing was found
                self._cache.cancel(record.get.task_id)
            record.get = None

    # -- loads -----------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        """Launch the load of ``num_external`` tokens into the blocks that vLLM allocated."""
        request_id = request.request_id
        record = self._requests.setdefault(request_id, RequestRecord())
        get = record.get
        if get is not None and get.launched:
            return  # the second call for the same load
        if num_external == 0:
            self._cancel(record)
            return
        if get is not None and get.promised is not None:
            self._load_promised(request, record, get, tables, num_external)
            return
        if get is None or get.num_tokens != num_external:
            num_computed = 0 if get is None else get.num_computed
            self._cancel(record)
            get = self._match(request, record, num_computed, num_computed + num_external)
        launched = get is not None and self._launch(get, tables, num_external)
        if get is None or not launched:
            record.get, record.has_lost_load = None, True
        else:
            record.get, get.launched = get, True
            self.early_loads.loaded(request_id)
        start = 0 if get is None else get.num_computed
        task_id = get.task_id if get is not None and launched else None
        self._step.loads.append(self._load(request, task_id, tables, start, num_external))

    def _load_promised(
        self, request: Any, record: RequestRecord, get: Get, tables: Tables, num_external: int
    ) -> None:
        """Have the ranks load a promised get, or as much of it as vLLM wants, within the step."""
        start, size = get.num_computed, self._block_size
        block_ids = list(tables[0][start // size : (start + num_external) // size])
        self._step.loads.append(
            Load(request.request_id, get.task_id, block_ids, promised=get.promised)
        )
        self._step.counts_on_ranks = True
        self.budget.add(num_external, request.num_tokens - start - num_external)
        get.launched = True
        self.early_loads.loaded(request.request_id)

    def _launch(self, get: Get, tables: Tables, num_external: int) -> bool:
        """Start a get; without groups, one for which less was found than vLLM was promised too."""
        blocks, stop = None, get.num_computed + get.num_tokens
        if get.num_tokens == num_external or not self._tables.has_groups:
            blocks = self._tables.to_load(tables, get.num_computed, stop)
        if blocks is None:
            self._cache.cancel(get.task_id)
        return blocks is not None and self._cache.launch(get.task_id, blocks)

    def _load(
        self, request: Any, task_id: int | None, tables: Tables, start: int, num_tokens: int
    ) -> Load:
        request_id, adapter = request.request_id, self._cache.names.use_of(request)
        num_blocks, first = num_tokens // self._block_size, start // self._block_size
        if self._tables.has_groups:
            return Load(request_id, task_id, [], num_needed=num_blocks, adapter=adapter)
        block_ids = list(tables[0][first : first + num_blocks])
        return Load(request_id, task_id, block_ids, adapter=adapter)

    def take_step(self, num_scheduled: Mapping[str, int]) -> Step:
        """Return the step that vLLM has scheduled, with so many tokens of each request."""
        self.layerwise.step(num_scheduled)
        self._look_up_early()
        self.early_loads.begin()
        self.budget.begin_step(len(num_scheduled))
        step, self._step = self._step, Step()
        step.num_tokens, step.launched_s = sum(num_scheduled.values()), time.monotonic()
        if not step.num_tokens:
            self._wait_idle(step.launched_s)
        for load in step.loads:
            if load.promised is not None:
                self._requests[load.request_id].get = None
        for request_id in self._promised:  # those that vLLM has not acted on
            if (record := self._requests.get(request_id)) is not None:
                self._cancel(record)
        self._promised.clear()
        self._under_way.append(step)
        self._let_ranks_leave()
        step.started = {each: True for each in self._arrived if each in num_scheduled}
        self._arrived.difference_update(step.started)
        gone, self._gone = self._gone, set()
        step.started |= dict.fromkeys(gone, False)
        return step

    def _wait_idle(self, now: float) -> None:
        """Give others the processor if all that there is to do is to wait for an answer."""
        waiting = [r for r in self._requests.values() if r.asked_s is not None]
        if waiting:  # spinning would delay the store's answer, or what the other engine computes
            is_computed = all(now < record.again_s for record in waiting)
            time.sleep(_IDLE_COMPUTED_S if is_computed else _IDLE_WAIT_S)

    def step_ended(self, now: float) -> Step | None:
        """Return the oldest of the steps: it has ended on every rank."""
        if not self._under_way:
            return None
        step = self._under_way.popleft()
        self._let_ranks_leave()
        self.budget.steps.ended(step.num_tokens, step.launched_s, now)
        return step

    def _let_ranks_leave(self) -> None:
        if not self.is_counting_on_ranks:
            self._cache.end_promises()

    @property
    def is_counting_on_ranks(self) -> bool:
        """Whether a load runs within a step that has not ended."""
        return any(step.counts_on_ranks for step in self._under_way)

    def transfers_ended(self, received: Collection[str]) -> None:
        """End gets. On all ranks, those between steps of the requests ``received`` have ended."""
        for request_id in received:
            record = self._requests.get(request_id)
            (self._gone if record is None else self._arrived).add(request_id)
            if record is None or record.get is None:
                continue
            get, record.get = record.get, None
            record.has_lost_load |= not self._cache.has_arrived(get.task_id, get.num_tokens)

    # -- ends ------------------------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """End a request; return whether the contents of its blocks are unknown."""
        request_id = request.request_id
        record = self._requests.get(request_id, RequestRecord())
        self.layerwise.finished(request_id)
        self.early.ended(request_id)
        self.early_loads.ended(request_id)
        if request_id in self._arrived:
            self._arrived.remove(request_id)
            self._gone.add(request_id)
        was_loading = record.get is not None and record.get.launched
        self._cancel(record)
        self._requests.pop(request_id, None)
        # If it was loading it is aborted; the workers report the load's end.
        return was_loading or request.status.name == "FINISHED_ERROR"

    def hit_sources(self, request_id: str) -> dict[TierName, int]:
        """Return how many tokens each tier supplies to the request's load."""
        record = self._requests.get(request_id)
        return {} if record is None or record.get is None else record.get.sources

    def cancel(self) -> None:
        """Withdraw all answers that vLLM has not acted on."""
        self.early_loads.cancel()
        for record in self._requests.values():
            if record.get is not None and not record.get.launched:
                self._cancel(record)

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        if self._requests or self._arrived or self.is_counting_on_ranks:
            raise InternalError(f"ended requests are still remembered: {list(self._requests)}")
