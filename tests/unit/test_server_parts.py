"""The small parts that servers and their clients are made of."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.block_keys import EngineBlockKeys, TokenBlockKeys, make_root, unpack_keys
from flexcache.client.tasks import ClientTasks
from flexcache.config import CacheConfig, ModelConfig, ServerConfig
from flexcache.errors import ClosedError, ConfigError, RegistrationError
from flexcache.ids import (
    KVStatus,
    OpId,
    RootId,
    SessionId,
    TaskId,
    TaskIds,
    TaskKind,
    epoch_of,
    id_before,
    make_session,
    session_of,
)
from flexcache.protocol.fence import Fence, Scratch
from flexcache.protocol.messages import ModelSpec
from flexcache.protocol.trust import make_keys
from flexcache.tasks.instructions import Offer, TaskResult
from flexcache.transfer.scheduler import FairQueue, Urgency

# -- the queue for the disk ----------------------------------------------------------------------


def fill(queue: FairQueue[str], owner: int, loads: int, stores: int, first: int) -> None:
    for number in range(loads + stores):
        is_load = number < loads
        name = f"{'load' if is_load else 'store'} of {owner}"
        urgency = Urgency.NEEDED if is_load else Urgency.STORE
        queue.add(OpId(first + number), name, owner=owner, urgency=urgency)


def test_engines_take_turns_whatever_each_has_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    fill(queue, 1, loads=100, stores=0, first=0)
    fill(queue, 2, loads=3, stores=0, first=1000)
    turns = [queue.next() for _ in range(6)]
    assert turns == ["load of 1", "load of 2"] * 3
    assert queue.next() == "load of 1"


def test_loads_go_first_but_a_store_gets_every_fourth_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    fill(queue, 1, loads=6, stores=4, first=0)
    kinds = [str(queue.next()).split()[0] for _ in range(10)]
    assert kinds[:8] == ["load", "load", "load", "store"] * 2
    assert kinds[8:] == ["store", "store"]
    assert queue.next() is None


def test_early_loads_wait_for_those_that_are_needed() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(OpId(1), "early", owner=1, urgency=Urgency.EARLY, num_blocks=5)
    queue.add(OpId(2), "needed", owner=1, urgency=Urgency.NEEDED, num_blocks=7)
    queue.add(OpId(3), "store", owner=1, urgency=Urgency.STORE)
    assert [queue.num_blocks(urgency) for urgency in Urgency] == [7, 5, 1]
    assert [queue.next() for _ in range(4)] == ["needed", "early", "store", None]


@given(
    st.lists(
        st.tuples(st.sampled_from("aald"), st.integers(0, 3), st.sampled_from(Urgency)),
        max_size=60,
    )
)
def test_each_op_gets_its_turn_once_unless_it_was_discarded(steps: list) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, tuple[int, Urgency]] = {}
    served: list[int] = []
    for number, (act, owner, urgency) in enumerate(steps):
        if act == "a":
            queue.add(OpId(number), number, owner=owner, urgency=urgency)
            waiting[number] = (owner, urgency)
        elif act == "d" and waiting:
            gone = min(waiting)
            queue.discard(OpId(gone))
            del waiting[gone]
        elif act == "l":
            item = queue.next()
            assert (item is None) == (not waiting)
            if item is not None:
                # Of its owner's ops of its class it is the first.
                assert item == min(n for n, key in waiting.items() if key == waiting[item])
                if waiting[item][1] is Urgency.EARLY:
                    assert Urgency.NEEDED not in {urgency for _, urgency in waiting.values()}
                del waiting[item]
                served.append(item)
        queue.check()
        assert len(queue) == len(waiting)
        for each in Urgency:
            assert queue.num_blocks(each) == [u for _, u in waiting.values()].count(each)
    while (item := queue.next()) is not None:
        del waiting[item]
        served.append(item)
    assert waiting == {}
    assert max(Counter(served).values(), default=1) == 1


# -- prompts on their way to a server ------------------------------------------------------------


@given(st.integers(0, 20), st.integers(1, 40))
def test_packed_keys_are_the_keys(count: int, size: int) -> None:
    root = make_root("f", ["n"], "k")
    keys = [bytes([i]) * size for i in range(count)]
    ours = EngineBlockKeys(root, keys, count)
    key_bytes, data = ours.packed(count)
    theirs = unpack_keys(root, memoryview(data), key_bytes, 16)
    assert theirs.num_blocks == count
    assert theirs.slice(0, count) == keys
    assert [theirs.key(i) for i in range(count)] == keys


def test_client_and_server_hash_tokens_alike() -> None:
    root = make_root("f", ["n"], "k")
    tokens = np.random.default_rng(0).integers(0, 1 << 40, 170)
    ours = TokenBlockKeys(root, tokens, 16)
    key_bytes, data = ours.packed(10)
    theirs = unpack_keys(root, memoryview(data), key_bytes, 16)
    assert key_bytes == 0
    assert theirs.slice(0, 10) == ours.slice(0, 10)


def test_keys_of_different_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="same size"):
        EngineBlockKeys(RootId(b""), [b"a", b"bc"], 2).packed(2)
    with pytest.raises(ValueError, match="whole items"):
        unpack_keys(b"", memoryview(b"abc"), 2, 16)


# -- tasks as a client knows them -----------------------------------------------------------------


def three_tasks() -> ClientTasks:
    """Make a get of two blocks, a put of one, and a miss."""
    tasks = ClientTasks()
    add(tasks, TaskKind.GET, 0, 0, 2)
    add(tasks, TaskKind.PUT, 1, 1, 1)
    add(tasks, TaskKind.GET, 2, 0, 0)
    return tasks


def add(tasks: ClientTasks, kind: TaskKind, task_id: int, start: int, num_blocks: int) -> None:
    tasks.add(Offer(TaskId(task_id), kind, 40, start, num_blocks, {}, num_blocks))


def results_of(tasks: ClientTasks, *ids: int, completely: bool = False) -> dict[int, TaskResult]:
    return tasks.results(ids, 0.0, completely)


def blocks(count: int) -> np.ndarray:
    return np.arange(count)


def test_all_of_a_launch_is_checked_before_any_of_it_is_done() -> None:
    tasks = three_tasks()
    for ids, gpu in (([0, 1], [2, 2]), ([0, 0], [2, 2]), ([0, 1], [2])):
        with pytest.raises(ValueError, match=r"slot|twice"):
            tasks.launch(ids, [blocks(n) for n in gpu])
    with pytest.raises(KeyError, match="never given out"):
        tasks.launch([0, 77], [blocks(2), blocks(1)])
    assert tasks.launch([2, 0, 1], [blocks(0), blocks(2), blocks(1)]) == [1, 2]
    with pytest.raises(ValueError, match="launched before"):
        tasks.launch([1], [blocks(1)])


def test_unlaunched_tasks_are_cancelled_at_once_and_running_ones_when_their_copies_end() -> None:
    tasks = three_tasks()
    tasks.launch([0], [blocks(2)])
    assert tasks.cancel([0, 1, 2]) == [0, 1]
    assert set(results_of(tasks, 0, 1)) == {1}
    assert results_of(tasks, 1)[1].status is KVStatus.CANCELLED
    cancelled = TaskResult(KVStatus.CANCELLED, 0, 0, 40)
    tasks.answer(0, cancelled)
    assert results_of(tasks, 0) == {0: cancelled}
    assert tasks.cancel([0, 1, 2]) == []
    tasks.answer(0, TaskResult(KVStatus.SUCCESS, 0, 2, 40))  # what has ended stays as it is
    assert results_of(tasks, 0) == {0: cancelled}
    with pytest.raises(ValueError, match="launched before"):
        tasks.launch([0], [blocks(2)])


def test_a_lost_server_fails_open_tasks_and_ends_answered_ones() -> None:
    tasks = three_tasks()
    tasks.launch([0, 1], [blocks(2), blocks(1)])
    tasks.answer(1, TaskResult(KVStatus.SUCCESS, 1, 1, 40, is_final=False))
    assert set(results_of(tasks, 0, 1)) == {1}
    assert results_of(tasks, 1, completely=True) == {}
    tasks.fail(tasks.lose(), "it died")
    found = results_of(tasks, 0, 1, completely=True)
    assert found[0] == TaskResult(KVStatus.FAILED, 0, 0, 40, "it died")
    assert found[1] == TaskResult(KVStatus.SUCCESS, 1, 1, 40, "it died")
    assert tasks.lose() == []


def test_an_answer_that_overtakes_its_match_is_kept_for_it() -> None:
    tasks = ClientTasks()
    cancelled = TaskResult(KVStatus.CANCELLED, 0, 0, 40, "not launched in time")
    tasks.answer(7, cancelled)
    add(tasks, TaskKind.GET, 7, 0, 2)
    assert results_of(tasks, 7) == {7: cancelled}
    assert tasks.launch([7], [blocks(2)]) == []


def test_a_match_that_returns_after_its_session_was_lost_has_failed() -> None:
    tasks, session = ClientTasks(), make_session(3, 4)
    ids = TaskIds(session)
    tasks.begin(session)
    assert tasks.lose() == []
    found, missed, late = ids.next(), ids.next(), ids.next()
    add(tasks, TaskKind.GET, found, 0, 2)
    add(tasks, TaskKind.GET, missed, 0, 0)
    tasks.begin(make_session(3, 5))
    assert tasks.lose() == []
    add(tasks, TaskKind.GET, late, 0, 2)  # the next session was lost as well meanwhile
    results = results_of(tasks, found, missed, late)
    assert results[found].status is results[late].status is KVStatus.FAILED
    assert results[missed].status is KVStatus.NOT_FOUND


def test_a_session_whose_number_recurs_is_not_the_one_that_was_lost() -> None:
    tasks, session = ClientTasks(), make_session(3, 4)
    tasks.begin(session)
    tasks.lose()
    tasks.begin(session)  # of a server started a whole cycle of epochs later
    task_id = TaskIds(session).next()
    add(tasks, TaskKind.GET, task_id, 0, 2)
    assert results_of(tasks, task_id) == {}


def test_waiting_callers_are_woken_when_no_answer_will_come() -> None:
    tasks = three_tasks()
    tasks.launch([0], [blocks(2)])
    closer = threading.Timer(0.05, tasks.close)
    closer.start()
    with pytest.raises(ClosedError):
        tasks.results([0, 2], None, completely=False)
    closer.join()
    tasks.answer(0, TaskResult(KVStatus.SUCCESS, 0, 2, 40))  # too late: it was said to be closed
    with pytest.raises(ClosedError):
        results_of(tasks, 0)
    assert results_of(tasks, 2)[2].status is KVStatus.NOT_FOUND
    with pytest.raises(ClosedError):
        add(tasks, TaskKind.GET, 9, 0, 2)


def test_old_tasks_are_forgotten_and_open_ones_are_not() -> None:
    tasks = three_tasks()
    for task_id in range(100, 100 + 20_000):
        add(tasks, TaskKind.GET, task_id, 0, 0)
    assert results_of(tasks, 0, 1) == {}
    with pytest.raises(KeyError, match="long ago"):
        results_of(tasks, 100)


# -- task ids ------------------------------------------------------------------------------------


@given(st.integers(1, 0xFFFF), st.integers(0, 1 << 20))
def test_a_task_id_contains_its_session_and_its_server(epoch: int, number: int) -> None:
    ids = TaskIds(make_session(epoch, number))
    first, second = ids.next(), ids.next()
    assert id_before(ids.session) < first < second < 1 << 64
    assert session_of(first) == session_of(second) == ids.session
    assert epoch_of(second) == epoch
    assert first in ids
    assert second + 1 not in ids


# -- memory that two processes share -------------------------------------------------------------


def test_a_fence_is_free_once_every_holder_has_let_go() -> None:
    maker = Fence.create()
    holders = [Fence.open(maker.path), Fence.open(maker.path)]
    waiter = Fence.open(maker.path)
    for holder in holders:
        holder.hold()
    assert not waiter.is_free()
    holders[0].close()
    assert not waiter.is_free()
    maker.close()  # the server dies; the fence is still one
    holders[1].close()
    assert waiter.is_free()
    waiter.close()
    waiter.close()
    with pytest.raises(RegistrationError, match="fence"):
        Fence.open(maker.path)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_fence_that_can_be_cut_off_is_refused(seals: int, tmp_path: Path) -> None:
    fd = os.memfd_create("flexcache-fence", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    file = tmp_path / "fence"
    file.write_bytes(bytes(4096))
    for path in (f"/proc/{os.getpid()}/fd/{fd}", str(file)):
        with pytest.raises(RegistrationError, match=f"fence at {path}"):
            Fence.open(path)
    os.close(fd)


def test_the_death_of_a_holder_frees_the_fence() -> None:
    maker = Fence.create()
    script = (
        "import sys; from flexcache.protocol.fence import Fence; Fence.open(sys.argv[1]).hold();"
        "f = Fence.open(sys.argv[1]); f.hold(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, maker.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert not maker.is_free()
    holder.kill()
    holder.communicate()
    assert maker.is_free()
    maker.close()


def test_scratch_written_by_one_side_is_read_by_the_other() -> None:
    mine = Scratch.create(1 << 20)
    theirs = Scratch.open(os.getpid(), mine.fd, 1 << 20)
    assert theirs is not None
    mine.write(b"hello")
    assert bytes(theirs.read(5)) == b"hello"
    for size in (-1, (1 << 20) + 1):
        with pytest.raises(ValueError, match="scratch memory"):
            theirs.read(size)
    with pytest.raises(OSError, match="permitted"):
        os.ftruncate(mine.fd, 10)
    theirs.close()
    mine.close()
    mine.close()


def test_scratch_that_could_be_truncated_or_is_not_memory_is_not_mapped(tmp_path: Path) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    small = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(small, 100)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    (tmp_path / "file").write_bytes(bytes(4096))
    plain = os.open(tmp_path / "file", os.O_RDWR)
    reading, writing = os.pipe()
    for fd in (unsealed, small, plain, reading, 9999, -1):
        assert Scratch.open(os.getpid(), fd, 4096) is None
    for fd in (unsealed, small, plain, reading, writing):
        os.close(fd)


# -- configuration -------------------------------------------------------------------------------


def test_a_server_config_survives_the_trip_to_another_process() -> None:
    model = ModelConfig("m", 3, 4, 32, torch.bfloat16, tp_size=2)
    cache = CacheConfig(num_cpu_blocks=4, endpoint="ipc:///x", ssd_cache_dirs=["/tmp"],
                        num_ssd_blocks=8)  # fmt: skip
    for config in (
        ServerConfig(cache=cache, model=model, idle_exit_s=3.5),
        ServerConfig(cache=cache),
    ):
        assert ServerConfig.from_layers(json.loads(json.dumps(config.to_dict()))) == config


def test_a_server_takes_its_file_then_the_environment_then_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text(json.dumps({
        "cpu_cache_gb": 1, "log_level": "DEBUG", "idle_exit_s": 5,
        "model": {"model_id": "m", "num_layers": 1, "num_kv_heads": 2, "head_size": 8,
                  "dtype": "float16"},
    }))  # fmt: skip
    env = {"FLEXCACHE_NUM_CPU_BLOCKS": "7"}
    config = ServerConfig.load(str(file), env, default_endpoint="ipc:///d", op_timeout_s=9.0)
    assert config.cache.num_cpu_blocks == 7
    assert config.cache.cpu_cache_gb is None
    assert config.cache.endpoint == "ipc:///d"
    assert config.cache.op_timeout_s == 9
    assert config.model is not None
    assert config.model.dtype is torch.float16
    # Engines may be given the same file.
    shared = CacheConfig.from_env({"FLEXCACHE_CONFIG": str(file), **env})
    assert shared.log_level == "DEBUG"


@pytest.mark.parametrize(("content", "match"), [
    ({"endpoint": "ipc:///x"}, "cpu_cache_gb"), ({"num_cpu_blocks": 4}, "endpoint"),
    ({"num_cpu_blocks": 4, "endpoint": "ipc:///x", "model": {"model_id": "m"}}, "dtype"),
    ({"num_cpu_blocks": 4, "endpoint": "ipc:///x", "model": {"dtype": "int8"}}, "model"),
    ({"num_cpu_blocks": 4, "endpoint": "ipc:///x", "model": 3}, "model"),
    ({"num_cpu_blocks": 4, "endpoint": "ipc:///x", "nonsense": 3}, "nonsense"),
])  # fmt: skip
def test_a_bad_server_config_is_refused_by_name(content: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ServerConfig.from_layers(content)


def test_an_engine_of_a_named_server_needs_no_size() -> None:
    assert not CacheConfig(endpoint="ipc:///x").has_cpu_tier
    with pytest.raises(ConfigError, match="cpu_cache_gb"):
        CacheConfig(endpoint="ipc:///x").cpu_blocks_for(100)


def test_a_model_survives_the_trip_to_the_server() -> None:
    model = ModelConfig("m", 3, 1, 576, torch.float8_e4m3fn, use_mla=True, tp_size=4)
    assert ModelSpec.of(model, 64).model() == model
    staged = replace(model, pp_size=2, cp_size=3, kv_replicas=2, sized_by_ranks=True)
    assert ModelSpec.of(staged, 64).model() == staged


def test_existing_curve_keys_are_not_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="already holds keys"):
        make_keys(tmp_path / "keys")


def test_sessions_of_one_server_differ_and_offline_ids_belong_to_none() -> None:
    numbers = {make_session(3, n) for n in range(1000)}
    assert len(numbers) == 1000
    assert epoch_of(TaskIds(SessionId(0)).next()) == 0
