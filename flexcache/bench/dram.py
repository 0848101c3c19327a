"""DRAM tier on the CPU device: store and retrieve, compared with one memcpy of the same bytes.

Times are from the call to the end of the wait: tokens are hashed, blocks are found or evicted and
leased, ops are sent and answered, and every layer's part of every block is copied from or to
scattered places. Prompts are new each round and the tier is full, so that every store evicts.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from flexcache.bench.suite import Case, Result, rates, sample_beside
from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.ids import KVStatus
from flexcache.manager import KVManager

TOKENS_PER_BLOCK = 16
_HEAD_SIZE = 256
_READY_S = 60.0
_DONE_S = 60.0
Order = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]


class CpuEngine:
    """An engine with ``num_blocks`` blocks over ``num_layers`` tensors, laid out like vLLM's.

    Args:
        run_bytes: Bytes of one block in one layer, a multiple of 8 KiB.
        settings: Settings of the cache, including its size.
    """

    def __init__(
        self, num_layers: int, run_bytes: int, num_blocks: int, seed: int, **settings: object
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = num_layers * run_bytes
        self.num_bytes = self.block_bytes * num_blocks
        heads = run_bytes // (2 * TOKENS_PER_BLOCK * _HEAD_SIZE)
        self.rng = np.random.default_rng(seed)
        random = torch.Generator().manual_seed(seed)
        words = torch.empty(self.num_bytes // 8, dtype=torch.int64).random_(generator=random)
        self.memory = words.view(torch.uint8)
        shape = (num_blocks, 2, TOKENS_PER_BLOCK, heads, _HEAD_SIZE)
        layers = self.memory.view(num_layers, num_blocks * run_bytes)
        self.layers = [layers[i].view(shape) for i in range(num_layers)]
        model = ModelConfig("bench", num_layers, heads, _HEAD_SIZE, torch.uint8)
        config = CacheConfig(**{"skip_useless_ssd_writes": False, **settings})  # type: ignore[arg-type]
        self.manager = KVManager(model, config)
        self.manager.start()
        self._rank = KVTPClient(self.manager.endpoint)
        self._rank.register_kv_caches({f"layer.{i}": kv for i, kv in enumerate(self.layers)})
        try:
            self.manager.wait_ready(_READY_S)
        except BaseException:
            self.close()
            raise

    def prompt(self, num_blocks: int) -> Tokens:
        """Return tokens that share no prefix with another prompt."""
        return self.rng.integers(0, 1 << 40, num_blocks * TOKENS_PER_BLOCK)

    def order(self) -> Order:
        """Return all of the engine's blocks in random order."""
        return self.rng.permutation(self.num_blocks)

    def store(self, prompts: Sequence[Tokens], order: Order, *, completely: bool = False) -> None:
        """Put prompts from consecutive parts of ``order``; return once all have been copied."""
        self._run(self.manager.put_async, prompts, order, 0, completely)

    def load(self, prompts: Sequence[Tokens], order: Order, num_skipped: int = 0) -> None:
        """Get prompts back, without the first ``num_skipped`` blocks of each."""
        self._run(self.manager.get_async, prompts, order, num_skipped, False)

    def _run(
        self, call: object, prompts: Sequence[Tokens], order: Order,
        num_skipped: int, completely: bool,
    ) -> None:  # fmt: skip
        assert callable(call)
        started, at = {}, 0
        for tokens in prompts:
            wanted = range(num_skipped * TOKENS_PER_BLOCK, len(tokens))
            count = len(tokens) // TOKENS_PER_BLOCK - num_skipped
            task, mask = call(tokens, _slots(order[at : at + count]), wanted)
            if mask.sum() != count * TOKENS_PER_BLOCK:
                raise AssertionError(f"{mask.sum()} of {count * TOKENS_PER_BLOCK} tokens move")
            started[task] = mask
            at += count
        for task, answer in self.manager.wait(list(started), _DONE_S, completely).items():
            if answer.status is not KVStatus.SUCCESS or (answer.mask != started[task]).any():
                raise AssertionError(f"{answer.status.value}: {answer.error}")

    def check_blocks(self, order: Order, reference: torch.Tensor, its_order: Order) -> None:
        """Raise unless blocks ``order`` equal blocks ``its_order`` in a copy of `memory`."""
        shape = (len(self.layers), self.num_blocks, -1)
        for mine, other in zip(self.memory.view(shape), reference.view(shape), strict=True):
            if not torch.equal(mine[order], other[its_order]):
                raise AssertionError("the bytes differ from those stored")

    def close(self) -> None:
        self._rank.close()
        self.manager.shutdown()

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _slots(blocks: Order) -> npt.NDArray[np.int64]:
    return (blocks[:, None] * TOKENS_PER_BLOCK + np.arange(TOKENS_PER_BLOCK)).ravel()


def copy_at_once(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy everything with one memcpy."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)


KIB = 1 << 10
ROUND_BYTES = 512 << 20
SHAPES = {"64 KiB": (4, 16 * KIB), "400 KiB": (25, 16 * KIB), "2 MiB": (32, 64 * KIB),
          "4 MiB": (32, 128 * KIB)}  # fmt: skip
"""Number of layers and bytes per block in each, by the size of a block of 16 tokens."""
TO_REACH = {"2 MiB": 0.9}
_ROUNDS_TO_FILL = 2


def cases(thorough: bool, seed: int) -> list[Case]:
    rounds = 40 if thorough else 6
    # How many requests share the bytes of a round; rounding down to whole requests may drop some.
    requests = {"2 MiB": (1, 64), "64 KiB": (1, 64)} if thorough else {"2 MiB": (1, 64)}
    return [
        Case(
            f"{size} blocks, {'one request' if count == 1 else f'{count} requests'}",
            partial(transfers, size, count, rounds, seed),
        )
        for size in SHAPES
        for count in requests.get(size, (1,))
    ]


def transfers(size: str, num_requests: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure store and retrieve of blocks of one size, alternating with memcpy."""
    layers, run_bytes = SHAPES[size]
    num_blocks = ROUND_BYTES // (layers * run_bytes) // num_requests * num_requests
    with CpuEngine(layers, run_bytes, num_blocks, seed, num_cpu_blocks=2 * num_blocks) as engine:
        copy = torch.ones_like(engine.memory)
        order, other_order = engine.order(), engine.order()
        prompts = _check(engine, copy, num_requests, order, other_order)

        faults: list[int] = []

        def counted(call: Callable[[Sequence[Tokens], Order], None], order: Order) -> None:
            before = resource.getrusage(resource.RUSAGE_SELF)
            call(prompts, order)
            after = resource.getrusage(resource.RUSAGE_SELF)
            faults.append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)

        def renew() -> None:
            prompts[:] = [engine.prompt(num_blocks // num_requests) for _ in prompts]

        def result(name: str, call: Callable[[], None], undo: Callable[[], None]) -> Result:
            faults.clear()
            sampled = sample_beside(
                call, partial(copy_at_once, copy, engine.memory), lambda _: undo(), rounds,
                _ROUNDS_TO_FILL, scale=1,
            )  # fmt: skip
            note = f"{int(np.median(faults[_ROUNDS_TO_FILL:]))} page faults per round"
            reach = TO_REACH.get(size)
            return rates(name, engine.num_bytes, sampled, "one memcpy", reach=reach, note=note)

        renew()
        yield result("store", partial(counted, engine.store, order), renew)
        engine.store(prompts, order)
        yield result("retrieve", partial(counted, engine.load, other_order), lambda: None)


def _check(
    engine: CpuEngine, copy: torch.Tensor, num_requests: int, order: np.ndarray,
    other_order: np.ndarray,
) -> list[np.ndarray]:  # fmt: skip
    """Check that the bytes come back, each block to a different place; return the prompts."""
    prompts = [engine.prompt(engine.num_blocks // num_requests) for _ in range(num_requests)]
    copy_at_once(copy, engine.memory)
    engine.store(prompts, order)
    engine.memory.zero_()
    engine.load(prompts, other_order)
    engine.check_blocks(other_order, copy, order)
    return prompts
