"""A manager and its ranks in one process, with KV tensors that look like an engine's."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from flexcache import CacheConfig, KVManager, KVResponse, KVTPClient, ModelConfig
from flexcache.client.transport import LocalTransport
from flexcache.ids import OpKind
from flexcache.server.server import KVServer

NUM_GPU_BLOCKS = 64
PATIENCE_S = 120.0
"""What a test waits for happens in this time even on a machine that is busy with other work."""
READY_S = WAIT_S = PATIENCE_S
NO_HANG_S = 20.0
"""No call may take longer. 5 s is promised; the rest is for a machine that is busy."""


class EngineMemory(Protocol):
    """Where the KV tensors are, if not where they were made; see `engine_memory`."""

    def place(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def lend(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Kill a process that need not be a child, and wait for its end."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], PATIENCE_S)[0]
    os.close(pidfd)


class Cluster:
    """One engine: `manager`, a client per rank, and each rank's KV tensors."""

    def __init__(
        self,
        model: ModelConfig,
        config: CacheConfig,
        make_kv: Callable[[ModelConfig, int], dict[str, torch.Tensor]],
        block_dim: int = 0,
        layout_description: str = "",
        memory: EngineMemory | None = None,
        engine_polls: bool = False,
        head_dim: int | None = None,
    ) -> None:
        self.config = config
        self._head_dim = head_dim
        self._engine_polls = engine_polls
        self._lend = memory.lend if memory is not None else dict
        self.block_dim = block_dim
        self.layout_description = layout_description
        self.manager = KVManager(model, config)
        place = memory.place if memory is not None else dict
        self.kv = [place(make_kv(model, config.tokens_per_block)) for _ in range(model.num_ranks)]
        self.clients: list[KVTPClient] = []

    @property
    def server(self) -> KVServer:
        """The server inside the manager's own process."""
        transport = self.manager._transport
        assert isinstance(transport, LocalTransport)
        return transport.server

    def start(self) -> None:
        self.manager.start()
        for rank, kv in enumerate(self.kv):
            self.add_client(rank, kv)
        self.manager.wait_ready(READY_S)

    def add_client(self, rank: int, kv: dict[str, torch.Tensor]) -> KVTPClient:
        client = KVTPClient(
            self.manager.endpoint,
            rank=rank,
            curve_keys=self.config.curve_keys,
            server_timeout_s=self.config.server_timeout_s,
            engine_polls=self._engine_polls,
        )
        client.register_kv_caches(
            self._lend(kv),
            block_dim=self.block_dim,
            layout_description=self.layout_description,
            head_dim=self._head_dim,
        )
        self.clients.append(client)
        return client

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.manager.shutdown()

    def slots(self, gpu_blocks: Sequence[int]) -> np.ndarray:
        size = self.config.tokens_per_block
        return (np.asarray(gpu_blocks)[:, None] * size + np.arange(size)).ravel()

    def read(self, gpu_blocks: Sequence[int]) -> list[bytes]:
        """Bytes of the blocks, rank by rank and layer by layer."""
        return [
            as_bytes(tensor.select(self.block_dim, block))
            for kv in self.kv
            for tensor in kv.values()
            for block in gpu_blocks
        ]

    def wipe(self, gpu_blocks: Sequence[int]) -> None:
        for kv in self.kv:
            for tensor in kv.values():
                for block in gpu_blocks:
                    tensor.select(self.block_dim, block).zero_()

    def put(self, tokens: Sequence[int] | np.ndarray, gpu_blocks: Sequence[int]) -> KVResponse:
        """Store whole blocks and wait for every tier."""
        size = self.config.tokens_per_block
        tokens = tokens[: len(gpu_blocks) * size]
        task_id, _ = self.manager.put_async(tokens, self.slots(gpu_blocks))
        return self.manager.wait([task_id], WAIT_S, completely=True)[task_id]

    def get(self, tokens: Sequence[int] | np.ndarray, gpu_blocks: Sequence[int]) -> KVResponse:
        size = self.config.tokens_per_block
        tokens = tokens[: len(gpu_blocks) * size]
        task_id, _ = self.manager.get_async(tokens, self.slots(gpu_blocks))
        return self.manager.wait([task_id], WAIT_S, completely=True)[task_id]

    def await_copy_thread(self) -> None:
        """Wait until each rank's native thread makes copies: its loop is compiled first."""

        def is_ready(client: KVTPClient) -> bool:
            assert client._worker is not None
            with client._ops._turn:
                return client._worker._copier.queue(OpKind.D2H) is not None

        until(lambda: all(map(is_ready, self.clients)))

    def num_leased(self) -> int:
        return sum(int(tier["leased"]) for tier in self.manager.stats()["tiers"].values())


def ops(cluster: Cluster) -> dict[str, int]:
    """Blocks that each kind of op has moved, if any."""
    found = {kind: op["blocks"] for kind, op in cluster.manager.stats()["ops"].items()}
    return {kind: blocks for kind, blocks in found.items() if blocks}


def load_by_layer(
    cluster: Cluster, tokens: Sequence[int] | np.ndarray, blocks: Sequence[int]
) -> list[bytes]:
    """Load a prompt by layer; return its blocks, as in `Cluster.read`, each layer's as found when
    the engine has waited for it."""
    task_id, mask = cluster.manager.get_match(tokens)
    assert mask.all()
    cluster.manager.launch([task_id], [cluster.slots(blocks)], gated=True)
    load = cluster.clients[0].load_by_layer(task_id, len(blocks))
    found = []
    for name, layer in cluster.kv[0].items():
        assert load.wait_layer(name, 60)
        found += [as_bytes(layer[block]) for block in blocks]
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def random_like(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def joined_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    """A tensor per layer: blocks, K and V, tokens, heads, head."""
    heads = max(1, model.num_kv_heads // model.tp_size)
    shape = (NUM_GPU_BLOCKS, 2, tokens, heads, model.head_size)
    return {f"layer.{i}": random_like(*shape, dtype=model.dtype) for i in range(model.num_layers)}


def heads_first_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    """As `joined_kv`, but with heads before tokens."""
    kv = joined_kv(model, tokens)
    return {name: tensor.transpose(2, 3).contiguous() for name, tensor in kv.items()}


@contextmanager
def running_cluster(
    ssd_dirs: Sequence[Path] = (),
    *,
    model: ModelConfig | None = None,
    make_kv: Callable[[ModelConfig, int], dict[str, torch.Tensor]] = joined_kv,
    block_dim: int = 0,
    layout_description: str = "",
    memory: EngineMemory | None = None,
    engine_polls: bool = False,
    head_dim: int | None = None,
    **settings: object,
) -> Iterator[Cluster]:
    """A cluster with an SSD tier if directories are given; checked and stopped at the end."""
    model = model or ModelConfig("test", 3, 4, 32, torch.bfloat16)
    arguments: dict[str, object] = {"num_cpu_blocks": 48, **settings}
    if ssd_dirs:
        arguments.setdefault("num_ssd_blocks", 96)
        arguments["ssd_cache_dirs"] = [str(path) for path in ssd_dirs]
    arguments.setdefault("transfer_chunk_mb", 0.05)
    cluster = Cluster(model, CacheConfig(**arguments), make_kv, block_dim,  # type: ignore[arg-type]
                      layout_description, memory, engine_polls, head_dim)  # fmt: skip
    try:
        cluster.start()
        yield cluster
        cluster.manager.check()
    finally:
        cluster.stop()
