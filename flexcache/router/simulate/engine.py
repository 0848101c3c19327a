"""Engine of a simulation: chunked prefill in order of arrival, beside a batch of decoding requests.

    step = base + prefill*u + attention*u*context + sequence*running + kv*tokens in use

Nothing is preempted: a request starts once there is room for its prompt and its whole answer.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from flexcache.errors import InternalError
from flexcache.router.simulate.workload import SimRequest


class EngineCache:
    """Blocks by key. Those of running requests are pinned; the others go in LRU order.

    Args:
        num_gpu: Blocks on the GPU, for cached and running requests together.
        num_dram: Blocks in DRAM, which get what is computed as soon as it is.
    """

    def __init__(self, num_gpu: int, num_dram: int = 0) -> None:
        self._num_gpu = num_gpu
        self._num_dram = num_dram
        self._pins: dict[Hashable, int] = {}
        self._unpinned: OrderedDict[Hashable, None] = OrderedDict()  # on the GPU, oldest first
        self._dram: OrderedDict[Hashable, None] = OrderedDict()
        self._num_private = 0  # blocks reserved and not cached yet

    def match(self, keys: Sequence[Hashable]) -> tuple[int, int]:
        """Return how many blocks of a prompt the GPU holds, and how many more DRAM supplies."""
        pins, unpinned, dram = self._pins, self._unpinned, self._dram
        on_gpu = total = len(keys)
        for i, key in enumerate(keys):
            if key not in pins and key not in unpinned:
                on_gpu = i
                break
        in_dram = 0
        while on_gpu + in_dram < total and keys[on_gpu + in_dram] in dram:
            in_dram += 1
        return on_gpu, in_dram

    def reserve(self, cached: Sequence[Hashable], num_new: int) -> bool:
        """Pin blocks that are on the GPU, and make room for new ones; returns whether it fits."""
        idle = sum(key in self._unpinned for key in cached)
        if len(self._pins) + idle + self._num_private + num_new > self._num_gpu:
            return False
        for key in cached:
            self._pin(key)
        self._num_private += num_new
        excess = len(self._pins) + len(self._unpinned) + self._num_private - self._num_gpu
        for _ in range(excess):
            self._unpinned.popitem(last=False)
        return True

    def load(self, keys: Sequence[Hashable], start: int) -> None:
        """Copy blocks from DRAM into reserved ones; those before ``start`` are on the GPU."""
        for key in reversed(keys):
            if key in self._dram:
                self._dram.move_to_end(key)
        self.computed(keys[start:])

    def computed(self, keys: Sequence[Hashable]) -> None:
        """Cache reserved blocks under their keys, pinned."""
        for key in keys:
            self._pin(key)
        self._num_private -= len(keys)
        self._write_to_dram(keys)

    def release(self, keys: Sequence[Hashable], num_private: int) -> None:
        """Unpin the blocks of a request that ended, and free those that were never cached."""
        self._num_private -= num_private
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                del self._pins[key]
                self._unpinned[key] = None

    def _pin(self, key: Hashable) -> None:
        pins = self._pins.get(key)
        if pins is None:
            self._unpinned.pop(key, None)
            self._pins[key] = 1
        else:
            self._pins[key] = pins + 1

    def _write_to_dram(self, keys: Sequence[Hashable]) -> None:
        if not self._num_dram:
            return
        for key in reversed(keys):
            self._dram[key] = None
            self._dram.move_to_end(key)
        while len(self._dram) > self._num_dram:
            self._dram.popitem(last=False)

    def check(self) -> None:
        """Verify that the blocks fit.

        Raises:
            InternalError: They do not.
        """
        used = len(self._pins) + len(self._unpinned) + self._num_private
        if used > self._num_gpu or self._num_private < 0 or len(self._dram) > self._num_dram:
            raise InternalError(f"{used} of {self._num_gpu} blocks, {self._num_private} private")
        if self._pins.keys() & self._unpinned.keys():
            raise InternalError("a block is pinned and unpinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Speed and size of an engine; by default about a 70B model on four H100.

    Attributes:
        step_s: Seconds of a step; the others add to it.
        prefill_s: Per token of prefill.
        attention_s: Per token of prefill and token of its context.
        sequence_s: Per decoding request.
        kv_s: Per token of their contexts.
        dram_token_s: Per token loaded from DRAM.
        max_prefill_tokens: Of a step.
        gpu_blocks: Blocks of the KV cache on the GPU; ``dram_blocks`` likewise, 0: none.
        slowdown: Factor of all times.
    """

    step_s: float = 18e-3
    prefill_s: float = 83e-6
    attention_s: float = 2.2e-9
    sequence_s: float = 80e-6
    kv_s: float = 35e-9
    dram_token_s: float = 4e-3 / 512
    max_prefill_tokens: int = 8192
    gpu_blocks: int = 900
    dram_blocks: int = 0
    slowdown: float = 1.0


@dataclass(slots=True)
class _InStep:
    request: SimRequest
    num_computed: int  # tokens of the prompt whose KV is there
    num_cached: int  # blocks of it under their keys
    num_private: int


class Engine:
    """Advances in steps; `next_end_s` is when something of interest happens.

    Attributes:
        next_end_s: End of the current step, or of the last of several steps that only decode;
            infinite while idle.
        hits: Cached tokens of each request that has started, until they are taken.
    """

    def __init__(self, spec: EngineSpec, block_tokens: int) -> None:
        self.spec = spec
        self.cache = EngineCache(spec.gpu_blocks, spec.dram_blocks)
        self.next_end_s = math.inf
        self.hits: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._waiting: deque[SimRequest] = deque()
        self._prefilling: deque[_InStep] = deque()
        self._decoding: list[tuple[int, int, _InStep]] = []  # heap by the step of the last token
        self._kv_tokens = 0  # contexts of the decoding requests
        self._steps = 0
        self._number = 0
        self._chunks: list[tuple[_InStep, int]] = []  # of the current step
        self._began_s = 0.0
        self._planned_steps = 0

    def fits(self, request: SimRequest) -> bool:
        """Return whether a request, alone, has room for its prompt and its answer."""
        return self._blocks_of(request) <= self.spec.gpu_blocks

    def match(self, request: SimRequest) -> tuple[int, int]:
        """Return how many tokens of a prompt are on the GPU, and how many DRAM adds.

        The last token is always computed.
        """
        blocks = self._block_tokens
        usable = min(len(request.keys), (request.num_tokens - 1) // blocks)
        on_gpu, in_dram = self.cache.match(request.keys)
        on_gpu = min(on_gpu, usable)
        in_dram = min(in_dram, usable - on_gpu)
        return on_gpu * blocks, in_dram * blocks

    def add(self, request: SimRequest, now: float) -> None:
        """Receive a request that fits."""
        self._waiting.append(request)
        if math.isinf(self.next_end_s):
            self._plan(now)
        elif not self._chunks and len(self._waiting) == 1:
            self._interrupt(now)

    def advance(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """End the current step and plan the next.

        Returns:
            Requests that have their first token, and requests that ended.
        """
        now = self.next_end_s
        self._decode(self._planned_steps)
        started = []
        for running, num_tokens in self._chunks:
            self._computed(running, num_tokens)
            if running.num_computed == running.request.num_tokens:
                self._prefilling.popleft()
                self._start_decoding(running)
                started.append(running.request)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            running = heapq.heappop(self._decoding)[2]
            self._kv_tokens -= running.request.num_tokens + running.request.output_tokens
            keys = running.request.keys[: running.num_cached]
            self.cache.release(keys, running.num_private)
            ended.append(running.request)
        self._plan(now)
        return started, ended

    def _plan(self, now: float) -> None:
        """Plan the step that begins now; many at once while there is nothing to prefill."""
        self._began_s, self._planned_steps, self._chunks = now, 1, []
        load_s = self._admit()
        if self._prefilling:
            self.next_end_s = now + load_s + self._plan_prefill()
        elif self._decoding:
            self._planned_steps = self._decoding[0][0] - self._steps
            self.next_end_s = now + self._decode_s(self._planned_steps)
        else:
            self.next_end_s = math.inf

    def _admit(self) -> float:
        """Start waiting requests while there is room; returns the time of their loads."""
        budget = self.spec.max_prefill_tokens
        budget -= sum(r.request.num_tokens - r.num_computed for r in self._prefilling)
        load_s = 0.0
        while self._waiting and budget > 0:
            request = self._waiting[0]
            gpu_tokens, dram_tokens = self.match(request)
            on_gpu, in_dram = gpu_tokens // self._block_tokens, dram_tokens // self._block_tokens
            num_new = self._blocks_of(request) - on_gpu
            if not self.cache.reserve(request.keys[:on_gpu], num_new):
                break
            self._waiting.popleft()
            self.cache.load(request.keys[: on_gpu + in_dram], on_gpu)
            load_s += dram_tokens * self.spec.dram_token_s * self.spec.slowdown
            num_computed = self.hits[request.request_id] = gpu_tokens + dram_tokens
            self._prefilling.append(
                _InStep(request, num_computed, on_gpu + in_dram, num_new - in_dram)
            )
            budget -= request.num_tokens - num_computed
        return load_s

    def _plan_prefill(self) -> float:
        """Distribute the step's tokens over the prompts in order; returns the step's time."""
        spec, budget, seconds = self.spec, self.spec.max_prefill_tokens, 0.0
        for running in self._prefilling:
            num_tokens = min(budget, running.request.num_tokens - running.num_computed)
            if not num_tokens:
                break
            budget -= num_tokens
            self._chunks.append((running, num_tokens))
            context = running.num_computed + num_tokens / 2
            seconds += num_tokens * (spec.prefill_s + spec.attention_s * context)
        return self._decode_s(1) + seconds * spec.slowdown

    def _decode_s(self, num_steps: int) -> float:
        """Return the time of steps in which only the present requests decode."""
        spec, running = self.spec, len(self._decoding)
        kv_tokens = num_steps * self._kv_tokens + running * num_steps * (num_steps - 1) / 2
        seconds = num_steps * (spec.step_s + spec.sequence_s * running) + spec.kv_s * kv_tokens
        return seconds * spec.slowdown

    def _interrupt(self, now: float) -> None:
        """Cut a row of decoding steps short at the end of the step that is running."""
        low, high = 1, self._planned_steps
        while low < high:
            middle = (low + high) // 2
            if self._began_s + self._decode_s(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._planned_steps = low
        self.next_end_s = self._began_s + self._decode_s(low)

    def _decode(self, num_steps: int) -> None:
        self._steps += num_steps
        self._kv_tokens += num_steps * len(self._decoding)

    def _computed(self, running: _InStep, num_tokens: int) -> None:
        running.num_computed += num_tokens
        num_full = min(running.num_computed // self._block_tokens, len(running.request.keys))
        self.cache.computed(running.request.keys[running.num_cached : num_full])
        running.num_private -= num_full - running.num_cached
        running.num_cached = num_full

    def _start_decoding(self, running: _InStep) -> None:
        """The first token is there; each further step yields one."""
        self._number += 1
        last = self._steps + running.request.output_tokens - 1
        heapq.heappush(self._decoding, (last, self._number, running))
        self._kv_tokens += running.request.num_tokens + 1

    def _blocks_of(self, request: SimRequest) -> int:
        return -(-(request.num_tokens + request.output_tokens) // self._block_tokens)

    def check(self) -> None:
        """Verify the sums.

        Raises:
            InternalError: They are wrong.
        """
        self.cache.check()
