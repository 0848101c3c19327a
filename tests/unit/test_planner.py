"""Plans over a host tier and a disk tier, carried out on a dictionary instead of memory.

The bytes of a block are its key. So whether a plan would ever bring wrong bytes to the GPU, or call
a block by a name that is not its own, can be seen in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from builders import (
    OTHER_ROOT,
    ROOT,
    ROOTS,
    get_of,
    key_of,
    keys_of,
    make_cache,
    prefixes,
    prompt,
    put_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.plan import Plan
from flexcache.cache.tier import Lease, Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, OpId, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.scheduler import BlockIds, TransferOp

CPU, SSD = TierName.CPU, TierName.SSD
LONGEST = 6
PLENTY = 1_000

Place = tuple[TierName, int]
Bytes = tuple[RootId, BlockKey]

SOURCE = {OpKind.H2D: CPU, OpKind.DISK2H: SSD, OpKind.H2DISK: CPU}
TARGET = {OpKind.D2H: CPU, OpKind.DISK2H: CPU, OpKind.H2DISK: SSD}


def places(tier: TierName, blocks: BlockIds | None) -> list[Place]:
    assert blocks is not None
    return [(tier, int(block)) for block in blocks]


def sources(op: TransferOp) -> list[Place]:
    return places(SOURCE[op.kind], op.src) if op.kind in SOURCE else []


def targets(op: TransferOp) -> list[Place]:
    return places(TARGET[op.kind], op.dst) if op.kind in TARGET else []


@dataclass(eq=False)
class Task:
    """A plan that is being executed."""

    plan: Plan
    keys: EngineBlockKeys
    ended: dict[OpId, int] = field(default_factory=dict)
    """Ops that have ended: how many of their blocks were moved."""

    @property
    def open_ops(self) -> list[TransferOp]:
        return [op for op in self.plan.graph.ops if op.op_id not in self.ended]

    @property
    def ready_ops(self) -> list[TransferOp]:
        return [op for op in self.open_ops if all(d in self.ended for d in op.depends_on)]

    def num_wanted(self, op: TransferOp) -> int:
        """Return how many of the op's blocks its dependencies delivered."""
        wanted = len(op)
        for other in self.plan.graph.ops:
            if other.op_id in op.depends_on:
                delivered = other.first + self.ended[other.op_id] - op.first
                wanted = max(0, min(wanted, delivered))
        return wanted

    def num_moved(self, kind: OpKind, start: int) -> int:
        """Return how many blocks from ``start`` ops of this kind moved without a gap."""
        moved = {op.first: self.ended[op.op_id] for op in self.ops(kind) if op.op_id in self.ended}
        position = start
        while moved.get(position, 0):
            position += moved[position]
        return position - start

    def ops(self, kind: OpKind) -> list[TransferOp]:
        return [op for op in self.plan.graph.ops if op.kind is kind]

    def reads(self) -> set[Place]:
        return {place for op in self.plan.graph.ops for place in sources(op)}

    def writes(self) -> set[Place]:
        return {place for op in self.plan.graph.ops for place in targets(op)}


class World:
    """A planner, the bytes of its tiers, and the tasks that move them."""

    def __init__(
        self, host: int, disk: int, chunk_blocks: int = 2, max_store_backlog: int = PLENTY
    ) -> None:
        self.cache = make_cache(host, disk, chunk=chunk_blocks, backlog=max_store_backlog)
        self.tiers = list(self.cache.tiers)
        self.host = self.cache.tiers.host
        self.disk = self.cache.tiers.lower[0] if disk else Tier(SSD, 0)
        self.max_store_backlog = max_store_backlog
        self.bytes: dict[Place, Bytes | None] = {}
        self.bad_sectors: set[Place] = set()
        self.tasks: list[Task] = []

    # -- plans ------------------------------------------------------------------------------------

    def get(self, word: str, start: int = 0, root: RootId = ROOT) -> Task:
        cached = max(self.num_cached(tier, word, root) for tier in self.tiers)
        keys = prompt(word, root)
        task = self._open(self.cache.loads.plan_get(get_of(keys, start)), keys)
        self._check_load(task, start, cached)
        covered = [p for op in task.ops(OpKind.H2D) for p in self._positions(op)]
        assert covered == list(range(start, task.plan.stop))
        return task

    def prefetch(self, word: str, start: int = 0, root: RootId = ROOT) -> Task:
        cached = max(self.num_cached(tier, word, root) for tier in self.tiers)
        keys, on_host = prompt(word, root), self.num_cached(self.host, word, root)
        if awaited := self.host.num_in_flight(keys, on_host, len(word)):
            start = min(max(start, on_host + awaited), len(word))  # another task brings them
        task = self._open(self.cache.loads.plan_prefetch(get_of(keys, start)), keys)
        assert task.plan.staging is None or task.plan.staging.keys, "it is in vain"
        self._check_load(task, start, cached)
        assert not task.ops(OpKind.H2D)
        return task

    def put(self, word: str, start: int = 0, root: RootId = ROOT) -> Task:
        cached = self.num_cached(self.host, word, root)
        keys = prompt(word, root)
        awaited = self.host.num_in_flight(keys, cached, len(word))
        task = self._open(self.cache.stores.plan_put(put_of(keys, start)), keys)
        plan = task.plan
        moved = [p for op in task.ops(OpKind.D2H) for p in self._positions(op)]
        assert moved == list(range(plan.start, plan.stop))
        if start > cached + awaited:
            assert plan.dropped == {"prefix_not_cached": len(word) - start}
            assert not plan.graph.ops
        else:
            assert plan.start == cached + awaited
            missing = len(word) - plan.stop
            assert plan.dropped.get("host_tier_full", 0) == missing
            assert missing == 0 or self.host.pool.num_free == 0
        for name, lease in plan.stores.items():
            first = plan.store_starts[name]
            written = [p for op in task.ops(OpKind.H2DISK) for p in self._positions(op)]
            assert sorted(written) == list(range(first, first + len(lease)))
        return task

    @staticmethod
    def _positions(op: TransferOp) -> range:
        return range(op.first, op.first + len(op))

    def _check_load(self, task: Task, start: int, cached: int) -> None:
        plan = task.plan
        assert start <= plan.stop <= max(start, cached)
        if plan.stop < cached:
            assert self.host.pool.num_free == 0, "a load is short only for want of host blocks"
        assert sum(plan.sources.values()) == plan.num_blocks
        read = [p for op in task.ops(OpKind.DISK2H) for p in self._positions(op)]
        assert read == list(range(plan.start + plan.sources.get(CPU, 0), plan.stop))

    def _open(self, plan: Plan, keys: EngineBlockKeys) -> Task:
        task = Task(plan, keys)
        written = [place for op in plan.graph.ops for place in targets(op)]
        assert len(written) == len(set(written)), "a plan writes a block twice"
        for other in self.tasks:
            assert task.writes().isdisjoint(other.writes()), "two plans write the same block"
            assert task.writes().isdisjoint(other.reads()), "a plan writes what another reads"
            to_come = {place for op in other.open_ops for place in targets(op)}
            assert task.reads().isdisjoint(to_come), "a plan reads what another will write"
        self.tasks.append(task)
        self._finish_if_done(task)
        return task

    # -- execution --------------------------------------------------------------------------------

    def run_op(self, task: Task, op: TransferOp, most: int = PLENTY) -> int:
        """Execute an op, of which at most ``most`` blocks get through."""
        wanted = task.num_wanted(op)
        position = op.first
        num_ok = 0
        for index in range(min(wanted, most)):
            content: Bytes | None = (task.keys.root, task.keys.key(position))
            if op.kind is not OpKind.D2H:
                place = sources(op)[index]
                if op.kind is OpKind.DISK2H and place in self.bad_sectors:  # as a checksum tells
                    self.cache.discard_bad_block(task.plan, SSD, position)
                    break
                assert self.bytes.get(place) == content, f"wrong bytes in {place}"
            if op.kind in TARGET:
                self._write(targets(op)[index], content)
            position += 1
            num_ok += 1
        for place in targets(op)[num_ok:]:
            self._write(place, None)  # what an op that failed leaves behind
        self._end(task, op, num_ok)
        return num_ok

    def _write(self, place: Place, content: Bytes | None) -> None:
        self.bytes[place] = content
        self.bad_sectors.discard(place)

    def _end(self, task: Task, op: TransferOp, num_ok: int) -> None:
        task.ended[op.op_id] = num_ok
        plan = task.plan
        if not any(other.kind is op.kind for other in task.open_ops):
            if op.kind is OpKind.H2DISK:
                num_stored = task.num_moved(OpKind.H2DISK, plan.store_starts[SSD])
                self.cache.publish_store(plan, SSD, num_stored)
            elif op.kind is not OpKind.H2D:
                first = plan.start if op.kind is OpKind.D2H else plan.load_start
                self.cache.publish_staging(plan, task.num_moved(op.kind, first))
        self._finish_if_done(task)

    def _finish_if_done(self, task: Task) -> None:
        if not task.open_ops:
            self.cancel(task)

    def cancel(self, task: Task) -> None:
        """End a task between two of its ops; what is left of it never starts."""
        self.tasks.remove(task)
        self.cache.finish(task.plan)

    def run(self, task: Task, fail: dict[OpKind, int] | None = None) -> int:
        """Carry out the rest of a plan in the graph's order; how many blocks the GPU got or gave.

        Args:
            fail: Kinds of op of which only so many blocks get through in all.
        """
        left = dict(fail or {})
        for op in task.open_ops:
            most = left.get(op.kind, PLENTY)
            num_ok = self.run_op(task, op, most)
            left[op.kind] = most - num_ok
        kind = OpKind.D2H if task.plan.kind is TaskKind.PUT else OpKind.H2D
        return task.num_moved(kind, task.plan.start)

    # -- insight ----------------------------------------------------------------------------------

    def num_cached(self, tier: Tier, word: str, root: RootId = ROOT) -> int:
        return tier.index.match(prompt(word, root)).num_blocks

    def cached(self, word: str) -> tuple[int, int]:
        """Return how much of a word the host tier and the disk tier have."""
        return self.num_cached(self.host, word), self.num_cached(self.disk, word)

    def check(self) -> None:
        self.cache.check()
        assert self.cache.stores.backlog <= self.max_store_backlog
        for task in self.tasks:
            for op in task.open_ops:
                for name, block in sources(op) + targets(op):
                    tier = self.cache.tiers.by_name[name]
                    assert not tier.pool.is_free(block), "a block of an open plan was freed"
        for tier in self.tiers:
            for root in ROOTS:
                self._check_content(tier, root, "")

    def _check_content(self, tier: Tier, root: RootId, word: str) -> None:
        """Check that every block that can be found has its bytes, unless the disk went bad."""
        for longer in (word + "a", word + "b"):
            match = tier.index.locate(root, key_of(longer))
            if not match.num_blocks:
                continue
            place = (tier.name, int(tier.index.blocks(match)[-1]))
            if place not in self.bad_sectors:
                assert self.bytes[place] == (root, key_of(longer)), f"{place} is not {longer}"
            self._check_content(tier, root, longer)


# -- plans in any order, with failures --------------------------------------------------------

some_root = st.sampled_from([ROOT, ROOT, ROOT, OTHER_ROOT])
some_word = st.text("ab", min_size=1, max_size=LONGEST)
some_start = st.integers(0, 3)
some_position = st.integers(0, 99)


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        host=st.integers(1, 9),
        disk=st.sampled_from([14, 8, 3, 0]),
        chunk_blocks=st.integers(1, 3),
        max_store_backlog=st.sampled_from([PLENTY, 3, 0]),
        stored=st.lists(st.text("ab", min_size=3, max_size=LONGEST), max_size=3),
    )
    def make(
        self, host: int, disk: int, chunk_blocks: int, max_store_backlog: int, stored: list[str]
    ) -> None:
        self.world = World(host, disk, chunk_blocks, max_store_backlog)
        self.stored: list[tuple[RootId, str]] = []  # at some time, and perhaps still there
        for word in stored:
            self.put_and_run(word, ROOT)

    def chosen(self, position: int) -> Task:
        return self.world.tasks[position % len(self.world.tasks)]

    # -- what is asked for

    @rule(word=some_word, start=some_start, root=some_root)
    def get(self, word: str, start: int, root: RootId) -> None:
        self.world.get(word, min(start, len(word)), root)

    @precondition(lambda self: self.stored)
    @rule(position=some_position, start=some_start, tail=st.text("ab", max_size=1))
    def get_what_was_stored(self, position: int, start: int, tail: str) -> None:
        root, word = self.stored[position % len(self.stored)]
        self.world.get(word + tail, min(start, len(word)), root)

    @precondition(lambda self: self.stored)
    @rule(position=some_position)
    def prefetch_what_was_stored(self, position: int) -> None:
        root, word = self.stored[position % len(self.stored)]
        self.world.prefetch(word, 0, root)

    @rule(word=some_word, start=some_start, root=some_root)
    def put(self, word: str, start: int, root: RootId) -> None:
        self.world.put(word, min(start, len(word)), root)

    @rule(word=some_word, root=some_root)
    def put_and_run(self, word: str, root: RootId) -> None:
        self.world.run(self.world.put(word, 0, root))
        self.stored.append((root, word))

    @rule(word=some_word, root=some_root, num_kept=st.integers(0, 4), start=some_start)
    def put_then_get(self, word: str, root: RootId, num_kept: int, start: int) -> None:
        self.put_and_run(word, root)
        self.make_room_on_the_host_tier(num_kept)
        self.world.get(word, min(start, len(word)), root)

    @precondition(lambda self: self.world.tasks)
    @rule(task=some_position, tail=st.text("ab", min_size=1, max_size=3))
    def put_behind_what_is_on_its_way(self, task: int, tail: str) -> None:
        keys = self.chosen(task).keys
        word = keys.key(keys.num_blocks - 1).decode()
        self.world.put(word + tail, 0, keys.root)

    # -- what becomes of it

    @precondition(lambda self: self.world.tasks)
    @rule(task=some_position, op=some_position)
    def run_an_op(self, task: int, op: int) -> None:
        ready = self.chosen(task).ready_ops
        self.world.run_op(self.chosen(task), ready[op % len(ready)])

    @precondition(lambda self: self.world.tasks)
    @rule(task=some_position, op=some_position, most=st.integers(0, 2))
    def run_an_op_that_fails(self, task: int, op: int, most: int) -> None:
        ready = self.chosen(task).ready_ops
        self.world.run_op(self.chosen(task), ready[op % len(ready)], most)

    @precondition(lambda self: self.world.tasks)
    @rule(task=some_position)
    def run_a_task(self, task: int) -> None:
        self.world.run(self.chosen(task))

    @precondition(lambda self: self.world.tasks)
    @rule(task=some_position)
    def cancel(self, task: int) -> None:
        self.world.cancel(self.chosen(task))

    # -- what happens meanwhile

    @rule(num_kept=st.integers(0, 4))
    def make_room_on_the_host_tier(self, num_kept: int) -> None:
        """Evict everything but held blocks and the beginning of what was used last."""
        host = self.world.host
        host.release(host.reserve_private(ROOT, max(0, host.capacity - num_kept)))

    @rule(name=st.sampled_from([CPU, SSD]))
    def clear(self, name: TierName) -> None:
        (self.world.host if name is CPU else self.world.disk).clear()

    @rule(block=st.integers(0, 13))
    def lose_a_sector(self, block: int) -> None:
        self.world.bad_sectors.add((SSD, block))

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for task in list(world.tasks):
            world.run(task)
        world.check()
        for word in ("abba", "bbbbbb"):
            world.run(world.put(word))
            there = world.num_cached(world.host, word)
            assert there == min(len(word), world.host.capacity)
            assert world.run(world.get(word)) >= there
        for tier in world.tiers:
            tier.clear()
            assert tier.pool.num_free == tier.capacity


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(stateful_step_count=50)


# -- one plan after the other, with room for everything: what is cached is known --------------


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "prefetch"]), some_word, some_start)),
    st.integers(1, 3),
    st.sampled_from([0, 200]),
)
def test_with_room_for_everything_a_get_returns_all_that_was_ever_put(
    calls: list[tuple[str, str, int]], chunk_blocks: int, disk: int
) -> None:
    world = World(200, disk, chunk_blocks)
    stored: set[str] = set()
    for call, word, start in calls:
        start = min(start, len(word))
        cached = sum(prefix in stored for prefix in prefixes(word))
        if call == "put":
            task = world.put(word, start)
            moves = start <= cached
            assert world.run(task) == task.plan.num_blocks == (len(word) - cached) * moves
            stored.update(prefixes(word) if moves else [])
        elif call == "get":
            assert world.run(world.get(word, start)) == max(0, cached - start)
        else:
            world.run(world.prefetch(word, start))
        world.check()
    assert world.host.index.num_blocks == len(stored)
    assert world.disk.index.num_blocks == (len(stored) if disk else 0)


# -- by example -------------------------------------------------------------------------------


def shape(task: Task) -> list[tuple[OpKind, int, int]]:
    """Return kind, first position and length of every op."""
    return [(op.kind, op.first, len(op)) for op in task.plan.graph.ops]


def world_with(
    on_host: str, on_disk: str, host: int = 20, disk: int = 20, max_store_backlog: int = PLENTY
) -> World:
    """Make a world with one word on the host tier and another on the disk."""
    world = World(host, disk, max_store_backlog=max_store_backlog)
    if on_disk:
        world.run(world.put(on_disk))
        world.host.clear()
    if on_host:
        world.run(world.put(on_host), fail={OpKind.H2DISK: 0})
    assert world.num_cached(world.host, on_host) == len(on_host)
    assert world.num_cached(world.disk, on_disk) == len(on_disk)
    return world


def test_a_get_from_an_empty_cache_moves_nothing() -> None:
    world = World(8, 8)
    task = world.get("abab")
    assert (task.plan.start, task.plan.stop, task.plan.graph.ops) == (0, 0, [])
    world.check()


def test_a_put_is_copied_off_the_gpu_and_written_through_in_chunks() -> None:
    world = World(8, 8, chunk_blocks=2)
    task = world.put("ababa")
    assert shape(task) == [
        (OpKind.D2H, 0, 2),
        (OpKind.D2H, 2, 2),
        (OpKind.D2H, 4, 1),
        (OpKind.H2DISK, 0, 2),
        (OpKind.H2DISK, 2, 2),
        (OpKind.H2DISK, 4, 1),
    ]
    copies, writes = task.ops(OpKind.D2H), task.ops(OpKind.H2DISK)
    assert [op.depends_on for op in copies] == [(), (), ()]
    assert [op.depends_on for op in writes] == [(op.op_id,) for op in copies]
    for copy, write in zip(copies, writes, strict=True):
        assert places(CPU, copy.dst) == places(CPU, write.src)
    assert world.run(task) == 5
    assert world.cached("ababa") == (5, 5)


def test_a_put_without_a_disk_is_only_copied() -> None:
    world = World(8, 0, chunk_blocks=4)
    assert shape(world.put("ababa")) == [(OpKind.D2H, 0, 4), (OpKind.D2H, 4, 1)]


def test_a_put_of_what_is_cached_moves_nothing() -> None:
    world = world_with("abab", "")
    task = world.put("abab")
    assert (task.plan.num_blocks, task.plan.graph.ops, task.plan.dropped) == (0, [], {})
    assert world.put("ab").plan.num_blocks == 0


def test_a_put_moves_only_what_is_not_cached() -> None:
    world = World(20, 0)
    world.run(world.put("abab"))
    assert shape(world.put("ababba")) == [(OpKind.D2H, 4, 2)]


def test_a_put_does_not_move_what_is_on_its_way_already() -> None:
    world = World(20, 20)
    first = world.put("abab")
    assert shape(world.put("abab")) == []
    longer = world.put("ababba")
    assert shape(longer) == [(OpKind.D2H, 4, 2), (OpKind.H2DISK, 4, 2)]
    world.run(longer)
    assert world.cached("ababba") == (0, 0), "what precedes it has not arrived"
    world.run(first)
    assert world.cached("ababba") == (6, 6)


def test_a_put_whose_beginning_is_not_cached_stores_nothing() -> None:
    world = world_with("ab", "")
    task = world.put("abab", start=3)
    assert shape(task) == []
    assert task.plan.dropped == {"prefix_not_cached": 1}
    assert world.host.num_leased == 0
    assert world.run(world.put("abab", start=2)) == 2


def test_a_put_that_fails_halfway_stores_what_arrived() -> None:
    world = World(20, 20)
    assert world.run(world.put("ababab"), fail={OpKind.D2H: 3}) == 3
    assert world.cached("ababab") == (3, 3)


def test_a_write_that_fails_leaves_the_host_tier_as_it_is() -> None:
    world = World(20, 20)
    assert world.run(world.put("ababab"), fail={OpKind.H2DISK: 1}) == 6
    assert world.cached("ababab") == (6, 1)
    world.check()


def test_a_put_that_was_cancelled_publishes_nothing_that_had_not_arrived() -> None:
    world = World(20, 20)
    task = world.put("abab")
    world.run_op(task, task.ready_ops[0])
    world.cancel(task)
    world.check()
    assert world.cached("abab") == (0, 0)
    assert world.host.pool.num_free == 20


def test_a_host_tier_that_is_too_small_stores_the_beginning() -> None:
    world = World(3, 20)
    task = world.put("ababa")
    assert task.plan.dropped == {"host_tier_full": 2}
    assert world.run(task) == 3
    assert world.cached("ababa") == (3, 3)


def test_a_disk_that_is_too_small_stores_the_beginning() -> None:
    world = World(20, 2)
    task = world.put("ababa")
    assert task.plan.dropped == {"ssd_tier_full": 3}
    world.run(task)
    assert world.cached("ababa") == (5, 2)


def test_a_host_tier_that_is_all_in_use_stores_nothing() -> None:
    world = World(2, 20)
    world.put("ab")
    task = world.put("ba")
    assert shape(task) == []
    assert task.plan.dropped == {"host_tier_full": 2}
    assert not task.plan.stores


def test_blocks_of_a_put_beyond_the_write_backlog_stay_on_the_host_tier() -> None:
    world = World(20, 20, max_store_backlog=4)
    first, second = world.put("aaa"), world.put("bbb")
    third = world.put("abab", root=OTHER_ROOT)
    assert not first.plan.dropped
    assert second.plan.dropped == {"ssd_write_backlog": 2}
    assert shape(second) == [(OpKind.D2H, 0, 2), (OpKind.D2H, 2, 1), (OpKind.H2DISK, 0, 1)]
    assert third.plan.dropped == {"ssd_write_backlog": 4}
    assert not third.ops(OpKind.H2DISK)
    for task in (first, second, third):
        world.run(task)
    assert world.cached("bbb") == (3, 1)
    assert world.num_cached(world.host, "abab", OTHER_ROOT) == 4
    assert not world.put("baba").plan.dropped, "the writes of the others are done"


def test_a_write_back_counts_towards_the_backlog() -> None:
    world = world_with("abab", "a", max_store_backlog=4)
    task = world.put("ababba")
    assert task.plan.dropped == {"ssd_write_backlog": 1}
    world.run(task)
    assert world.cached("ababba") == (6, 5)


def test_blocks_without_room_in_the_backlog_or_on_the_disk_are_counted_by_reason() -> None:
    world = World(20, 2, max_store_backlog=3)
    task = world.put("ababab")
    assert task.plan.dropped == {"ssd_write_backlog": 3, "ssd_tier_full": 1}
    world.run(task)
    assert world.cached("ababab") == (6, 2)


def test_blocks_that_the_disk_lost_are_written_again_with_the_next_that_follow_them() -> None:
    world = world_with("abab", "a")
    task = world.put("ababba")
    assert task.plan.store_starts == {SSD: 1}
    back_fill = [op for op in task.ops(OpKind.H2DISK) if not op.depends_on]
    assert [(op.first, len(op)) for op in back_fill] == [(1, 2), (3, 1)]
    assert world.run(task) == 2
    assert world.cached("ababba") == (6, 6)


def test_blocks_that_are_written_back_stay_on_the_host_tier_until_then() -> None:
    world = world_with("abab", "", host=6)
    task = world.put("ababba")
    assert shape(world.put("bbb")) == []
    world.run(task)
    assert world.cached("ababba") == (6, 6)


def test_a_failed_write_leaves_no_orphaned_blocks() -> None:
    world = world_with("abab", "a")
    world.run(world.put("ababba"), fail={OpKind.H2DISK: 1})
    assert world.cached("ababba") == (6, 2)
    world.check()


def test_nothing_is_written_behind_blocks_that_are_on_their_way_to_the_host_only() -> None:
    world = World(20, 20, max_store_backlog=4)
    first = world.put("aaaa")
    kept_off_disk = world.put("bb")
    assert kept_off_disk.plan.dropped == {"ssd_write_backlog": 2}
    world.run(first)
    follower = world.put("bbbb")
    assert shape(follower) == [(OpKind.D2H, 2, 2)]
    assert follower.plan.dropped == {}
    world.run(follower)
    world.run(kept_off_disk)
    assert world.cached("bbbb") == (4, 0)


def test_a_get_of_host_blocks_is_one_copy() -> None:
    world = world_with("ababab", "")
    task = world.get("abababbb")
    assert shape(task) == [(OpKind.H2D, 0, 6)]
    assert task.plan.sources == {CPU: 6}
    assert world.run(task) == 6


def test_host_blocks_start_towards_the_gpu_while_the_disk_reads_the_rest() -> None:
    world = world_with("ab", "ababab")
    world.disk.check()
    task = world.get("ababab")
    assert shape(task) == [
        (OpKind.H2D, 0, 2),
        (OpKind.DISK2H, 2, 2),
        (OpKind.H2D, 2, 2),
        (OpKind.DISK2H, 4, 2),
        (OpKind.H2D, 4, 2),
    ]
    loads, copies = task.ops(OpKind.DISK2H), task.ops(OpKind.H2D)
    assert [op.depends_on for op in copies] == [(), (loads[0].op_id,), (loads[1].op_id,)]
    assert task.plan.sources == {CPU: 2, SSD: 4}
    assert world.run(task) == 6
    assert world.cached("ababab") == (6, 6), "what was read is on the host tier now"


def test_a_get_moves_only_what_the_engine_does_not_have() -> None:
    world = world_with("abab", "ababab")
    assert shape(world.get("ababab", start=2)) == [
        (OpKind.H2D, 2, 2),
        (OpKind.DISK2H, 4, 2),
        (OpKind.H2D, 4, 2),
    ]


def test_a_get_of_what_the_engine_has_already_moves_nothing() -> None:
    world = world_with("abab", "")
    assert shape(world.get("ababab", start=4)) == []
    assert shape(world.get("abab", start=4)) == []
    world.check()


def test_a_get_that_begins_behind_the_host_tier_publishes_nothing_there() -> None:
    world = world_with("ab", "ababab")
    task = world.get("ababab", start=3)
    assert shape(task)[0] == (OpKind.DISK2H, 3, 2)
    assert task.plan.sources == {SSD: 3}
    assert world.host.num_in_flight(prompt("ababab"), 3, 6) == 0
    assert world.run(task) == 3
    assert world.cached("ababab") == (2, 6)
    assert world.host.num_leased == 0


def test_two_gets_of_one_prompt_do_not_wait_for_each_other() -> None:
    world = world_with("", "abab")
    first, second = world.get("abab"), world.get("abab")
    assert first.writes().isdisjoint(second.writes())
    assert world.run(second) == 4
    assert world.cached("abab") == (0, 4), "the first is to publish it"
    assert world.run(first) == 4
    assert world.cached("abab") == (4, 4)


def test_a_put_does_not_move_what_a_get_is_reading_from_the_disk() -> None:
    world = world_with("", "abab")
    task = world.get("abab")
    follower = world.put("ababb")
    assert shape(follower) == [(OpKind.D2H, 4, 1), (OpKind.H2DISK, 4, 1)]
    world.run(follower)
    world.run(task)
    assert world.cached("ababb") == (5, 5)


def test_a_get_with_too_few_host_blocks_brings_the_beginning() -> None:
    world = world_with("", "ababab", host=6)
    world.put("bbb")  # holds three of the six
    task = world.get("ababab")
    assert task.plan.sources == {SSD: 3}
    assert world.run(task) == 3


def test_a_get_with_no_host_blocks_left_brings_what_the_host_has() -> None:
    world = world_with("ab", "abab", host=4)
    world.put("bb")
    task = world.get("abab")
    assert shape(task) == [(OpKind.H2D, 0, 2)]
    assert task.plan.sources == {CPU: 2}
    assert task.plan.stop == 2


def test_a_read_that_fails_costs_the_tail() -> None:
    world = world_with("a", "ababab")
    assert world.run(world.get("ababab"), fail={OpKind.DISK2H: 2}) == 3
    assert world.cached("ababab") == (3, 6)


def test_a_bad_block_is_dropped_with_all_behind_it() -> None:
    world = world_with("ab", "ababab")
    bad = int(world.disk.index.blocks(world.disk.index.match(prompt("ababab")))[3])
    world.bad_sectors.add((SSD, bad))
    assert world.run(world.get("ababab", start=1)) == 2
    assert world.cached("ababab") == (3, 3)
    world.run(world.put("ababab"))
    assert world.cached("ababab") == (6, 6)
    assert world.run(world.get("ababab")) == 6


def test_what_a_get_reads_is_not_evicted_meanwhile() -> None:
    world = world_with("abab", "", host=4)
    task = world.get("abab")
    assert shape(world.put("bbbb")) == []
    assert world.run(task) == 4
    assert world.run(world.put("bbbb")) == 4


def test_what_a_get_reads_from_the_disk_is_not_evicted_meanwhile() -> None:
    world = world_with("", "abab", disk=4)
    task = world.get("abab")
    world.run(world.put("bbbb"))
    assert world.cached("bbbb") == (4, 0)
    assert world.run(task) == 4


def test_a_prefetch_brings_blocks_to_the_host_tier_and_no_further() -> None:
    world = world_with("ab", "ababab")
    task = world.prefetch("ababab")
    assert shape(task) == [(OpKind.DISK2H, 2, 2), (OpKind.DISK2H, 4, 2)]
    assert task.plan.sources == {CPU: 2, SSD: 4}
    world.run(task)
    assert world.cached("ababab") == (6, 6)
    assert shape(world.get("ababab")) == [(OpKind.H2D, 0, 6)]


def test_a_prefetch_of_what_the_host_tier_has_moves_nothing() -> None:
    world = world_with("abab", "")
    task = world.prefetch("abab")
    assert shape(task) == []
    assert task.plan.num_blocks == 4
    world.check()


def test_roots_do_not_share_blocks() -> None:
    world = world_with("abab", "abab")
    assert shape(world.get("abab", root=OTHER_ROOT)) == []
    assert world.run(world.put("abab", root=OTHER_ROOT)) == 4
    world.check()


def test_hits_and_misses_are_counted_per_tier() -> None:
    world = world_with("ab", "abab")
    world.run(world.get("ababbb"))
    host, disk = world.host.counters, world.disk.counters
    assert (host.hit_blocks, host.miss_blocks) == (2, 4)
    assert (disk.hit_blocks, disk.miss_blocks) == (2, 2)
    world.run(world.get("ababbb"))
    assert (host.hit_blocks, host.miss_blocks) == (6, 6)
    assert (disk.hit_blocks, disk.miss_blocks) == (2, 4)


def test_prefetches_do_not_count_as_hits() -> None:
    world = world_with("ab", "abab")
    world.run(world.prefetch("abab"))
    assert world.host.counters.hit_blocks == world.disk.counters.hit_blocks == 0


@pytest.mark.parametrize("tiers", [[], [Tier(SSD, 4)], [Tier(SSD, 4), Tier(CPU, 4)]])
def test_the_host_tier_comes_first(tiers: Sequence[Tier]) -> None:
    with pytest.raises(InternalError, match="host tier"):
        Tiers(tiers)


# -- the checker ------------------------------------------------------------------------------


def _forget_a_lease(cache: TieredCache) -> None:
    cache.tiers.host.reserve(prompt("bb"), 0, 2)


def _forget_a_private_lease(cache: TieredCache) -> None:
    lease: Lease = cache.tiers.lower[0].reserve_private(ROOT, 1)
    assert len(lease) == 1


def _miscount_the_backlog(cache: TieredCache) -> None:
    cache.stores._backlog._by_tier[SSD] += 1


def _break_a_tier(cache: TieredCache) -> None:
    cache.tiers.lower[0].pool.take(1)


@pytest.mark.parametrize(
    "damage", [_forget_a_lease, _forget_a_private_lease, _miscount_the_backlog, _break_a_tier]
)
def test_check_notices_damage(damage: Callable[[TieredCache], None]) -> None:
    world = World(8, 8)
    world.run(world.put("abab"))
    world.cache.check()
    damage(world.cache)
    with pytest.raises(InternalError):
        world.cache.check()


def test_leases_of_an_open_plan_are_no_damage() -> None:
    world = World(8, 8)
    task = world.put("abab")
    assert [lease.keys for lease in task.plan.stores.values()] == [keys_of("abab")]
    world.cache.check()
