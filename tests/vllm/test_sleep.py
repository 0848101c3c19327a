"""Sleep mode of vLLM 0.33 and later: no copy touches KV memory that is gone, and nothing is lost.

No build of that version runs without a GPU. The worker's side is real; memory that vLLM would unmap
is protected instead, so that any access would crash.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cluster import until
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flexcache import CacheConfig, KVManager, KVStatus, ModelConfig
from flexcache.client import lent_tensors as attachment
from flexcache.client import rank
from flexcache.ids import OpKind
from flexcache.integration.vllm.worker import FlexCacheMetadata, FlexCacheWorker, Load
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import Runs

pytestmark = pytest.mark.newest
BLOCK, NUM_BLOCKS, LAYERS = 16, 24, 3
SHAPE = (NUM_BLOCKS, 2, BLOCK, 2, 16)
LAYER_BYTES = int(np.prod(SHAPE)) * 2
MODEL = ModelConfig("test", LAYERS, 2, 16, torch.bfloat16)
TOKENS = np.arange(8 * BLOCK)
HERE, THERE = slice(0, 8), slice(8, 16)
WAIT_S = 60.0
_NOTHING, _READ_AND_WRITE = 0, 3


class Copier:
    """Copies with memmove, and needs no compiler: vLLM cannot start in a process that has one.

    Attributes:
        may_close: Closing waits for this.
    """

    numa_node = None
    wakes = False

    def __init__(self) -> None:
        self.may_close = threading.Event()
        self.may_close.set()

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        after_each_step()

    def may_start(self, kind: OpKind, after: object) -> bool:
        return True

    def queue(self, kind: OpKind) -> None:
        return None

    def fence(self) -> None:
        return None

    def start(
        self, runs: Runs, kind: OpKind, after: None, urgent: bool = False, alone: bool = False
    ) -> None:
        for target, source, size in zip(*runs, strict=True):
            ctypes.memmove(int(target), int(source), int(size))

    def close(self) -> None:
        self.may_close.wait()


class KVMemory:
    """An engine's KV tensors in pages of their own."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, LAYERS * LAYER_BYTES)
        every = torch.frombuffer(self._pages, dtype=torch.bfloat16).reshape(LAYERS, *SHAPE)
        self.tensors = {f"layer.{i}": every[i] for i in range(LAYERS)}
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8).reshape(
            LAYERS, NUM_BLOCKS, -1
        )
        self.bytes.copy_(torch.randint(0, 256, self.bytes.shape, dtype=torch.uint8))

    def unmap(self) -> None:
        self._protect(_NOTHING)

    def map(self) -> None:
        """Give it memory again, which holds nothing of what it held."""
        self._protect(_READ_AND_WRITE)
        self.bytes.zero_()

    def _protect(self, access: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.bytes.data_ptr())
        assert libc.mprotect(address, ctypes.c_size_t(len(self._pages)), access) == 0


class Scene:
    """An engine's worker and the cache in its scheduler."""

    def __init__(self) -> None:
        self.manager = KVManager(MODEL, CacheConfig(num_cpu_blocks=32), engine_id="sleeper")
        self.memory = KVMemory()
        backend = SimpleNamespace(get_name=lambda: "TEST")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        transfer = SimpleNamespace(engine_id="sleeper", kv_connector_extra_config={})
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            kv_events_config=None,
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
            parallel_config=SimpleNamespace(
                rank=0, decode_context_parallel_size=1, pipeline_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(async_scheduling=False),
            device_config=SimpleNamespace(device_type="cpu"),
            compilation_config=SimpleNamespace(
                static_forward_context=dict.fromkeys(self.memory.tensors, layer)
            ),
        )
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
        )
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(self.memory.tensors))]
        self.worker = FlexCacheWorker(
            config, SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS)
        )

    def start(self) -> None:
        self.manager.start()
        self.worker.register(self.memory.tensors)
        self.manager.wait_ready(WAIT_S)

    def stop(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def launch(self, blocks: slice, is_put: bool) -> int:
        """Launch a gated put or get of the prompt."""
        match = self.manager.put_match if is_put else self.manager.get_match
        task_id, mask = match(TOKENS)
        assert mask.all()
        slots = np.arange(blocks.start * BLOCK, blocks.stop * BLOCK)
        self.manager.launch([task_id], [slots], gated=True)
        return task_id

    def status(self, task_id: int) -> KVStatus:
        return self.manager.wait([task_id], WAIT_S)[task_id].status

    def put(self) -> KVStatus:
        task_id = self.launch(HERE, is_put=True)
        self.worker.begin_step(FlexCacheMetadata(stores=[task_id]))
        return self.status(task_id)

    def get(self, request: str) -> tuple[int, Load]:
        task_id = self.launch(THERE, is_put=False)
        return task_id, Load(request, task_id, list(range(THERE.start, THERE.stop)))

    def read(self, blocks: slice) -> torch.Tensor:
        return self.memory.bytes[:, blocks].clone()


@pytest.fixture(autouse=True)
def copier(monkeypatch: pytest.MonkeyPatch) -> Copier:
    copier = Copier()
    monkeypatch.setattr(attachment, "open_copier", lambda *_: copier)
    return copier


@pytest.fixture
def scene(copier: Copier) -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene()
        stack.callback(scene.stop)
        stack.callback(copier.may_close.set)
        scene.start()
        yield scene


def test_what_was_stored_before_is_found_after_waking_up(scene: Scene) -> None:
    stored = scene.read(HERE)
    assert scene.put() is KVStatus.SUCCESS
    for _ in range(2):
        scene.worker.unregister()
        scene.worker.unregister()
        scene.memory.unmap()
        scene.memory.map()
        scene.worker.restore()
        scene.worker.restore()
        scene.manager.wait_ready(WAIT_S)
        task_id, load = scene.get("again")
        scene.worker.begin_step(FlexCacheMetadata(loads=[load]))
        assert scene.status(task_id) is KVStatus.SUCCESS
        until(lambda: scene.worker.take_received() == {"again"})
        assert scene.worker.take_bad_blocks() == set()
        assert torch.equal(scene.read(THERE), stored)


def test_nothing_is_copied_while_asleep_and_what_was_under_way_is_reported(scene: Scene) -> None:
    assert scene.put() is KVStatus.SUCCESS
    task_id, load = scene.get("begun")
    scene.worker._loads[task_id] = load  # as after `begin_step`, whose gate would not open
    scene.worker.unregister()
    scene.memory.unmap()
    assert scene.status(task_id) is KVStatus.FAILED
    scene.worker.begin_step(FlexCacheMetadata(loads=[Load("late", None, [20])], stores=[task_id]))
    assert scene.worker.take_received() == {"begun", "late"}
    assert scene.worker.take_bad_blocks() == {*range(THERE.start, THERE.stop), 20}
    scene.memory.map()
    scene.worker.restore()
    scene.manager.wait_ready(WAIT_S)
    assert not scene.read(THERE).any()
    assert scene.worker.take_received() == set()


def test_memory_is_kept_while_a_copy_hangs(
    scene: Scene, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "_CLOSE_PATIENCE_S", 0.1)
    copier.may_close.clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="KV memory cannot be released"):
            scene.worker.unregister()
    copier.may_close.set()
    monkeypatch.setattr(rank, "_CLOSE_PATIENCE_S", WAIT_S)
    scene.worker.unregister()
    scene.memory.unmap()
    scene.memory.map()
    scene.worker.restore()
    scene.manager.wait_ready(WAIT_S)


class VllmWorker:
    """What vLLM's worker has that FlexCache watches; it sets its connector up as vLLM does."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace()
        for name in WATCHED:
            setattr(self, name, lambda *arguments, **options: None)

    def set_up(self) -> Scene:
        return Scene()


WATCHED = (
    "load_model", "reload_weights", "update_weights", "start_weight_update", "finish_weight_update",
    "sleep",
)  # fmt: skip


@pytest.fixture
def vllm_worker(copier: Copier) -> Any:
    return VllmWorker()


def start_scene(vllm_worker: Any, stack: ExitStack) -> Scene:
    scene: Scene = vllm_worker.set_up()
    stack.callback(scene.stop)
    scene.start()
    assert scene.worker.client is not None
    scene.worker.client.wait_registered(WAIT_S)  # the manager learns of it a moment earlier
    return scene


@pytest.mark.parametrize("way", ["reload_weights", "update_weights", "sleep"])
def test_a_load_of_former_weights_whose_request_has_not_begun_is_not_put_to_use(
    way: str, vllm_worker: Any
) -> None:
    with ExitStack() as stack:
        scene = start_scene(vllm_worker, stack)
        assert scene.put() is KVStatus.SUCCESS
        loads = [scene.get("runs"), scene.get("waits"), scene.get("aborted")]
        scene.worker.begin_step(FlexCacheMetadata(loads=[load for _, load in loads]))
        received: set[str] = set()
        until(lambda: received.update(scene.worker.take_received()) or len(received) == 3)
        scene.worker.begin_step(FlexCacheMetadata(started={"runs": True}))
        assert scene.worker.take_bad_blocks() == set()
        getattr(vllm_worker, way)(*([2] if way == "sleep" else []))
        scene.worker.begin_step(FlexCacheMetadata(started={"waits": True, "aborted": False}))
        assert scene.worker.take_bad_blocks() == {*range(THERE.start, THERE.stop)}
        assert not scene.manager.get_match(TOKENS)[1].any()


def test_a_light_sleep_keeps_the_weights(vllm_worker: Any) -> None:
    with ExitStack() as stack:
        scene = start_scene(vllm_worker, stack)
        assert scene.put() is KVStatus.SUCCESS
        vllm_worker.sleep(level=1)
        assert scene.manager.get_match(TOKENS)[1].all()


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_vllm_that_lacks_a_method_to_watch_is_cached_for_until_its_first_update(
    sleeps: bool, vllm_worker: Any
) -> None:
    del vllm_worker.update_weights
    with ExitStack() as stack:
        scene = start_scene(vllm_worker, stack)
        assert scene.put() is KVStatus.SUCCESS
        assert scene.manager.get_match(TOKENS)[1].all()
        if sleeps:  # then there is no client to tell
            scene.worker.unregister()
        vllm_worker.reload_weights()
        if sleeps:
            scene.worker.restore()
            scene.manager.wait_ready(WAIT_S)
        for _ in range(2):
            assert not scene.manager.get_match(TOKENS)[1].any()
            assert not scene.manager.put_match(TOKENS)[1].any()
