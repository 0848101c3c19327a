"""TensorRT-LLM's connector interface, for machines that cannot have TensorRT-LLM.

`install` puts it into `sys.modules` under TensorRT-LLM's module names. Names, parameters and which
methods are abstract are those of its releases from 1.2 on; `tests/system/test_trtllm_contract.py`
compares them with a wheel, where one is installed.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
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
