"""TensorRT-LLM's connector interface for machines that cannot have TensorRT-LLM, and an executor.

`install` puts it into `sys.modules` under TensorRT-LLM's module names. Names, parameters and which
methods are abstract are those of its releases from 1.2 on; `tests/system/test_trtllm_contract.py`
compares them with a wheel, where one is installed.

The executor calls a connector as TensorRT-LLM's does: ranks,
paged KV, a toy model. The toy model's KV of a token depends on all tokens before it, on what else
the request's KV depends on, on the layer and on the rank. Every token's KV is compared before a
step computes with it, and blocks are overwritten as soon as they are freed, so a block that is
wrong, late or read too late is noticed.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    cache_salt: str | None = None


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    """Runs on every rank."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    """Runs on rank 0."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def wait_for_initialization(self) -> None:
        return None


INTERFACE = (KvCacheConnectorWorker, KvCacheConnectorScheduler, RequestData, SchedulerOutput)
_ranks = {"next": 0}


def install() -> None:
    """Let ``import tensorrt_llm`` find this interface."""
    names = [PACKAGE.rsplit(".", depth)[0] for depth in range(PACKAGE.count("."), 0, -1)]
    for name in [*names, PACKAGE, "tensorrt_llm._utils"]:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    for content in INTERFACE:
        setattr(sys.modules[PACKAGE], content.__name__, content)
    sys.modules["tensorrt_llm._utils"].mpi_rank = lambda: _ranks["next"]  # type: ignore[attr-defined]


def become_rank(rank: int) -> None:
    """Let what is made from now on be of this rank."""
    _ranks["next"] = rank


BLOCK = 4
NUM_LAYERS = 3
NUM_BLOCKS = 48
WIDTH = 8
_FREED = -1


@dataclass(eq=False)
class Request:
    """What a connector reads of TensorRT-LLM's requests, and where this one stands."""

    request_id: int
    tokens: list[int]
    num_new: int = 3
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_lora_path: str | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_positions: list[int] | None = None
    prompt_embedding_table: Any = None
    local_tokens: int = 0
    """Tokens whose KV the engine finds in its own blocks."""
    state: str = "waiting"
    block_ids: list[int] = field(default_factory=list)
    context_current_position: int = 0
    num_matched: int = 0
    was_parked: bool = False
    was_reported: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def context_remaining_length(self) -> int:
        return max(0, self.prompt_len - self.context_current_position)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")


class Region:
    """V2's description of memory: bytes that repeat for each block."""

    def __init__(self, memory: torch.Tensor, buffers: Sequence[tuple[int, str]]) -> None:
        self._memory = memory
        self.buffers = [
            SimpleNamespace(layer_id=layer, role=role, expansion=1) for layer, role in buffers
        ]

    def as_tensor(self) -> torch.Tensor:
        return self._memory


class Rank:
    """One rank: a worker and its pool ``[blocks, layers, K and V, elements]``."""

    def __init__(self, number: int, worker: Any, is_v2: bool) -> None:
        self.number = number
        self.worker = worker
        shape = (NUM_BLOCKS, NUM_LAYERS, 2, BLOCK * WIDTH)
        self.pool = torch.full(shape, _FREED, dtype=torch.int32)
        if is_v2:
            memory = self.pool.view(NUM_BLOCKS, -1).view(torch.uint8)
            buffers = [(layer, role) for layer in range(NUM_LAYERS) for role in ("key", "value")]
            group = SimpleNamespace(
                layer_group_id=0, layer_ids=tuple(range(NUM_LAYERS)), window_size=None,
                regions=(Region(memory, buffers),), replicated_regions=(),
            )  # fmt: skip
            worker.register_kv_cache_layout(
                SimpleNamespace(tokens_per_block=BLOCK, groups=(group,))
            )
        else:
            worker.register_kv_caches(self.pool)
        worker.register_forward_pass_callable()

    def place(self, request: Request, position: int, layer: int) -> torch.Tensor:
        page = self.pool[request.block_ids[position // BLOCK], layer].view(2, BLOCK, WIDTH)
        return page[:, position % BLOCK]

    def content(self, request: Request, position: int, layer: int) -> int:
        """Return the toy model's KV of a token."""
        what = (request.tokens[: position + 1], request.cache_salt, request.lora_task_id,
                request.multimodal_hashes, layer, self.number)  # fmt: skip
        return zlib.crc32(repr(what).encode()) >> 1

    def compute(self, request: Request, positions: range, layer: int) -> None:
        """Compute tokens of a layer, from the KV of all tokens before them."""
        for position in range(positions.start):
            found = self.place(request, position, layer)
            expected = self.content(request, position, layer)
            assert bool((found == expected).all()), f"{request.request_id}: {position}, {layer}"
        for position in positions:
            self.place(request, position, layer).fill_(self.content(request, position, layer))


class Executor:
    """Steps all requests together; see the module.

    Args:
        modules: Has the connector's two classes.
        llm_args: TensorRT-LLM's arguments.
        is_v2: Whether KV is described by regions.
    """

    def __init__(self, modules: Any, llm_args: Any, is_v2: bool = False) -> None:
        self.scheduler = modules.FlexCacheConnectorScheduler(llm_args)
        workers = []
        for number in range(llm_args.tensor_parallel_size):
            become_rank(number)
            workers.append(modules.FlexCacheConnectorWorker(llm_args))
        become_rank(0)
        self.ranks = [Rank(number, worker, is_v2) for number, worker in enumerate(workers)]
        self.scheduler.wait_for_initialization()
        self.free = list(range(NUM_BLOCKS))
        self.active: list[Request] = []
        self._new_loading: dict[int, Request] = {}
        self._new_saving: dict[int, Request] = {}
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self._saved = [set[int]() for _ in self.ranks]
        self._loaded = [set[int]() for _ in self.ranks]
        self._threads = ThreadPoolExecutor(len(self.ranks))

    def close(self) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()
        self.scheduler.shutdown()

    def add(self, request: Request) -> Request:
        self.active.append(request)
        return request

    def run(self, *requests: Request) -> None:
        """Serve requests until each has ended and its blocks are free."""
        for request in requests:
            self.add(request)
        self.step_until(lambda: all(request.is_over for request in requests))

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200_000):
            if condition():
                return
            self.step()
        raise AssertionError("it did not come about")

    def step(self) -> None:
        for request in [r for r in self.active if r.state == "waiting"]:
            self.admit(request)
        batch = [r for r in self.active if r.state in ("context", "generation")]
        metadata = self.scheduler.build_connector_meta(self._report(batch))
        batch = [r for r in batch if r.request_id not in self._new_loading]
        sent = pickle.dumps(metadata)  # as it reaches the other ranks
        self._on_ranks(lambda rank: rank.worker.bind_connector_meta(pickle.loads(sent)))
        self._on_ranks(lambda rank: rank.worker.start_load_kv(None))
        if batch:
            try:
                self._on_ranks(lambda rank: self._forward(rank, batch))
            except AssertionError:
                raise
            except Exception as error:
                self._fail(batch, error)
                batch = []
            self._on_ranks(lambda rank: rank.worker.wait_for_save(None))
        for request in batch:
            self._sample(request)
        self._poll()

    def abort(self, request: Request) -> None:
        """End a request, as when its client goes away."""
        self._end(request)

    # -- a step ----------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Allocate a request's blocks, if there are enough."""
        count = -(-(request.prompt_len + request.num_new) // BLOCK)
        if count > len(self.free):
            return
        num_tokens, is_parked = self.scheduler.get_num_new_matched_tokens(
            request, request.local_tokens
        )
        assert num_tokens or not is_parked
        request.block_ids = [self.free.pop(0) for _ in range(count)]
        for rank in self.ranks:
            freed = rank.pool[request.block_ids]
            assert bool((freed == _FREED).all()), "a block was written after it was freed"
        for rank in self.ranks:
            for layer in range(NUM_LAYERS):
                rank.compute(request, range(request.local_tokens), layer)
        request.num_matched, request.was_parked = num_tokens, is_parked
        request.context_current_position = request.local_tokens + num_tokens
        request.state = "context"
        if is_parked:
            self._new_loading[request.request_id] = request
        self.scheduler.update_state_after_alloc(request, list(request.block_ids))

    def _report(self, batch: Sequence[Request]) -> SchedulerOutput:
        output = SchedulerOutput()
        for request in batch:
            if request.request_id in self._new_loading:
                request.state = "parked"
                continue
            at = request.context_current_position
            data = RequestData(request.request_id, request.tokens, request.block_ids, at, 1)
            (output.cached_requests if request.was_reported else output.new_requests).append(data)
            request.was_reported = True
        return output

    def _forward(self, rank: Rank, batch: Sequence[Request]) -> None:
        for layer in range(NUM_LAYERS):
            rank.worker.wait_for_layer_load(layer, None)
            for request in batch:
                is_context = request.state == "context"
                begin = request.context_current_position if is_context else len(request.tokens) - 1
                rank.compute(request, range(begin, len(request.tokens)), layer)
            rank.worker.save_kv_layer(layer, None)

    def _sample(self, request: Request) -> None:
        request.state = "generation"
        request.context_current_position = request.prompt_len
        request.tokens.append(sum(request.tokens) % 97)
        if len(request.tokens) - request.prompt_len >= request.num_new:
            self._end(request)

    def _fail(self, batch: Sequence[Request], error: Exception) -> None:
        for request in batch:
            self._end(request)
            request.state = "failed" if request.state == "done" else "failing"
            request.error = error  # type: ignore[attr-defined]

    def _end(self, request: Request) -> None:
        self.active.remove(request)
        if request.state == "waiting":
            request.state = "done"
            return
        if self.scheduler.request_finished(request, list(request.block_ids)):
            request.state = "saving"
            self._new_saving[request.request_id] = request
        else:
            self._release(request)

    def _poll(self) -> None:
        saving, loading = list(self._new_saving), list(self._new_loading)
        self.saving |= self._new_saving
        self.loading |= self._new_loading
        self._new_saving, self._new_loading = {}, {}
        for number, rank in enumerate(self.ranks):
            saved, loaded = rank.worker.get_finished(saving, loading)
            assert set(saved) <= self.saving.keys()
            assert set(loaded) <= self.loading.keys()
            self._saved[number].update(saved)
            self._loaded[number].update(loaded)
        for request_id in set.intersection(*self._loaded):
            request = self.loading.pop(request_id)
            if request.state == "parked":
                request.state = "context"
            for loaded_on in self._loaded:
                loaded_on.discard(request_id)
        for request_id in set.intersection(*self._saved):
            self._release(self.saving.pop(request_id))
            for saved_on in self._saved:
                saved_on.discard(request_id)

    def _release(self, request: Request) -> None:
        request.state = "failed" if request.state == "failing" else "done"
        for rank in self.ranks:
            rank.pool[request.block_ids] = _FREED
        self.free += request.block_ids

    def _on_ranks(self, call: Callable[[Rank], object]) -> None:
        for done in [self._threads.submit(call, rank) for rank in self.ranks]:
            done.result()
