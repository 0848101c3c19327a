"""TensorRT-LLM's connector interface, wherever its release keeps it."""

from __future__ import annotations

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ModuleNotFoundError:  # before its connectors had a package
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
from tensorrt_llm._utils import mpi_rank

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker", "mpi_rank"]
